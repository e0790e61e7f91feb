"""What the ranks of an expert-parallel layer must have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proxyccl.device._native import lib
from proxyccl.device.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError

TOKEN_DTYPES = ("bfloat16", "float16", "float32", "float64")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_TOPK: int = lib.PROXYCCL_MAX_TOPK
_MAX_SLOTS = 2**31 - 1  # rows and slots are 32-bit numbers in the tables
_MAX_TOKENS = 2**24  # kernels multiply them by the number of their blocks in 32 bits


@dataclass(frozen=True)
class EPConfig:
    """Sizes and types of an expert-parallel layer.

    Attributes:
        max_tokens: the most tokens of one rank in one dispatch.
        hidden: elements of a token.
        topk: experts that each token chooses, 1 to 16.
        num_experts: experts of all ranks together; a multiple of world_size. Rank r has those from
            r * num_experts_per_rank on.
        rank: this rank.
        world_size: number of ranks.
        local_world_size: number of ranks of a node.
        token_dtype: "bfloat16", "float16", "float32" or "float64" (a name, or torch's or numpy's type).
        weight_dtype: of the routing weights: one of the same.
        offset_dtype: of the descriptor's tables: int32.

    Raises:
        ArgumentError: one of them is wrong, by itself or beside the others.
    """

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    rank: int
    world_size: int
    local_world_size: int
    token_dtype: Any = "bfloat16"
    weight_dtype: Any = "float32"
    offset_dtype: Any = "int32"

    def __post_init__(self) -> None:
        for argument in ("max_tokens", "hidden", "topk", "num_experts", "world_size", "local_world_size"):
            value = getattr(self, argument)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(argument, f"must be a positive integer, not {value!r}")
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            raise ArgumentError("rank", f"must be from 0 to {self.world_size - 1}, not {self.rank!r}")
        if self.world_size % self.local_world_size:
            raise ArgumentError(
                "local_world_size", f"{self.local_world_size} does not divide the world size {self.world_size}"
            )
        if self.num_experts % self.world_size:
            raise ArgumentError(
                "num_experts", f"{self.num_experts} experts can't be shared evenly by {self.world_size} ranks"
            )
        if self.topk > MAX_TOPK:
            raise ArgumentError("topk", f"{self.topk} is more than {MAX_TOPK}")
        if self.max_tokens > _MAX_TOKENS:
            raise ArgumentError("max_tokens", f"{self.max_tokens} is more than {_MAX_TOKENS}")
        if self.world_size * self.max_tokens * self.topk > _MAX_SLOTS:
            raise ArgumentError(
                "max_tokens",
                f"{self.max_tokens} tokens of {self.topk} experts on {self.world_size} ranks are more than "
                f"{_MAX_SLOTS} rows",
            )
        for argument, known in (
            ("token_dtype", TOKEN_DTYPES),
            ("weight_dtype", WEIGHT_DTYPES),
            ("offset_dtype", ("int32",)),
        ):
            element = as_dtype(getattr(self, argument), argument)
            if element.name not in known:
                raise ArgumentError(argument, f"{element} is none of {', '.join(known)}")

    @property
    def num_experts_per_rank(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.world_size

    @property
    def is_intra_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.world_size == self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @cached_property
    def token(self) -> DType:
        """`token_dtype` as the library knows it."""
        return as_dtype(self.token_dtype)

    @cached_property
    def weight(self) -> DType:
        """`weight_dtype` as the library knows it."""
        return as_dtype(self.weight_dtype)
