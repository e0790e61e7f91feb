"""What a ring holds, read from the side: neither its producers nor the proxy notice.

A slot that was taken is not cleared, so the ring also holds the last triggers that the proxy acted on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from proxyccl.proxy.trigger import PARITY_SHIFT, Trigger, full_parity


class RingWords(Protocol):
    """A ring's memory, mapped here; see `proxyccl.proxy.fifo.Ring`."""

    size: int
    size_log2: int
    slots_host: int
    tail_host: int


@dataclass(frozen=True)
class RingContents:
    """A ring at one moment.

    Attributes:
        size: slots.
        taken: triggers that the proxy has taken so far, which is the ticket of the next one.
        full: slots with triggers that it has not taken.
        waiting: the first of those, with their tickets, in order.
        recent: the last that it took, with their tickets, in order.
    """

    size: int
    taken: int
    full: int
    waiting: list[tuple[int, Trigger]]
    recent: list[tuple[int, Trigger]]


def look(ring: RingWords, count: int = 16) -> RingContents:
    """A ring as it is now, with at most `count` triggers of each kind. Nobody may close it meanwhile."""
    slots = np.frombuffer(ctypes.string_at(ring.slots_host, 16 * ring.size), np.uint64).reshape(-1, 2)
    # After the slots: what is taken meanwhile is not counted as waiting.
    taken = ctypes.c_uint64.from_address(ring.tail_host).value
    waiting = _held(slots, ring, np.arange(taken, taken + ring.size, dtype=np.uint64))
    recent = _held(slots, ring, np.arange(max(0, taken - count), taken, dtype=np.uint64))

    def decoded(tickets: list[int]) -> list[tuple[int, Trigger]]:
        return [(ticket, Trigger.decode(*map(int, slots[ticket % ring.size]))) for ticket in tickets]

    return RingContents(ring.size, taken, len(waiting), decoded(waiting[:count]), decoded(recent))


def _held(slots: Any, ring: RingWords, tickets: Any) -> list[int]:
    """Those of the tickets whose trigger lies in its slot: the parity bit there is that of the ticket's lap."""
    parities = slots[tickets % np.uint64(ring.size), 1] >> np.uint64(PARITY_SHIFT)
    return [int(ticket) for ticket in tickets[parities == full_parity(tickets, ring.size_log2)]]
