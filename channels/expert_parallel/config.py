"""What the ranks of an expert-parallel layer must have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proxyccl.device._native import lib
from proxyccl.device.dtypes import DType, as_dtype, token_dtypes
from proxyccl.device.errors import ArgumentError

TOKEN_DTYPES = WEIGHT_DTYPES = tuple(token_dtypes())
SCALED_DTYPES = ("float16", "bfloat16")
"""Of tokens that a dispatch makes float8 rows of while it stores them."""
MAX_TOPK: int = lib.PROXYCCL_MAX_TOPK
MAX_CHOSEN_PER_RANK: int = lib.PROXYCCL_EXPERT_COUNTERS - 2 * lib.PROXYCCL_MAX_EXPERT_RANKS
"""Experts of a rank, where each rank gets one row of a token: a block counts them in shared memory."""
MAX_SLOTS = 2**31 - 1  # rows and slots are 32-bit integers in the tables
_MAX_TOKENS = 2**24  # kernels multiply the number of tokens by that of blocks, in 32 bits


@dataclass(frozen=True)
class EPConfig:
    """Sizes and types of an expert-parallel layer.

    Attributes:
        max_tokens: the most tokens of one rank in one dispatch.
        hidden: elements of a token's row.
        topk: experts that each token chooses, 1 to 16.
        num_experts: experts of all ranks together; a multiple of world_size. Rank r has those from
            r * num_experts_per_rank on.
        rank: this rank.
        world_size: number of ranks.
        local_world_size: number of ranks of a node.
        token_dtype: "bfloat16", "float16", "float32" or "float64" (a name, or torch's or numpy's type).
        weight_dtype: of the routing weights: one of the same.
        offset_dtype: of the descriptor's tables; only int32.

    Raises:
        ArgumentError: a value is out of range, or does not fit another one.
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
                "local_world_size", f"must divide the world size {self.world_size}, not {self.local_world_size}"
            )
        if self.num_experts % self.world_size:
            raise ArgumentError(
                "num_experts", f"must be a multiple of the world size {self.world_size}, not {self.num_experts}"
            )
        if self.topk > MAX_TOPK:
            raise ArgumentError("topk", f"must be at most {MAX_TOPK}, not {self.topk}")
        if self.max_tokens > _MAX_TOKENS:
            raise ArgumentError("max_tokens", f"must be at most {_MAX_TOKENS}, not {self.max_tokens}")
        if self.world_size * self.max_tokens * self.topk > MAX_SLOTS:
            raise ArgumentError(
                "max_tokens",
                f"{self.max_tokens} tokens of {self.topk} experts on {self.world_size} ranks make too many rows; "
                f"expected at most {MAX_SLOTS}",
            )
        for argument, known in (
            ("token_dtype", TOKEN_DTYPES),
            ("weight_dtype", WEIGHT_DTYPES),
            ("offset_dtype", ("int32",)),
        ):
            element = as_dtype(getattr(self, argument), argument)
            if element.name not in known:
                raise ArgumentError(argument, f"must be one of {', '.join(known)}, not {element}")

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
