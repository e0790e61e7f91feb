"""What a ring holds, read from the side: neither its producers nor the proxy notice.

A slot that was taken is not cleared, so the ring also holds the last triggers that the proxy acted on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.trigger import PARITY_SHIFT, Trigger, full_parity


@dataclass(frozen=True)
class RingView:
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


def look(fifo: Fifo, count: int = 16) -> RingView:
    """A ring as it is now, with at most `count` triggers of each kind. Nobody may close it meanwhile."""
    slots = np.frombuffer(ctypes.string_at(fifo.slots_host, 16 * fifo.size), np.uint64).reshape(-1, 2)
    # After the slots: what is taken meanwhile is not counted as waiting.
    taken = ctypes.c_uint64.from_address(fifo.tail_host).value
    waiting = _held(slots, fifo, np.arange(taken, taken + fifo.size, dtype=np.uint64))
    recent = _held(slots, fifo, np.arange(max(0, taken - count), taken, dtype=np.uint64))

    def decoded(tickets: list[int]) -> list[tuple[int, Trigger]]:
        return [(ticket, Trigger.decode(*map(int, slots[ticket % fifo.size]))) for ticket in tickets]

    return RingView(fifo.size, taken, len(waiting), decoded(waiting[:count]), decoded(recent))


def _held(slots: Any, fifo: Fifo, tickets: Any) -> list[int]:
    """Those of the tickets whose trigger lies in its slot: the parity bit there is that of the ticket's lap."""
    parities = slots[tickets % np.uint64(fifo.size), 1] >> np.uint64(PARITY_SHIFT)
    return [int(ticket) for ticket in tickets[parities == full_parity(tickets, fifo.size_log2)]]
