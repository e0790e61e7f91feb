"""DeepEP's interface, implemented by ProxyCCL, under DeepEP's package name."""

from deep_ep import buffers, utils
from deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size
from proxyccl.deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t

__version__ = "2.1.0"
"""The version of DeepEP whose names this package has. `Buffer` is the class of 1.2.1, which 2.1.0 still has."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
