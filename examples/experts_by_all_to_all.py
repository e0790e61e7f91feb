"""Sends tokens to their experts and back by `dist.all_to_all_single`; `moe_training.py` compares ProxyCCL with it.

Each rank sorts its slots (the choices of an expert by a token) by expert, sends a row for each slot, and sorts the rows
that it receives by expert. Without a fixed number of rows, the ranks first exchange the numbers of rows that they send,
for which the CPU waits. With a fixed number of rows, slots that don't fit are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Splits = list[int] | None
"""The numbers of rows sent to and received from each rank; None for equal numbers."""


def aligned(counts: Tensor, alignment: int) -> Tensor:
    """Returns each number, rounded up to a multiple of `alignment`."""
    return (counts + alignment - 1) // alignment * alignment


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, come: Splits, go: Splits, group: Any) -> Tensor:
        ctx.way = go, come, group
        out = rows.new_empty(len(rows) if come is None else sum(come), *rows.shape[1:])
        dist.all_to_all_single(out, rows, come, go, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _Moved.apply(grad.contiguous(), *ctx.way), None, None, None


class AllToAll:
    """See `moe_training.Exchange`.

    Args:
        group: the ranks.
        experts: the number of experts of all ranks together; each rank has the same number.
        alignment: each expert's first row is a multiple of this number.
        rows_for_each_rank: the fixed number of rows that each rank sends to each rank; None to send as many as there
            are.
    """

    def __init__(self, group: Any, experts: int, alignment: int, *, rows_for_each_rank: int | None) -> None:
        self._group, self._alignment, self._fixed = group, alignment, rows_for_each_rank
        self._ranks = dist.get_world_size(group)
        self._local = experts // self._ranks

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Exchange`."""
        slots = ids.flatten()
        order = slots.argsort(stable=True)
        sorted_ids = slots[order]
        if self._fixed is None:
            place, room, come, go = torch.arange(len(slots), device=x.device), len(slots), *self._splits(sorted_ids)
        else:
            place, room, come, go = self._places(sorted_ids), self._ranks * self._fixed, None, None
        # Slots that don't fit write to the last row, which is not sent.
        rows = x.new_zeros(room + 1, x.shape[1]).index_copy(0, place, x[order // ids.shape[1]])
        experts = torch.full_like(place.new_empty(room + 1), self._local).index_copy(0, place, sorted_ids % self._local)
        came = _Moved.apply(rows[:room], come, go, self._group)
        came_experts = _Moved.apply(experts[:room], come, go, self._group)

        by_expert = came_experts.argsort(stable=True)
        bounds = torch.searchsorted(came_experts[by_expert], torch.arange(self._local + 1, device=x.device))
        ends = aligned(bounds.diff(), self._alignment).cumsum(0)
        shifts = torch.cat([ends.new_zeros(1), ends]) - bounds  # the last entry is the shift of unsent rows
        target = torch.empty_like(by_expert)
        target[by_expert] = torch.arange(len(by_expert), device=x.device) + shifts[came_experts[by_expert]]
        grouped = x.new_zeros(len(came) + self._local * self._alignment, x.shape[1]).index_copy(0, target, came)
        return grouped, ends.int(), (target, come, go, order, place, weights)

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        """See `Exchange`."""
        target, come, go, order, place, weights = state
        back = _Moved.apply(rows[target], go, come, self._group)
        back = torch.cat([back, back.new_zeros(1, back.shape[1])])
        slots = torch.empty_like(place)
        slots[order] = place
        of_token = back[slots].view(*weights.shape, -1)
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), of_token).squeeze(1)

    def _splits(self, sorted_ids: Tensor) -> tuple[list[int], list[int]]:
        bounds = torch.searchsorted(sorted_ids, torch.arange(self._ranks + 1, device=sorted_ids.device) * self._local)
        counts = bounds.diff()
        come = torch.empty_like(counts)
        dist.all_to_all_single(come, counts, group=self._group)
        return come.tolist(), counts.tolist()

    def _places(self, sorted_ids: Tensor) -> Tensor:
        """Returns the row of each slot, for a fixed number of rows per rank."""
        assert self._fixed is not None
        ranks = sorted_ids // self._local
        first = torch.searchsorted(ranks, torch.arange(self._ranks, device=ranks.device))
        number = torch.arange(len(ranks), device=ranks.device) - first[ranks]
        return torch.where(number < self._fixed, ranks * self._fixed + number, self._ranks * self._fixed)

    def check(self) -> None:
        """Does nothing, because slots that do not fit are dropped."""

    def close(self) -> None:
        """Does nothing, because no resources are held."""
