"""Transfers weights from trainers to samplers, between shardings: ``from proxyccl.weights import WeightSource``.

This module contains only the public names. docs/weights.md is an introduction.
"""

from proxyccl.channels.weights.card import tensors_of
from proxyccl.channels.weights.parts import Part
from proxyccl.channels.weights.plan import Cast, Read, plan
from proxyccl.channels.weights.sharding import Box, Replicate, Shard, Sharding
from proxyccl.channels.weights.source import WeightSource
from proxyccl.channels.weights.target import Received, WeightTarget

__all__ = [
    "Box",
    "Cast",
    "Part",
    "Read",
    "Received",
    "Replicate",
    "Shard",
    "Sharding",
    "WeightSource",
    "WeightTarget",
    "plan",
    "tensors_of",
]
