"""The module of `ElasticBuffer` in DeepEP 2."""

from proxyccl.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
