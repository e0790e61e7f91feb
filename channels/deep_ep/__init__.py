"""DeepEP's interface: ``from proxyccl.deep_ep import Buffer``. The distribution proxyccl-deep-ep names it `deep_ep`.

It follows DeepEP 1.2.1: names, arguments, defaults, shapes and meanings. It translates them to `EPAll2AllLayer`, and
has no mechanism of its own. What can't be had raises NotImplementedError, which names it.
"""

import torch

from proxyccl.deep_ep import utils
from proxyccl.deep_ep.buffer import Buffer
from proxyccl.deep_ep.config import Config
from proxyccl.deep_ep.utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""The type of expert ids."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
