"""Computes in plain torch the rows that each rank receives, for the tests of DeepEP's interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from proxyccl import Communicator
from support.cases.deep_ep_clients import Mixture
from support.devices import torch_device

Tensor = Any


def signature(call: Callable[..., Any]) -> str:
    """Returns a call's parameters with their defaults, without `self` and without `**` parameters."""
    return " ".join(
        each.name if each.default is each.empty else f"{each.name}={each.default}"
        for each in inspect.signature(call).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    )


def same(got: Tensor, expected: Tensor) -> None:
    """Asserts that two tensors have equal values, shape and type; for float8, equal bits."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.dtype == torch.float8_e4m3fn:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(got, expected)


@dataclass(frozen=True)
class Arrived:
    """The tokens that are routed to experts of one rank, ordered by source rank, then token.

    Attributes:
        tokens: bfloat16 [N, hidden].
        ids: int64 [N, topk]: the experts' numbers within this rank, -1 for experts of other ranks.
        weights: float32 [N, topk], zero for experts of other ranks.
        sources, numbers: int64 and int32 [N]: the rank that each token comes from, and the token's number on that rank.
        experts: number of experts of this rank.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    sources: Tensor
    numbers: Tensor
    experts: int

    @staticmethod
    def at(comm: Communicator) -> Arrived:
        """Returns the tokens that reach this rank if every rank dispatches its `Mixture`."""
        parts = []
        for source in range(comm.world_size):
            mixture = Mixture.of(source, comm.world_size, torch_device(comm))
            per_rank = mixture.experts // comm.world_size
            here = (mixture.ids >= 0) & (mixture.ids // per_rank == comm.rank)
            came = here.any(1)
            numbers = came.nonzero().flatten()
            parts.append(
                (
                    mixture.tokens[came],
                    torch.where(here, mixture.ids - comm.rank * per_rank, -1)[came],
                    torch.where(here, mixture.weights, 0)[came],
                    torch.full_like(numbers, source),
                    numbers.to(torch.int32),
                )
            )
        return Arrived(*(torch.cat(column) for column in zip(*parts, strict=True)), per_rank)

    @property
    def per_expert(self) -> list[int]:
        """The number of tokens that chose each expert."""
        return [int((self.ids == expert).sum()) for expert in range(self.experts)]

    def expanded(self, alignment: int) -> tuple[Tensor, Tensor]:
        """Returns the expanded layout, which has one row per token and chosen expert of this rank, as two tensors. The
        first has row indices, int64 [N, topk], with -1 for experts of other ranks. The second is a mask of rows, bool
        [R], that is False in the gaps between experts.
        """
        slots, end = torch.full_like(self.ids, -1), 0
        for expert, count in enumerate(self.per_expert):
            slots[self.ids == expert] = torch.arange(end, end + count, device=slots.device)
            end += -(-count // alignment) * alignment
        filled = torch.zeros(end, dtype=torch.bool, device=slots.device)
        filled[slots[slots >= 0]] = True
        return slots, filled
