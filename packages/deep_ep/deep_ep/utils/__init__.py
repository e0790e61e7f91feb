"""The names that programs import from deep_ep.utils. This package has the modules that programs of DeepEP 2 import:
helpers for tests and benchmarks, which no buffer needs.
"""

from deep_ep.utils.envs import check_nvlink_connections
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
