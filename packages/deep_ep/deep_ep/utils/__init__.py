"""The names that programs import from deep_ep.utils. This package's modules, which programs for DeepEP 2 import, are
helpers for tests and benchmarks.
"""

from deep_ep.utils.envs import check_nvlink_connections
from deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
