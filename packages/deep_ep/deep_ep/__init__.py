"""DeepEP's interface, by ProxyCCL. Programs, and the workers that they spawn, import it by this name."""

from deep_ep import utils
from proxyccl.deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
