"""The handles that a dispatch returns for its combine. Callers pass them on; some read them as DeepEP's tuples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch

from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.deep_ep.arguments import LOW_LATENCY
from proxyccl.device.errors import ArgumentError

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""Rows, or a pair of float8 rows and their scales."""


@dataclass(frozen=True)
class Routing:
    """A dispatch: the layer that made it, and its descriptor."""

    layer: EPAll2AllLayer
    desc: EPAllToAllLayoutDesc


class Handle(Sequence[Any]):
    """A sequence like DeepEP's handle, whose entries are made when they are read, because most callers do not read
    them.

    Attributes:
        routing: the dispatch.
    """

    def __init__(self, routing: Routing, entries: tuple[Callable[[], Any], ...]) -> None:
        self.routing = routing
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(entry() for entry in self._entries[index])
        return self._entries[index]()


def routing_of(handle: Any, *layouts: str) -> Routing:
    """The dispatch of a handle, which must have one of these layouts, if any are given.

    Raises:
        ArgumentError: it is not a handle that such a dispatch returned.
    """
    routing = getattr(handle, "routing", None)
    if not isinstance(routing, Routing):
        raise ArgumentError("handle", f"must be what dispatch returned, not {type(handle).__name__}")
    if layouts and routing.layer.layout not in layouts:
        mode = "low-latency" if routing.layer.layout == "padded" else "normal"
        raise ArgumentError("handle", f"is of a dispatch in {mode} mode; expected one of the other mode")
    return routing


def normal_handle(routing: Routing, is_token_in_rank: torch.Tensor) -> Handle:
    """(rank_prefix_matrix, None, None, recv_src_idx, is_token_in_rank, None).

    rank_prefix_matrix: int32 [ranks, ranks]: entry [i, j] is how many rows rank j gets from the ranks 0 to i.
    recv_src_idx: int32 [rows]: a row's token on its rank. DeepEP keeps the state of its queues in the entries that are
    None.
    """
    desc, layer = routing.desc, routing.layer
    nothing = lambda: None  # noqa: E731
    return Handle(
        routing,
        (
            lambda: _of_all_ranks(layer, _of_all_ranks(layer, desc.counts).t()).t().cumsum(0, dtype=torch.int32),
            nothing,
            nothing,
            lambda: desc.source_tokens,
            lambda: is_token_in_rank,
            nothing,
        ),
    )


def low_latency_handle(routing: Routing, max_tokens: int, hidden: int, num_experts: int) -> Handle:
    """(src_info, layout_range, max_tokens, hidden, num_experts).

    src_info: int32 [experts of this rank, ranks * max_tokens]: a row's token on its rank.
    layout_range: int64 [experts of this rank, ranks]: where the rows of each rank begin, in the upper 32 bits, and how
    many there are, in the lower. It can be read when the dispatch was received.
    """
    layer, desc = routing.layer, routing.desc
    config = layer.ep_config
    own = config.rank * config.num_experts_per_rank

    def layout_range() -> torch.Tensor:
        with LOW_LATENCY.told():
            desc.require_received(layer.ctx, "handle")
        of_sources = desc.counts[:, own : own + config.num_experts_per_rank]
        counts = _of_all_ranks(layer, of_sources).t().to(torch.int64)
        room = desc.rows // config.num_experts_per_rank  # an expert that tokens chose twice was sent more
        ends = counts.cumsum(1)
        begins = (ends - counts).clamp(max=room)
        return begins << 32 | (ends.clamp(max=room) - begins)

    return Handle(
        routing,
        (
            lambda: desc.source_tokens.view(config.num_experts_per_rank, -1),
            layout_range,
            lambda: max_tokens,
            lambda: hidden,
            lambda: num_experts,
        ),
    )


def _of_all_ranks(layer: EPAll2AllLayer, values: torch.Tensor) -> torch.Tensor:
    """Rows of the remaining ranks, with rows of zeros for the lost ones."""
    if not layer.lost_ranks:
        return values
    ranks = len(values) + len(layer.lost_ranks)
    left = [rank for rank in range(ranks) if rank not in layer.lost_ranks]
    spread = values.new_zeros(ranks, *values.shape[1:])
    spread[left] = values
    return spread
