"""Checks the options of an expert-parallel layer and derives values from them, without a device and without peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.config import (
    MAX_CHOSEN_PER_RANK,
    MAX_SLOTS,
    MINUS_ONE_DROPS,
    NUMBER_DROPS,
    SCALED_ELEMENTS,
    EPConfig,
    column_of,
)
from proxyccl.channels.ranks import as_ranks
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arguments.integers import find_integer, find_items
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError

FLOAT8 = "float8_e4m3fn"
FLOAT4 = "float4_e2m1fn_x2"
MOST_BUFFERS = 64
_SCALES_ALIGNMENT = 16  # a row's scales begin at a multiple of this many bytes
_PAIR_TYPES = {FLOAT8: (FLOAT8, 1), FLOAT4: ("uint8", 2)}
"""For each type of rows that are sent with scales: the element type of arrays of such rows, and the values per element.
"""
_LAYOUTS = ("expert", "rank", "padded")
_FLAGS = "enable_local_combine", "use_aot", "grows", "keeps_outputs", "minus_one_drops", "scales_by_columns", "proxied"
_CONFIG_NAMES = {"token_dtype": "dtype", "num_experts": "num_tot_experts"}  # the layer's names for fields of EPConfig
GIVEN = -1
"""The value of `LayerOptions.placed` for a placement that the program passed to the constructor."""
_MAY_DIFFER = {"rank", "use_aot", "capacity", "placed", "config"}  # these options may differ between ranks


def as_placement(placement: Any, places: int, experts: int | None = None) -> tuple[int, ...]:
    """Returns a caller's placement as a tuple. Raises ArgumentError unless the placement has `places` numbers, each of
    which is -1 or an expert's number, and contains every expert from 0 to `experts` - 1. If `experts` is None, the
    greatest number in the placement is the last expert.
    """
    numbers = [find_integer(each) for each in find_items(placement) or ()]
    given = tuple(each for each in numbers if each is not None)
    if len(given) != len(numbers) or len(given) != places:
        raise ArgumentError("placement", f"expected {places} integers, one for each place, not {placement!r}")
    count = max(given) + 1 if experts is None else experts
    if wrong := [each for each in given if not -1 <= each < count]:
        raise ArgumentError("placement", f"{wrong[0]} is not an expert; expected 0 to {count - 1}, or -1")
    if missing := sorted(set(range(max(count, 1))) - set(given)):
        raise ArgumentError("placement", f"expert {missing[0]} has no place")
    return given


@dataclass(frozen=True)
class LayerOptions:
    """The arguments of an `EPAll2AllLayer` except the group; the class's docstring describes the arguments.

    Attributes:
        proxied: whether all rows go through the proxies.
        call_tokens: maximum number of tokens of one rank in a call; None for max_tokens.
        placed: how often `place` has changed the placement, in the layers from which this layer is made; or `GIVEN`.
        config: sizes and types, for the remaining ranks.
    """

    max_tokens: int
    hidden: int
    topk: int
    rank: int
    num_tot_experts: int
    local_world_size: int
    world_size: int
    dtype: Any = "bfloat16"
    weight_dtype: Any = "float32"
    num_sm: int = 20
    enable_local_combine: bool = False
    use_aot: bool = False
    max_recv_tokens: int | None = None
    dispatch_dtype: Any = None
    scale_elements: int = SCALED_ELEMENTS
    num_scales: int | None = None
    scales_by_columns: bool = False
    layout: str = "expert"
    grows: bool = False
    lost_ranks: Sequence[int] = ()  # the constructor makes this a sorted tuple
    placement: Sequence[int] | None = None
    expert_alignment: int | None = None
    output_buffers: int = 0
    keeps_outputs: bool = False
    minus_one_drops: bool = False
    capacity: int = 2
    proxied: bool = False
    call_tokens: int | None = None
    placed: int = GIVEN
    config: EPConfig = field(init=False)

    def __post_init__(self) -> None:
        self._set("world_size", whole_number("world_size", self.world_size, 1))
        lost = find_items(self.lost_ranks)
        if lost is None:
            raise ArgumentError("lost_ranks", f"expected ranks, not {self.lost_ranks!r}")
        self._set("lost_ranks", tuple(sorted(as_ranks(self.world_size + len(lost), lost, "lost_ranks"))))
        for name in _FLAGS:
            self._set(name, as_flag(getattr(self, name), name))
        self._set("config", self._make_config())
        if self.call_tokens is not None:
            self._set("call_tokens", whole_number("max_tokens", self.call_tokens, 1, self.config.max_tokens))
        if self.placement is not None:
            self._set("placement", as_placement(self.placement, self.places))
        self._check_sizes()
        self._check_float8()
        self._check_layout()
        self._check_buffers()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _make_config(self) -> EPConfig:
        experts = self.num_tot_experts
        if self.lost_ranks:
            experts = whole_number("num_tot_experts", experts, 1)
            if experts % self.all_ranks:
                raise ArgumentError(
                    "num_tot_experts",
                    f"must be a multiple of {self.all_ranks}, the number of ranks including lost ranks, not {experts}",
                )
            experts = experts // self.all_ranks * self.world_size
        sizes = self.max_tokens, self.hidden, self.topk, experts, self.rank, self.world_size, self.local_world_size
        try:
            return EPConfig(*sizes, self.dtype, self.weight_dtype)
        except ArgumentError as error:
            if error.argument not in _CONFIG_NAMES:
                raise
            message = str(error).removeprefix(f"{error.argument}: ")
            raise ArgumentError(_CONFIG_NAMES[error.argument], message) from None

    def _check_sizes(self) -> None:
        self._set("num_sm", whole_number("num_sm", self.num_sm, 1))
        slots = self.config.max_tokens * self.config.topk
        self._set("capacity", whole_number("capacity", self.capacity, 1, MAX_SLOTS // slots))
        self.config.require_room(self.capacity * slots, "capacity")
        if self.enable_local_combine and not self.config.is_intra_node:
            raise ArgumentError("enable_local_combine", "is only for one node; across nodes each node sends a sum")
        if self.max_recv_tokens is not None:
            self._set("max_recv_tokens", whole_number("max_recv_tokens", self.max_recv_tokens, 1, MAX_SLOTS))
            self.config.require_room(self.max_recv_tokens, "max_recv_tokens")

    def _check_float8(self) -> None:
        if self.scales_by_columns and (self.layout != "padded" or self.dispatch_dtype is None):
            raise ArgumentError("scales_by_columns", 'needs layout="padded" and dispatch_dtype')
        self._set("scale_elements", whole_number("scale_elements", self.scale_elements, 1))
        if self.num_scales is not None:
            self._set("num_scales", whole_number("num_scales", self.num_scales, 1, self.config.hidden))
        if self.dispatch_dtype is None:
            return
        name = as_dtype(self.dispatch_dtype, "dispatch_dtype").name
        if name not in _PAIR_TYPES:
            raise ArgumentError("dispatch_dtype", f"must be None, {FLOAT8} or {FLOAT4}, not {self.dispatch_dtype!r}")
        self._set("dispatch_dtype", name)
        unit = _SCALES_ALIGNMENT * _PAIR_TYPES[name][1]
        if self.config.hidden % unit:
            raise ArgumentError(
                "hidden",
                f"must be a multiple of {unit} with dispatch_dtype, not {self.config.hidden}: a row's scales follow "
                "its elements",
            )

    def _check_layout(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in _LAYOUTS:
            raise ArgumentError("layout", f"must be one of {', '.join(_LAYOUTS)}, not {self.layout!r}")
        if self.expert_alignment is not None:
            self._check_alignment(whole_number("expert_alignment", self.expert_alignment, 1))
        if self.layout == "padded":
            self._check_padding()
        if self.layout == "rank":
            self._check_rank_rows()

    def _check_alignment(self, alignment: int) -> None:
        self._set("expert_alignment", alignment)
        if self.layout != "expert":
            raise ArgumentError("expert_alignment", f'needs layout="expert", not "{self.layout}"')
        slots = self.most_tokens * self.config.topk
        if self.config.num_experts_per_rank * alignment > MAX_SLOTS - slots:
            raise ArgumentError("expert_alignment", f"{alignment} makes too many rows")

    def _check_padding(self) -> None:
        if self.max_recv_tokens is not None:
            raise ArgumentError("max_recv_tokens", 'can\'t be given with layout="padded", which has its own')
        experts = self.config.num_experts_per_rank
        rows = experts * self.padded_rows
        if rows > MAX_SLOTS:
            raise ArgumentError(
                "max_tokens",
                f"{self.config.max_tokens} tokens of {self.all_ranks} ranks for each of {experts} experts make "
                f"too many padded rows; expected at most {MAX_SLOTS}",
            )
        self.config.require_room(rows, "max_tokens")

    def _check_rank_rows(self) -> None:
        if self.config.weight.name != "float32":
            raise ArgumentError("weight_dtype", f'must be float32 with layout="rank", not {self.config.weight}')
        experts = self.config.num_experts_per_rank
        if experts > MAX_CHOSEN_PER_RANK:
            raise ArgumentError(
                "num_tot_experts",
                f'must be at most {MAX_CHOSEN_PER_RANK} of each rank with layout="rank", not {experts}',
            )

    def _check_buffers(self) -> None:
        self._set("output_buffers", whole_number("output_buffers", self.output_buffers, 0, MOST_BUFFERS))
        if self.output_buffers and self.layout != "rank":
            raise ArgumentError("output_buffers", 'needs layout="rank"')
        if self.keeps_outputs and not self.output_buffers:
            raise ArgumentError("keeps_outputs", "needs output_buffers")

    # -- derived values ---

    @property
    def compared(self) -> dict[str, int | float | bool | str | None]:
        """Returns the values that must be the same on all ranks, by the layer's argument names."""
        given = {name: value for name, value in asdict(self).items() if name not in _MAY_DIFFER}
        given["lost_ranks"] = str(self.lost_ranks)
        given["placement"] = self.placement is not None  # `agree_on_placement` compares the placements themselves
        return given | self.config.compared(_CONFIG_NAMES)

    @property
    def all_ranks(self) -> int:
        return self.world_size + len(self.lost_ranks)

    @cached_property
    def places(self) -> int:
        """The number of places for experts, including the places of lost ranks."""
        return self.config.num_experts_per_rank * self.all_ranks

    @cached_property
    def all_experts(self) -> int:
        """The number of experts that tokens can choose, including experts of lost ranks."""
        return self.places if self.placement is None else max(self.placement) + 1

    @cached_property
    def most_tokens(self) -> int:
        """The maximum number of tokens of all ranks in one dispatch."""
        return self.world_size * self.config.max_tokens

    @cached_property
    def most_of_call(self) -> int:
        return self.call_tokens or self.config.max_tokens

    @cached_property
    def padded_rows(self) -> int:
        """If rows are padded, the number of rows that each expert has room for; else 0."""
        return self.all_ranks * self.most_of_call if self.layout == "padded" else 0

    @cached_property
    def scale_column(self) -> int:
        """With scales_by_columns, the number of scales from one column's start to the next, a multiple of 4; otherwise
        0.
        """
        return column_of(self.padded_rows) if self.scales_by_columns else 0

    @cached_property
    def fixed_rows(self) -> int | None:
        """The number of rows of every output; None if outputs have exactly the received rows."""
        return self.config.num_experts_per_rank * self.padded_rows or self.max_recv_tokens

    @cached_property
    def by_rank(self) -> bool:
        """Whether a rank receives one row for each token that has an expert on that rank."""
        return self.layout == "rank"

    @cached_property
    def kernel_config(self) -> EPConfig:
        """The sizes as kernels see them. Kernels that send one row per rank treat each rank as one expert."""
        return replace(self.config, num_experts=self.world_size) if self.by_rank else self.config

    @cached_property
    def quantized(self) -> bool:
        return self.dispatch_dtype is not None

    @cached_property
    def scales(self) -> int:
        """The number of scales of a row, each of 4 bytes; 0 without dispatch_dtype."""
        if not self.quantized:
            return 0
        return self.num_scales or -(-self.config.hidden // self.scale_elements)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row; 0 if rows travel without scales."""
        return 4 * self.scales

    @cached_property
    def pair_dtype(self) -> str:
        """With dispatch_dtype, the element type of arrays of rows."""
        return _PAIR_TYPES[self.dispatch_dtype][0]

    @cached_property
    def pair_width(self) -> int:
        """With dispatch_dtype, the number of elements of a row in an array of `pair_dtype`; each element has one
        byte."""
        return self.config.hidden // _PAIR_TYPES[self.dispatch_dtype][1]

    @cached_property
    def quantizes(self) -> bool:
        """Whether the layer itself quantizes tokens, to float8."""
        by_block = self.scale_elements == SCALED_ELEMENTS and self.config.hidden == self.scales * SCALED_ELEMENTS
        return by_block and self.dispatch_dtype == FLOAT8

    @property
    def dropping_ids(self) -> int:
        if self.minus_one_drops:
            return MINUS_ONE_DROPS
        return NUMBER_DROPS | MINUS_ONE_DROPS if self.by_rank else NUMBER_DROPS
