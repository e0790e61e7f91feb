"""The module of the events that calls wait for."""

from proxyccl.deep_ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
