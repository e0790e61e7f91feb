"""The log of a rank's collective calls, by which ranks detect different calls before they wait for each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxyccl.channels.segment.control import CALLS_OFFSET, COUNTS_OFFSET, ControlSegment
from proxyccl.proxy._engine import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._engine import (  # these names exist only in the stub, not in cffi
        Pointer,
        ProxycclCallEntryPointer,
        ProxycclCallPointer,
    )

CALL_ABORTED: int = lib.PROXYCCL_CALL_ABORTED
CALL_DIFFERS: int = lib.PROXYCCL_CALL_DIFFERS
CALL_DIFFERED: int = lib.PROXYCCL_CALL_DIFFERED
_LAST_NUMBER = (1 << 64) - 1
LOG_ENTRIES: int = lib.PROXYCCL_CALL_LOG_ENTRIES


class CallLog:
    """This rank's log of collective calls, and the logs of the peers on its host (calls.h).

    Args:
        peers: the segments of the other ranks, by rank.
    """

    def __init__(self, own: ControlSegment, peers: dict[int, ControlSegment], rank: int) -> None:
        self._ranks = list(peers)
        logs = [ffi.cast("ProxycclCallEntry *", segment.host_address(CALLS_OFFSET)) for segment in peers.values()]
        self._logs = ffi.new("ProxycclCallEntry *[]", [*logs, ffi.NULL])
        self._callers = ffi.new("ProxycclCallers *")
        self._callers.control = ffi.cast("ProxycclControl *", own.host_pointer)
        self._callers.own = ffi.cast("ProxycclCallEntry *", own.host_address(CALLS_OFFSET))
        self._callers.counts = ffi.cast("ProxycclCallCount *", own.host_address(COUNTS_OFFSET))
        self._callers.peers, self._callers.peer_count = self._logs, len(logs)
        self.issue: Callable[[ProxycclCallPointer, Pointer, int], int] = functools.partial(
            lib.proxyccl_calls_issue, self._callers
        )
        """issue(call, launch, stream): calls `agree`, and launches a prepared launch; waits for it if `stream` is the
        stream of `wait_on`. Returns the driver's status, or a nonzero result of `agree`.
        """
        self.ring: Callable[[ProxycclCallPointer, Pointer, int], int] = functools.partial(
            lib.proxyccl_calls_ring, self._callers
        )
        """ring(call, operations, stream): like `issue`, with prepared stream operations instead of a launch."""

    def addresses(self, *, operations: bool) -> tuple[int, int]:
        """Returns the address of a C function (of `ring` if `operations` is true, else of `issue`), and the address of
        the function's first argument.
        """
        function = ffi.addressof(lib, "proxyccl_calls_ring" if operations else "proxyccl_calls_issue")
        return int(ffi.cast("uintptr_t", function)), int(ffi.cast("uintptr_t", self._callers))

    def wait_on(self, stream: int, synchronize: int) -> None:
        """Makes `issue` and `ring` wait until the call is complete if they are given this stream.

        Args:
            stream: the stream's handle.
            synchronize: address of the driver's call that waits for a stream.
        """
        lib.proxyccl_calls_wait_on(self._callers, stream, synchronize)

    def agree(self, call: ProxycclCallPointer) -> int:
        """Logs a call and compares it with the peers' calls. Returns 0, CALL_ABORTED, CALL_DIFFERS or CALL_DIFFERED."""
        return int(lib.proxyccl_calls_agree(self._callers, call))

    @property
    def count(self) -> int:
        """The number of calls that this rank has made. For any thread."""
        return int(self._callers.sequence)

    def recent(self, count: int) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the last calls of this rank in order, each with its number; the first call has number 1. For any
        thread."""
        return _read(self._callers.own, self.count, count)

    def difference(self) -> tuple[int, tuple[int, ...]]:
        """After `agree` has returned CALL_DIFFERS or CALL_DIFFERED, returns the rank whose call differs, and that
        call's fields.
        """
        return self._ranks[self._callers.differing], tuple(self._callers.different.fields)


def calls_in(segment: ControlSegment, count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the last calls of a segment's rank, in the format of `recent`. Calls that the rank overwrites during the
    reading are missing.
    """
    last = sum(counts_in(segment).values())
    if last > _LAST_NUMBER:  # this isn't the segment of a rank
        return []
    return _read(ffi.cast("ProxycclCallEntry *", segment.host_address(CALLS_OFFSET)), last, count)


def counts_in(segment: ControlSegment) -> dict[int, int]:
    """Returns the number of calls of a segment's rank by collective (a call's first field); key 0 is the number for all
    other collectives. A call in a graph is counted at its capture, but not at replays.
    """
    counts = ffi.cast("ProxycclCallCount *", segment.host_address(COUNTS_OFFSET))
    found = {each.collective: each.calls for each in (counts + i for i in range(lib.PROXYCCL_CALL_KINDS + 1))}
    return {collective: calls for collective, calls in found.items() if calls}


def _read(log: ProxycclCallEntryPointer, last: int, count: int) -> list[tuple[int, tuple[int, ...]]]:
    call, found = ffi.new("ProxycclCall *"), []
    for sequence in range(max(1, last - count + 1), last + 1):
        if lib.proxyccl_calls_read(log, sequence, call):
            found.append((sequence, tuple(call.fields)))
    return found


def encode_fields(fields: tuple[int, ...]) -> ProxycclCallPointer:
    return ffi.new("ProxycclCall *", [fields])
