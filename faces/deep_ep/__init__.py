"""DeepEP's interface: ``from proxyccl.deep_ep import Buffer``. With the distribution proxyccl-deep-ep, programs can
also import this package as `deep_ep`.

`Buffer` has the names, arguments, defaults, shapes and meanings of DeepEP 1.2.1, and `ElasticBuffer` those of DeepEP
2.1.0. `Buffer` and `ElasticBuffer` translate their calls to calls of `EPAll2AllLayer`. A call that uses an unsupported
feature raises NotImplementedError, which names the feature.
"""

import torch

from proxyccl.deep_ep import utils
from proxyccl.deep_ep.buffer import Buffer
from proxyccl.deep_ep.config import Config
from proxyccl.deep_ep.elastic import ElasticBuffer
from proxyccl.deep_ep.elastic_handle import EPHandle
from proxyccl.deep_ep.utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""The type of expert ids."""

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
