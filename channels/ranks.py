"""Checks the ranks that a caller passes."""

from __future__ import annotations

from typing import Any

from proxyccl.device.arguments.integers import as_integer, find_integer, find_items
from proxyccl.device.errors import ArgumentError


def as_rank(world_size: int, rank: Any, argument: str) -> int:
    if type(rank) is int and 0 <= rank < world_size:  # handles the common case fast
        return rank
    return as_integer(rank, argument, f"must be a rank from 0 to {world_size - 1}", 0, world_size - 1)


def as_ranks(world_size: int, ranks: Any, argument: str) -> list[int]:
    """Returns the ranks as a list, in the caller's order. Raises ArgumentError unless all items are ranks and no rank
    occurs twice."""
    given = find_items(ranks)
    if given is None:
        raise ArgumentError(argument, f"expected ranks, not {ranks!r}")
    members: list[int] = []
    for rank in given:
        member = find_integer(rank)
        if member is None or not 0 <= member < world_size:
            raise ArgumentError(argument, f"{rank!r} is not a rank; expected 0 to {world_size - 1}")
        if member in members:
            raise ArgumentError(argument, f"rank {member} is given twice; expected different ranks")
        members.append(member)
    return members
