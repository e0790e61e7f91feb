"""EPHandle, which `ElasticBuffer.dispatch` returns. The combine takes the handle, and callers read the handle's
attributes.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from proxyccl.channels.expert_parallel.config import MAX_SLOTS
from proxyccl.deep_ep.handles import Routing
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ArgumentError


class Options(NamedTuple):
    """The options of `ElasticBuffer.dispatch`, the buffer's number of ranks, and its number of scaleup ranks.

    Attributes:
        waits: whether the CPU waits for the dispatch, to learn the number of rows.
        sums_rows: whether a rank may sum a token's rows before it sends them back, so that sums are rounded twice.
        copies_ids: whether the handle gets a copy of the expert ids.
    """

    num_experts: int
    expert_alignment: int
    num_sms: int
    num_max_tokens_per_rank: int
    ranks: int
    scaleup_ranks: int
    waits: bool
    do_expand: bool
    sums_rows: bool
    copies_ids: bool

    def most_rows(self, topk: int) -> tuple[int, int]:
        """Returns two numbers: the maximum number of rows that a rank can get without do_expand, and the maximum with
        do_expand, which includes the gaps between experts.
        """
        alignment, experts = self.expert_alignment, self.num_experts // self.ranks
        rows = self.ranks * self.num_max_tokens_per_rank
        expanded = round_up(rows * min(topk, experts) + (alignment - 1) * experts, alignment)
        if expanded > MAX_SLOTS:
            argument = "expert_alignment" if rows * min(topk, experts) <= MAX_SLOTS else "num_max_tokens_per_rank"
            raise ArgumentError(argument, f"makes room for {expanded} rows; expected at most {MAX_SLOTS}")
        return rows, expanded


class EPHandle:
    """The handle of a dispatch. Only `ElasticBuffer.dispatch` makes handles.

    An attribute that is a tensor is computed on the current stream when a caller first reads it, because most callers
    read few attributes. After an asynchronous dispatch, the current stream must first wait for the dispatch's event.

    Args:
        most_rows: the result of `Options.most_rows` if the CPU did not wait for the dispatch; else None.

    Attributes:
        routing: the dispatch's layer and descriptor.
        topk_idx, do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: the arguments of the
            dispatch, with defaults replaced by the values that were used.
        num_recv_tokens_per_expert_list: the number of rows of each expert of this rank, rounded up to a multiple of the
            alignment; [] if the CPU did not wait for the dispatch.
        num_expanded_tokens: the sum of num_recv_tokens_per_expert_list; if the CPU did not wait for the dispatch, the
            largest possible sum.
        token_metadata_at_forward, channel_linked_list: None, which is DeepEP's value without scaleout ranks.
    """

    token_metadata_at_forward = channel_linked_list = None

    def __init__(
        self, routing: Routing, topk_idx: torch.Tensor, options: Options, most_rows: tuple[int, int] | None
    ) -> None:
        self.routing, self.topk_idx, self.do_expand = routing, topk_idx, options.do_expand
        self.num_experts, self.expert_alignment = options.num_experts, options.expert_alignment
        self.num_max_tokens_per_rank, self.num_sms = options.num_max_tokens_per_rank, options.num_sms
        self._most_rows, self._scaleup_ranks = most_rows, options.scaleup_ranks
        self.num_recv_tokens_per_expert_list: list[int] = []
        if most_rows is None:
            self.num_recv_tokens_per_expert_list = routing.desc.num_tokens_per_expert(options.expert_alignment)
        self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list) if most_rows is None else most_rows[1]

    @cached_property
    def num_recv_tokens(self) -> int:
        """The number of received tokens, each counted once; the largest possible number if the CPU did not wait for the
        dispatch. If the CPU waited and do_expand is set, reading the number waits for the GPU.
        """
        if self._most_rows is not None:
            return self._most_rows[0]
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1]) if self.do_expand else self.routing.desc.rows

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """int32 [scaleup ranks]: entry r is the number of tokens that came from the scaleup ranks 0 to r."""
        of_ranks = self._slot_rows.ge(0).any(2).sum(1) if self.do_expand else self.routing.desc.counts[:, self._rank]
        return of_ranks.view(-1, self._scaleup_ranks).sum(0).cumsum(0).to(torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [experts of this rank]: the number of rows of each expert."""
        desc, experts = self.routing.desc, self.routing.layer.ep_config.num_experts_per_rank
        if self.do_expand:
            first = self._rank * experts
            return desc.counts[:, first : first + experts].sum(0, dtype=torch.int32)
        chosen = (desc.local_expert_ids >= 0) & (desc.local_expert_ids < experts)  # entries of lost peers are undefined
        ids = torch.where(chosen, desc.local_expert_ids, experts).flatten().long()
        counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
        return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:experts].contiguous()

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [experts of this rank]: entry e is the sum of the numbers of rows of experts 0 to e, each rounded up to
        a multiple of the alignment. With do_expand, the number of expert e is not rounded up, so that entry e is the
        end of this expert's rows.
        """
        rows = self.num_unaligned_recv_tokens_per_expert
        aligned = (rows + self.expert_alignment - 1) // self.expert_alignment * self.expert_alignment
        ends = aligned.cumsum(0, dtype=torch.int32)
        return ends - aligned + rows if self.do_expand else ends

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32 [received tokens, 2 + topk], ordered by source rank and token. Reading this tensor waits for the
        dispatch. After a dispatch with do_cpu_sync=False, reading does not wait, and the tensor has a row for every
        token that could be received, with the rows of received tokens first.

        Column 0 is source rank * num_max_tokens_per_rank + the token's index on its source rank. Column 1 is the
        scaleup rank of the source * topk + the index of the token's last slot whose expert is on this rank. The other
        columns are, for each slot of the token, the index of the slot's row on this rank, or -1 if the slot's expert is
        on another rank; without do_expand they are all -1.
        """
        rows = self._slot_rows
        ranks, tokens, topk = rows.shape
        came = rows.ge(0).any(2).flatten()
        order = came.logical_not().to(torch.int32).sort(stable=True).indices
        if self._most_rows is None:
            order = order[: self.num_recv_tokens]
        of_tokens = rows.view(ranks * tokens, topk)[order]
        slots_here = of_tokens if self.do_expand else self.routing.desc.local_expert_ids
        last = topk - 1 - slots_here.ge(0).flip(1).to(torch.int32).argmax(1)
        source = order // tokens
        numbers = source * self.num_max_tokens_per_rank + order % tokens
        places = source % self._scaleup_ranks * topk + last
        slots = of_tokens if self.do_expand else torch.full_like(of_tokens, -1)
        return torch.cat([numbers.unsqueeze(1), places.unsqueeze(1), slots], 1).to(torch.int32)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 [tokens of this rank, topk]. In a token's last slot for a destination rank, the entry is this rank's
        number * num_max_tokens_per_rank + the number of this rank's earlier tokens for the same destination. In the
        token's other slots, the entry is -1.
        """
        ranks = self.routing.layer.ep_config.world_size
        chosen = (self.topk_idx >= 0) & (self.topk_idx < self.num_experts)
        of_slots = torch.where(chosen, self.topk_idx // (self.num_experts // ranks), ranks).long()
        again = (of_slots.unsqueeze(2) == of_slots.unsqueeze(1)).triu(1).any(2)
        goes = torch.zeros(len(of_slots), ranks + 1, dtype=torch.int32, device=of_slots.device)
        goes.scatter_(1, of_slots, 1)
        earlier = (goes.cumsum(0) - goes).gather(1, of_slots)
        numbers = self._rank * self.num_max_tokens_per_rank + earlier
        return torch.where(chosen & ~again, numbers, -1).to(torch.int32)

    @property
    def _rank(self) -> int:
        return self.routing.layer.ep_config.rank

    @cached_property
    def _slot_rows(self) -> torch.Tensor:
        """int32 [ranks, largest number of tokens, topk]: entry [r, t, s] is the index of this rank's row for slot s of
        token t of rank r, or -1 if this rank has no row for the slot.
        """
        desc = self.routing.desc
        rows: torch.Tensor = desc.slot_rows
        beyond = torch.arange(rows.shape[1], device=rows.device) >= desc.num_input_tokens_per_rank.unsqueeze(1)
        return rows.masked_fill(beyond.unsqueeze(2), -1).clamp(min=-1)
