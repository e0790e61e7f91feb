"""The names that programs import from deep_ep.utils."""

from proxyccl.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
