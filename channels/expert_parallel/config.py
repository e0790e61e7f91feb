"""The configuration that the ranks of an expert-parallel layer share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from proxyccl.channels.expert_parallel.arguments import MAX_NUMBER, whole_number
from proxyccl.device._native import lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.dtypes import DType, as_dtype, token_dtypes
from proxyccl.device.errors import ArgumentError

TOKEN_DTYPES = WEIGHT_DTYPES = tuple(token_dtypes())
SCALED_DTYPES = ("float16", "bfloat16")
"""The token types that a dispatch can quantize to float8 while it stores rows."""
NUMBER_DROPS: int = lib.PROXYCCL_NUMBER_DROPS
MINUS_ONE_DROPS: int = lib.PROXYCCL_MINUS_ONE_DROPS
SCALED_ELEMENTS: int = lib.PROXYCCL_SCALED_ELEMENTS
"""The number of elements that share a scale in float8 rows that the layer quantizes itself."""
MAX_TOPK: int = lib.PROXYCCL_MAX_TOPK
MOST_ADDED: int = lib.PROXYCCL_ADDED
"""The most arrays in `added` of a combine."""
MAX_CHOSEN_PER_RANK: int = lib.PROXYCCL_EXPERT_COUNTERS - 2 * lib.PROXYCCL_MAX_EXPERT_RANKS
"""The most experts of a rank with layout="rank", because a block counts their rows in shared memory."""
MAX_SLOTS = MAX_NUMBER  # rows and slots are 32-bit integers in the tables
_MAX_TOKENS = 2**24  # kernels multiply the number of tokens by the number of blocks, in 32 bits
_MAX_HIDDEN = 2**28  # kernels count a row's 16-byte words in 32 bits
MAX_EXPERTS = 2**20  # tables have an entry for each rank, or segment, and expert
_MAX_BYTES = 2**44  # the limit for all rows of a layer keeps every size of its workspace far below 2**64
_COLUMN_ALIGNMENT = 4  # in scales of 4 bytes


def column_of(rows: int) -> int:
    """Returns `rows` rounded up, so that columns with a scale for each row begin at multiples of 16 bytes."""
    return round_up(rows, _COLUMN_ALIGNMENT)


@dataclass(frozen=True)
class EPConfig:
    """The sizes and element types of an expert-parallel layer.

    Attributes:
        max_tokens: maximum number of tokens of one rank in one dispatch.
        hidden: elements of a token's row.
        topk: number of experts that each token chooses, 1 to 16.
        num_experts: number of experts of all ranks together; a multiple of world_size. Rank r has the
            num_experts_per_rank experts from r * num_experts_per_rank on.
        rank: this rank.
        world_size: number of ranks.
        local_world_size: number of ranks of a node.
        token_dtype: "bfloat16", "float16", "float32" or "float64" (a name, or torch's or numpy's type).
        weight_dtype: the type of the routing weights, one of the same four types.
        offset_dtype: the type of the descriptor's tables: always int32.

    Raises:
        ArgumentError: a value is out of range, or does not fit another value.
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
        for argument, most in (
            ("max_tokens", _MAX_TOKENS),
            ("hidden", _MAX_HIDDEN),
            ("topk", MAX_TOPK),
            ("num_experts", MAX_EXPERTS),
            ("world_size", MAX_NUMBER),
            ("local_world_size", MAX_NUMBER),
        ):
            object.__setattr__(self, argument, whole_number(argument, getattr(self, argument), 1, most))
        object.__setattr__(self, "rank", whole_number("rank", self.rank, 0, self.world_size - 1))
        if self.world_size % self.local_world_size:
            raise ArgumentError(
                "local_world_size", f"must divide the world size {self.world_size}, not {self.local_world_size}"
            )
        if self.num_experts % self.world_size:
            raise ArgumentError(
                "num_experts", f"must be a multiple of the world size {self.world_size}, not {self.num_experts}"
            )
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
        self.require_room(self.world_size * self.max_tokens, "max_tokens")

    def require_room(self, rows: int, argument: str) -> None:
        """Raises ArgumentError for `argument` if this many rows take more memory than a layer can have."""
        if rows * self.hidden * self.token.itemsize > _MAX_BYTES:
            raise ArgumentError(
                argument,
                f"asks for {rows} rows of {self.hidden} elements ({self.token}); expected at most "
                f"{_MAX_BYTES >> 40} TiB of rows",
            )

    def describe(self) -> str:
        """Returns a description of the sizes for error messages."""
        return (
            f"max_tokens {self.max_tokens}, hidden {self.hidden}, topk {self.topk}, {self.num_experts} experts, "
            f"{self.token}"
        )

    def compared(self, names: Mapping[str, str] = {}) -> dict[str, int | float | bool | str | None]:
        """Returns the values that must be the same on all ranks. `names` maps fields to the caller's names for them."""
        fields = {name: value for name, value in asdict(self).items() if name != "rank"}
        fields |= {"token_dtype": self.token.name, "weight_dtype": self.weight.name, "offset_dtype": "int32"}
        return {names.get(name, name): value for name, value in fields.items()}

    @property
    def num_experts_per_rank(self) -> int:
        """The number of experts of each rank."""
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
        """The library's element type for `token_dtype`."""
        return as_dtype(self.token_dtype)

    @cached_property
    def weight(self) -> DType:
        """The library's element type for `weight_dtype`."""
        return as_dtype(self.weight_dtype)
