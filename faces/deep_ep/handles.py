"""The handles that a dispatch returns and that its combine takes. DeepEP's handles are tuples, so some callers also
read a handle's entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from msgspec import Struct

from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.deep_ep.arguments import LOW_LATENCY
from proxyccl.device.errors import ArgumentError

Rows: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""A tensor of rows, or a pair of float8 rows and their scales."""


class Routing(Struct, frozen=True):
    """The layer that made a dispatch, and the dispatch's descriptor, which the layer's combine takes."""

    layer: EPAll2AllLayer
    desc: EPAllToAllLayoutDesc


class Handle(Sequence[Any]):
    """A sequence with the entries of DeepEP's handle. An entry is computed on the current stream when a caller reads
    it, because most callers read none. After an asynchronous dispatch, the current stream must first wait for the
    dispatch's event.
    """

    _entries: tuple[str | None, ...]
    """The names of the properties that hold the entries, in order; None for an entry that is None."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self._entry(name) for name in self._entries[index])
        return self._entry(self._entries[index])

    def _entry(self, name: str | None) -> Any:
        return None if name is None else getattr(self, name)


def routing_of(handle: Any, *layouts: str) -> Routing:
    """Returns the `Routing` that a dispatch stored in this handle. Raises ArgumentError if the object is not a handle,
    or if `layouts` is not empty and the dispatch's layer has another layout.
    """
    routing = getattr(handle, "routing", None)
    if not isinstance(routing, Routing):
        raise ArgumentError("handle", f"must be a handle that dispatch returned, not {type(handle).__name__}")
    if layouts and routing.layer.layout not in layouts:
        mode = "low-latency" if routing.layer.layout == "padded" else "normal"
        raise ArgumentError("handle", f"comes from a dispatch in {mode} mode; expected a handle of the other mode")
    return routing


class NormalHandle(Handle):
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head).

    In DeepEP each channel sends a consecutive share of a rank's tokens, and all shares have the same size. DeepEP has
    half as many channels as multiprocessors. ProxyCCL has no channels; it computes the entries that DeepEP's channels
    would give.

    rank_prefix_matrix: int32 [ranks, ranks]: entry [i, j] is the number of rows that rank j gets from the ranks 0 to i.
    channel_prefix_matrix: int32 [ranks, channels]: entry [r, c] is the number of tokens that channels 0 to c send to
        rank r.
    recv_channel_prefix_matrix: int32 [ranks, channels]: entry [r, c] is the number of rows that rank r's channels
        before channel c sent to this rank.
    recv_src_idx: int32 [rows]: the index of each row's token on the rank that sent the row.
    is_token_in_rank: bool [T, ranks]: whether each token goes to each rank.
    send_head: int32 [T, ranks]: entry [t, r] is the number of tokens of the same channel before token t that go to rank
        r; -1 if token t does not go to rank r.
    """

    _entries: tuple[str | None, ...] = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )

    def __init__(
        self, routing: Routing, is_token_in_rank: torch.Tensor, *, num_sms: int, nodes: int, has_ids: bool
    ) -> None:
        super().__init__(routing)
        self.is_token_in_rank, self.has_ids = is_token_in_rank, has_ids
        self._channels, self._nodes = max(1, num_sms // 2), nodes

    @property
    def rank_prefix_matrix(self) -> torch.Tensor:
        layer, counts = self.routing.layer, self.routing.desc.counts
        return _of_all_ranks(layer, _of_all_ranks(layer, counts).t()).t().cumsum(0, dtype=torch.int32)

    @property
    def channel_prefix_matrix(self) -> torch.Tensor:
        return _prefixes_of_channels(self.is_token_in_rank, self._channels)

    @property
    def recv_channel_prefix_matrix(self) -> torch.Tensor:
        layer, desc = self.routing.layer, self.routing.desc
        sent = desc.num_input_tokens_per_rank
        ends = desc.counts[:, layer.ep_config.rank].cumsum(0)
        of_channels = _rows_of_channels(ends, sent, self.recv_src_idx, self._channels)
        return _of_all_ranks(layer, of_channels.cumsum(1, dtype=torch.int32) - of_channels)

    @property
    def recv_src_idx(self) -> torch.Tensor:
        tokens: torch.Tensor = self.routing.desc.source_tokens
        return tokens

    @property
    def send_head(self) -> torch.Tensor:
        return _heads_of_channels(self.is_token_in_rank, self._channels)


class InternodeHandle(NormalHandle):
    """The handle of a dispatch across nodes: (is_token_in_rank, rdma_channel_prefix_matrix, gbl_channel_prefix_matrix,
    recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix,
    recv_gbl_rank_prefix_sum, None, send_rdma_head, None).

    A token is sent once to each node of its experts: to the source's counterpart, which is the rank with the same local
    rank on that node. is_token_in_rank is as in `NormalHandle`, and gbl_channel_prefix_matrix is `NormalHandle`'s
    channel_prefix_matrix.

    rdma_channel_prefix_matrix: int32 [nodes, channels]: like channel_prefix_matrix, with nodes instead of ranks.
    send_rdma_head: int32 [T, nodes]: like send_head, with nodes instead of ranks.
    recv_rdma_channel_prefix_matrix: int32 [nodes, channels]: entry [n, c] is the number of tokens that come to this
        node from channels 0 to c of the counterpart on node n.
    recv_rdma_rank_prefix_sum: int32 [nodes]: entry n is the number of tokens that come from the nodes 0 to n.
    recv_gbl_channel_prefix_matrix: int32 [ranks, channels]: entry [r, c] is the index of the first row from channel c
        of rank r.
    recv_gbl_rank_prefix_sum: int32 [ranks]: entry r is the number of rows that come from the ranks 0 to r.

    The entries that are None would describe DeepEP's queues, which ProxyCCL lacks. After ranks were lost, the two
    entries whose names begin with recv_rdma are also None.
    """

    _entries = (
        "is_token_in_rank",
        "rdma_channel_prefix_matrix",
        "channel_prefix_matrix",
        "recv_rdma_channel_prefix_matrix",
        "recv_rdma_rank_prefix_sum",
        "recv_gbl_channel_prefix_matrix",
        "recv_gbl_rank_prefix_sum",
        None,
        "send_rdma_head",
        None,
    )

    @property
    def rdma_channel_prefix_matrix(self) -> torch.Tensor:
        return _prefixes_of_channels(self._goes_to_node(), self._channels)

    @property
    def send_rdma_head(self) -> torch.Tensor:
        return _heads_of_channels(self._goes_to_node(), self._channels)

    @property
    def recv_rdma_channel_prefix_matrix(self) -> torch.Tensor | None:
        came = self._came_to_node()
        return None if came is None else torch.cat([_prefixes_of_channels(each, self._channels) for each in came])

    @property
    def recv_rdma_rank_prefix_sum(self) -> torch.Tensor | None:
        came = self._came_to_node()
        if came is None:
            return None
        return torch.cat([each.sum(0, dtype=torch.int32) for each in came]).cumsum(0, dtype=torch.int32)

    @property
    def recv_gbl_channel_prefix_matrix(self) -> torch.Tensor:
        ends = self.recv_gbl_rank_prefix_sum
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return begins.unsqueeze(1) + self.recv_channel_prefix_matrix

    @property
    def recv_gbl_rank_prefix_sum(self) -> torch.Tensor:
        layer = self.routing.layer
        return _of_all_ranks(layer, self.routing.desc.counts[:, layer.ep_config.rank]).cumsum(0, dtype=torch.int32)

    def _goes_to_node(self) -> torch.Tensor:
        in_rank = self.is_token_in_rank
        return in_rank.reshape(len(in_rank), self._nodes, in_rank.shape[1] // self._nodes).any(2)

    def _came_to_node(self) -> list[torch.Tensor] | None:
        """Returns for each node a bool tensor [tokens, 1]: whether each token of this rank's counterpart on that node
        comes to this node. Returns None after ranks were lost.
        """
        layer, desc = self.routing.layer, self.routing.desc
        if layer.lost_ranks:
            return None
        node, local_rank = divmod(layer.ep_config.rank, layer.ep_config.local_world_size)
        ranks = desc.topk_indices_tensor.div(layer.ep_config.local_world_size, rounding_mode="floor")
        tokens = desc.num_input_tokens_per_rank[local_rank :: layer.ep_config.local_world_size].tolist()
        return [(of_node[:count] == node).any(1, keepdim=True) for of_node, count in zip(ranks, tokens, strict=True)]


class LowLatencyHandle(Handle):
    """(src_info, layout_range, max_tokens, hidden, num_experts).

    src_info: int32 [experts of this rank, ranks * max_tokens]: the index of each row's token on the rank that sent the
        row.
    layout_range: int64 [experts of this rank, ranks]: the index of the first row from each rank in the upper 32 bits,
        and the number of rows from that rank in the lower 32 bits. layout_range can be read only after the dispatch's
        rows were received.
    """

    _entries = ("src_info", "layout_range", "max_tokens", "hidden", "num_experts")

    def __init__(self, routing: Routing, max_tokens: int, hidden: int, num_experts: int) -> None:
        self.routing = routing
        self.max_tokens, self.hidden, self.num_experts = max_tokens, hidden, num_experts

    @property
    def src_info(self) -> torch.Tensor:
        experts = self.routing.layer.ep_config.num_experts_per_rank
        tokens: torch.Tensor = self.routing.desc.source_tokens.view(experts, -1)
        return tokens

    @property
    def layout_range(self) -> torch.Tensor:
        layer, desc = self.routing.layer, self.routing.desc
        config = layer.ep_config
        own = config.rank * config.num_experts_per_rank
        with LOW_LATENCY.told():
            desc.require_received(layer.ctx, "handle")
        of_sources = desc.counts[:, own : own + config.num_experts_per_rank]
        counts = _of_all_ranks(layer, of_sources).t().to(torch.int64)
        room = desc.rows // config.num_experts_per_rank  # exceeded if tokens chose an expert twice
        ends = counts.cumsum(1)
        begins = (ends - counts).clamp(max=room)
        return begins << 32 | (ends.clamp(max=room) - begins)

    @cached_property
    def combine_buffer(self) -> torch.Tensor:
        desc, experts = self.routing.desc, self.routing.layer.ep_config.num_experts_per_rank
        shape = (experts, desc.rows // experts, self.hidden)
        results: torch.Tensor = desc.expert_rows.new_empty(shape, dtype=torch.bfloat16)
        return results


def _of_all_ranks(layer: EPAll2AllLayer, values: torch.Tensor) -> torch.Tensor:
    """Inserts rows of zeros for the lost ranks into `values`, which has a row for each remaining rank."""
    if not layer.lost_ranks:
        return values
    ranks = len(values) + len(layer.lost_ranks)
    left = [rank for rank in range(ranks) if rank not in layer.lost_ranks]
    spread = values.new_zeros(ranks, *values.shape[1:])
    spread[left] = values
    return spread


# Each of DeepEP's channels sends a consecutive share of a rank's tokens. Shares have the same size, except that the
# last shares may be smaller or empty.


def _prefixes_of_channels(goes: torch.Tensor, channels: int) -> torch.Tensor:
    before, tokens = _before(goes), len(goes)
    ends = (torch.arange(1, channels + 1, device=goes.device) * _share(tokens, channels)).clamp(max=tokens)
    return before[ends].t().contiguous()


def _heads_of_channels(goes: torch.Tensor, channels: int) -> torch.Tensor:
    before, share = _before(goes), max(1, _share(len(goes), channels))
    tokens = torch.arange(len(goes), device=goes.device)
    return torch.where(goes, before[tokens] - before[tokens // share * share], -1)


def _rows_of_channels(
    ends: torch.Tensor, tokens: torch.Tensor, source_tokens: torch.Tensor, channels: int
) -> torch.Tensor:
    """Returns int32 [sources, channels], the number of rows that came from each channel of each source.

    Args:
        ends: int64 [sources]: the index of the row after each source's last row.
        tokens: int [sources]: the number of tokens of each source.
        source_tokens: int [rows]: the index of each row's token on its source. Entries from index ends[-1] on may be
            undefined.
    """
    sources = len(ends)
    shares = torch.cat([(tokens.long() + channels - 1) // channels, tokens.new_ones(1)]).clamp(min=1)
    source = torch.searchsorted(ends, torch.arange(len(source_tokens), device=ends.device), right=True)
    channel = (source_tokens.long() // shares[source]).clamp(0, channels - 1)
    # The last row counts undefined entries.
    counts = torch.zeros((sources + 1) * channels, dtype=torch.int32, device=ends.device)
    counts.scatter_add_(0, source * channels + channel, torch.ones_like(source, dtype=torch.int32))
    return counts.view(-1, channels)[:sources]


def _before(goes: torch.Tensor) -> torch.Tensor:
    return torch.cat([goes.new_zeros(1, goes.shape[1], dtype=torch.int32), goes.cumsum(0, dtype=torch.int32)])


def _share(tokens: int, channels: int) -> int:
    return -(-tokens // channels)
