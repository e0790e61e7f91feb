"""The descriptor of a dispatch: the source token of each row. Combines need the descriptor."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.calls._calls import Descriptor
from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.tables import OF_ROWS, RECEIVED
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ArgumentError

NOT_RECEIVED = "its dispatch was not received; call dispatch_recv first"
_REFUSED = "its dispatch was refused and brought no rows; dispatch again"


class _Table:
    """An attribute of a descriptor: a table of ProxycclExpertLayout, as an array."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, desc: EPAllToAllLayoutDesc, _: type) -> Any:
        return desc.table(self._name)


class EPAllToAllLayoutDesc(Descriptor):
    """Describes the rows of a dispatch, for `combine` and `redispatch`.

    The tables lie on the device, in arrays of the tokens' library. Three tables are only for inspection
    (`token_dst_scatter_idx`, `topk_indices_tensor`, `send_reqs_recv_tensor`) and are made on first access, which waits
    for the dispatch, or raises ArgumentError if the dispatch was not received yet. All tables except these three are
    undefined until the dispatch has completed. A row number is an index into the output of one rank. A *counterpart* is
    the rank of another node with the same local rank as this rank.

    Attributes:
        owner: the DispatchCombineContext that made the dispatch.
        num_dispatch_token_cur_rank: T, the number of tokens that this rank dispatched.
        counts_rows: whether kernels count the received rows in `num_recv_tokens`.
        lost_slots: bool [T, topk]: the slots that were dropped because their experts' ranks are lost; None if the layer
            has neither lost ranks nor a placement. In all other fields, the numbers of ranks and experts count only the
            remaining ranks and their experts, or with a placement their places.
        chosen_rows: in the exact mode with layout="rank" or expert_alignment, for each expert of this rank, the number
            of rows whose tokens chose the expert; otherwise None.
        output_buffer: the number, from 1, of the layer's output buffer that holds the rows; 0 if no buffer does.
        stream: the dispatch's stream.
        num_input_tokens_per_rank: int32 [world_size]: the number of tokens that each rank dispatched.
        counts: int32 [world_size, num_experts]: how many slots of each rank chose each expert.
        skipped_token_mapping_indices: int32 [R]: for each row, the first row of the same token on this rank, which may
            be the row itself.
        skipped_token_topk_mapping_indices: int32 [R, topk]: if r is the first row of a token on this rank, entry [r, k]
            is the row of the token's slot k, or -1 if that slot is dropped or on another rank. If row r is not the
            first row of a token, all its entries are -1.
        local_expert_ids: with layout="rank", [R, topk] of the type of the expert ids: the local number of the expert of
            each slot of the row's token; -1 if the expert is another rank's, the slot is dropped, or the row was not
            filled. local_expert_ids is None in other layouts.
        source_tokens: with layout="rank" or "padded", int32 [R]: the number of each row's token on the source rank;
            otherwise None.
        row_slots: int32 [R]: the number, 0 to topk - 1, of the token's slot that each row is for. With
            expert_alignment, rows in gaps have -1 in row_slots, and undefined entries in all other tables.
        slot_rows: int32 [world_size, max_tokens, topk]: this rank's row for each slot of each rank's tokens; negative
            if the slot is dropped or belongs to another rank, or if there was no room for the row. Entries after a
            rank's last token are undefined.
        expert_rows: with layout="padded", int32 [experts of this rank]: the number of rows of each expert, at most the
            expert's room; otherwise None.
    """

    owner: Any
    chosen_rows: list[int] | None = None
    lost_slots: Any = None
    _scatter: Any = None
    num_input_tokens_per_rank = _Table("tokens")
    counts = _Table("counts")
    skipped_token_mapping_indices = _Table("first_rows")
    skipped_token_topk_mapping_indices = _Table("token_rows")
    local_expert_ids = _Table("row_experts")
    source_tokens = _Table("row_tokens")
    row_slots = _Table("row_slots")
    slot_rows = _Table("rows")
    expert_rows = _Table("expert_rows")

    def require_received(self, owner: object, argument: str) -> None:
        """Raises ArgumentError unless `owner` made the dispatch and has received it, so that the tables are filled."""
        if self.owner is not owner:
            raise ArgumentError(argument, "belongs to a dispatch of another layer, or of another rank")
        self._require_rows(argument)

    def _require_rows(self, argument: str) -> None:
        if self.missing is not None:
            raise ArgumentError(argument, self.missing)

    def mark_received(self, *, refused: bool = False) -> None:
        """Records that the kernels that fill the tables are queued, or with `refused`, that these kernels will never be
        queued.
        """
        self.missing = _REFUSED if refused else None

    def table(self, name: str) -> Any:
        """Returns a table as an array; None if this descriptor lacks a table of that name."""
        found = self.find(name)
        if found is None:
            return None
        (array, _, (offset, shape, strides, wide), _), arrays = found, self.owner.arrays.like(self.like)
        if name in OF_ROWS:
            shape = (self.rows, *shape[1:])
        return arrays.part(array, offset, shape, strides, arrays.int64 if wide else arrays.int32)

    def size_rows(self, rows: int) -> None:
        """Sets the number of rows. Allocates the tables that have an entry for each row, if they don't exist yet."""
        if self.find("first_rows") is None:
            begun = self.find("tokens")
            assert begun is not None  # every descriptor has this table
            tables = self.owner.tables.of_rows(rows, wide_ids=begun[-1].wide_ids)
            arrays = self.owner.arrays.like(self.like)
            array = tables.maker(arrays)()
            self.add_block(array, arrays.address(array), tables, tables.address)
        self.rows = rows

    def pointer(self, name: str) -> int:
        """Returns the address of a table. Raises KeyError for an unknown name."""
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found[1] + int(found[2][0])

    @property
    def held(self) -> list[Any]:
        """The array that holds the tables of the dispatch, and the array with the tables of its rows, which may be the
        same array.
        """
        return [found[0] for found in map(self.find, ("tokens", "first_rows")) if found is not None]

    # -- for inspection ---

    @property
    def num_recv_tokens(self) -> Any:
        """int32 [1]: the number of received rows, at most the number of the output's rows. The attribute is None in the
        exact mode, where all rows are received.
        """
        return self.table(RECEIVED) if self.counts_rows else None

    @property
    def has_gaps(self) -> bool:
        """Whether there may be empty rows between an expert's last row and the next expert's first row."""
        return bool(self.owner.tables.alignment > 1)

    def num_tokens_per_expert(self, alignment: int = 1) -> list[int]:
        """Returns, for each expert of this rank, the number of rows whose tokens chose the expert, rounded up to a
        multiple of `alignment`. A program that sorts rows by expert finds each expert's first row as the sum of the
        preceding numbers.

        Raises:
            ArgumentError: the layer is not in the exact mode, or has neither layout="rank" nor expert_alignment; or the
                alignment is not positive.
        """
        if self.chosen_rows is None:
            raise ArgumentError(
                "num_tokens_per_expert", 'needs layout="rank" or expert_alignment, without max_recv_tokens'
            )
        alignment = whole_number("alignment", alignment, 1)
        return [round_up(rows, alignment) for rows in self.chosen_rows]

    @cached_property
    def topk_indices_tensor(self) -> Any:
        """int32 [T, topk] on one node: the expert ids. Across nodes [nnodes, max_tokens, topk]: entry a has the ids of
        the counterpart on node a, and -1 past the counterpart's tokens. With layout="rank" the ids are numbers of
        ranks, and a token has each rank at most once.
        """
        ids = self._expert_ids()
        if self.owner.ep_config.is_intra_node:
            return self._upload(ids[0])
        most = self.owner.ep_config.max_tokens
        padded = [np.pad(of_node, ((0, most - len(of_node)), (0, 0)), constant_values=-1) for of_node in ids]
        return self._upload(np.stack(padded))

    @cached_property
    def token_dst_scatter_idx(self) -> Any:
        """int32 [nnodes, max_tokens, topk]: the row of each slot in the output of its expert's rank. Entry a is for the
        tokens of the counterpart on node a. If a is this rank's node, the entry has all slots; otherwise it has the
        slots of this node's experts. All other entries are -1.
        """
        self._require_rows("ep_a2a_layout_desc")
        config = self.owner.ep_config
        counts = self._download("counts").astype(np.int64)
        per_rank, own_node = config.num_experts_per_rank, config.rank // config.local_world_size
        # For each expert and source, the number of the first row on the expert's rank.
        by_rank = counts.reshape(config.world_size, config.world_size, per_rank).transpose(1, 2, 0).copy()
        came, room = by_rank.sum(-1), self.rows // per_rank if self.owner.tables.padded_rows else 0
        by_rank[..., -1] += room - came if room else -came % self.owner.tables.alignment
        flat = by_rank.reshape(config.world_size, -1)
        first = (np.cumsum(flat, axis=1) - flat).reshape(config.num_experts, config.world_size)
        rows_before = np.concatenate([[0], np.cumsum(flat.sum(axis=1))])
        tokens = self._download("tokens")
        result = np.full((config.num_nodes, config.max_tokens, config.topk), -1, np.int32)
        for node, ids in enumerate(self._expert_ids()):
            source = self.owner.nodes.counterpart(node)
            slots = ids.reshape(-1)
            kept = slots < config.num_experts
            if self._scatter is None:
                rows = np.full(slots.shape, -1, np.int64)
                order = np.argsort(slots, kind="stable")
                positions = np.empty(slots.shape, np.int64)
                ordered = slots[order]
                starts = np.searchsorted(ordered, ordered, side="left")
                positions[order] = np.arange(slots.size) - starts
                rows[kept] = first[slots[kept], source] + positions[kept]
                if room:  # the rows for which an expert had no room were left out
                    kept = kept & (rows < (slots % per_rank + 1) * room)
            else:
                begin = int(tokens[:source].sum())
                given = self.owner.arrays.download(self._scatter, "full_scatter_indices")[begin : begin + len(ids)]
                first_of_rank = rows_before[np.minimum(slots // per_rank, config.world_size - 1)]
                rows = given.reshape(-1).astype(np.int64) - first_of_rank
            if node != own_node:
                kept = kept & (slots // (per_rank * config.local_world_size) == own_node)
            result[node, : len(ids)] = np.where(kept, rows, -1).reshape(ids.shape)
        return self._upload(result)

    @cached_property
    def send_reqs_recv_tensor(self) -> Any:
        """None on one node, otherwise int32 [nnodes, 2, max_tokens]: the runs of consecutive tokens that came to this
        node from the counterpart on node a. A run's first token is in [a, 0], and its end in [a, 1]; entries past the
        last run are -1.
        """
        config = self.owner.ep_config
        if config.is_intra_node:
            return None
        own_node = config.rank // config.local_world_size
        result = np.full((config.num_nodes, 2, config.max_tokens), -1, np.int32)
        for node, ids in enumerate(self._expert_ids()):
            came = (ids // (config.num_experts_per_rank * config.local_world_size) == own_node).any(axis=1)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], came, [False]])))
            result[node, 0, : len(edges) // 2], result[node, 1, : len(edges) // 2] = edges[::2], edges[1::2]
        return self._upload(result)

    def _expert_ids(self) -> list[NDArray[np.int32]]:
        self._require_rows("ep_a2a_layout_desc")
        ids, tokens = self._download("expert_ids"), self._download("tokens")
        per_node = []
        for node in range(self.owner.ep_config.num_nodes):
            source = self.owner.nodes.counterpart(node)
            per_node.append(ids[self.owner.nodes.of(source), : int(tokens[source])])
        return per_node

    def _download(self, name: str) -> NDArray[np.int32]:
        values: NDArray[np.int32] = self.owner.arrays.download(self.table(name), name)
        return values

    def _upload(self, values: NDArray[Any]) -> Any:
        return self.owner.arrays.like(self.like).upload(np.ascontiguousarray(values, np.int32))

    def __repr__(self) -> str:
        return (
            f"<EPAllToAllLayoutDesc of dispatch {self.number}: {self.num_dispatch_token_cur_rank} tokens sent, "
            f"room for {self.rows} rows>"
        )
