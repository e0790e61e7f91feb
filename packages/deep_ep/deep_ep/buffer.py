"""The module of `Buffer` in DeepEP 1.2.1."""

from proxyccl.deep_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
