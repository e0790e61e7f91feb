"""The descriptor of one dispatch: where every row came from, for combine and for whoever wants to look."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.device._native import ffi
from proxyccl.device.arrays import ArrayView

if TYPE_CHECKING:
    from proxyccl.channels.expert_parallel.context import DispatchCombineContext

Tables = dict[str, Any]


class EPAllToAllLayoutDesc:
    """Where a dispatch put what: `combine` needs it, and `redispatch`.

    The tables lie on the device, in arrays of the library that the tokens came from. Those that are only for looking at
    (`token_dst_scatter_idx`, `send_reqs_recv_tensor`) are made when they are first asked for, which waits for the
    dispatch. Row numbers count the rows of one rank's output. A *counterpart* is the rank of another node that has
    this rank's number within it.

    Attributes:
        num_dispatch_token_cur_rank: T, the tokens that this rank dispatched.
        num_recv_tokens: int32 [1]: rows that came, at most those of the output; None in the exact mode, where the
            output has that many.
    """

    def __init__(
        self,
        context: DispatchCombineContext,
        number: int,
        tokens: int,
        like: Any,
        *,
        scatter: ArrayView | None = None,
    ) -> None:
        self._context = context
        self._like = like
        self._scatter = scatter
        self._tables: Tables = {}
        self._pointers: dict[str, int] = {}
        config = context.ep_config
        nodes, ranks = context.workspace.nodes, config.world_size
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (ranks,),
            "counts": (ranks, config.num_experts),
            "rows": (ranks, config.max_tokens, config.topk),
            "expert_ids": (nodes, config.max_tokens, config.topk),
        }
        if nodes > 1:
            shapes |= {"places": (ranks, config.max_tokens), "sent_places": (nodes, config.max_tokens)}
        for name, shape in shapes.items():
            self._allocate(name, shape)
        self.number = number
        self.num_dispatch_token_cur_rank = tokens
        self.num_recv_tokens: Any = None
        self.rows = 0

    def _allocate(self, name: str, shape: tuple[int, ...]) -> None:
        table = self._context.new_array(self._like, shape, "int32")
        self._tables[name], self._pointers[name] = table, self._context.address(table)

    def size_rows(self, rows: int) -> None:
        """Makes the tables that have an entry for each row of the output."""
        self.rows = rows
        topk = self._context.ep_config.topk
        for name, shape in (("first_rows", (rows,)), ("token_rows", (rows, topk)), ("row_slots", (rows,))):
            self._allocate(name, shape)

    @property
    def owner(self) -> DispatchCombineContext:
        """The context whose dispatch it describes."""
        return self._context

    @property
    def table_owners(self) -> tuple[Any, ...]:
        """The arrays, to be kept alive while kernels use them."""
        return tuple(self._tables.values())

    def pointer(self, name: str) -> int:
        """Address of a table."""
        return self._pointers[name]

    def fill(self, layout: Any) -> None:
        """Fills a ProxycclExpertLayout."""
        for name, pointer in self._pointers.items():
            setattr(layout, name, ffi.cast("int32_t *", pointer))

    # -- what a caller may look at ---

    @property
    def num_input_tokens_per_rank(self) -> Any:
        """int32 [world_size]: tokens that each rank dispatched."""
        return self._tables["tokens"]

    @property
    def counts(self) -> Any:
        """int32 [world_size, num_experts]: slots of each rank for each expert."""
        return self._tables["counts"]

    @property
    def skipped_token_mapping_indices(self) -> Any:
        """int32 [R]: for each row the first row of the same token on this rank, which for that one is itself."""
        return self._tables["first_rows"]

    @property
    def skipped_token_topk_mapping_indices(self) -> Any:
        """int32 [R, topk]: entry [r, k], where r is the first row of a token on this rank, is the row of its slot k; -1
        where that is elsewhere or dropped, and in the lines of other rows.
        """
        return self._tables["token_rows"]

    @property
    def row_topk_indices(self) -> Any:
        """int32 [R]: which of its token's slots each row is for, 0 to topk - 1."""
        return self._tables["row_slots"]

    @cached_property
    def topk_indices_tensor(self) -> Any:
        """int32 [T, topk] on one node: the expert ids. Across nodes [nnodes, max_tokens, topk]: entry a is of the
        tokens of the counterpart on node a, -1 past their number.
        """
        ids = self._expert_ids()
        if self._context.ep_config.is_intra_node:
            return self._upload(ids[0])
        most = self._context.ep_config.max_tokens
        padded = [np.pad(of_node, ((0, most - len(of_node)), (0, 0)), constant_values=-1) for of_node in ids]
        return self._upload(np.stack(padded))

    @cached_property
    def token_dst_scatter_idx(self) -> Any:
        """int32 [nnodes, max_tokens, topk]: the row of each slot in the output of its expert's rank: in entry a of the
        tokens of the counterpart on node a. For this rank's own node all slots; for others those of this node's
        experts. -1 elsewhere.
        """
        config, context = self._context.ep_config, self._context
        counts = self._download("counts").astype(np.int64)
        per_rank, own_node = config.num_experts_per_rank, config.rank // config.local_world_size
        # The first row for each expert from each source, on the expert's rank.
        by_rank = counts.reshape(config.world_size, config.world_size, per_rank).transpose(1, 2, 0)
        flat = by_rank.reshape(config.world_size, -1)
        first = (np.cumsum(flat, axis=1) - flat).reshape(config.num_experts, config.world_size)
        rows_before = np.concatenate([[0], np.cumsum(flat.sum(axis=1))])
        tokens = self._download("tokens")
        result = np.full((config.num_nodes, config.max_tokens, config.topk), -1, np.int32)
        for node, ids in enumerate(self._expert_ids()):
            source = context.counterpart(node)
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
            else:
                begin = int(tokens[:source].sum())
                given = context.download_view(self._scatter)[begin : begin + len(ids)].reshape(-1).astype(np.int64)
                rows = given - rows_before[np.minimum(slots // per_rank, config.world_size - 1)]
            if node != own_node:
                kept = kept & (slots // (per_rank * config.local_world_size) == own_node)
            result[node, : len(ids)] = np.where(kept, rows, -1).reshape(ids.shape)
        return self._upload(result)

    @cached_property
    def send_reqs_recv_tensor(self) -> Any:
        """None on one node. Else int32 [nnodes, 2, max_tokens]: for each node the runs of consecutive tokens of the
        counterpart there that came to this node, first tokens in [a, 0] and ends in [a, 1]; -1 past their number.
        """
        config = self._context.ep_config
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
        """For each node the ids of its counterpart's tokens."""
        context = self._context
        ids, tokens = self._download("expert_ids"), self._download("tokens")
        per_node = []
        for node in range(context.ep_config.num_nodes):
            source = context.counterpart(node)
            per_node.append(ids[context.node_of(source), : int(tokens[source])])
        return per_node

    def _download(self, name: str) -> NDArray[np.int32]:
        return self._context.download(self._tables[name])

    def _upload(self, values: NDArray[Any]) -> Any:
        return self._context.upload(self._like, np.ascontiguousarray(values, np.int32))

    def __repr__(self) -> str:
        return (
            f"<EPAllToAllLayoutDesc of dispatch {self.number}: {self.num_dispatch_token_cur_rank} tokens sent, "
            f"room for {self.rows} rows>"
        )
