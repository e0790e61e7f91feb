"""Detects waits for peers that make no more calls, because they have closed the communicator or their program exits."""

from __future__ import annotations

import math
from collections.abc import Callable

from proxyccl.channels.calls.launches import Launches
from proxyccl.channels.joining.meeting import Meeting
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.segment.call_log import counts_in
from proxyccl.channels.segment.control import Presence

_LOOK_SECONDS = 0.25


class VainWaits:
    """Makes a group fail if this rank waits for peers that will make no more calls. The watcher's thread calls `look`.

    The call log reveals waits of collectives. Transfers are not logged, so `linger` bounds a wait for a transfer, but
    only while the group is being closed, because until then a peer may compute for a long time before its next
    transfer.

    Attributes:
        makes_transfers: whether the program makes transfers between pairs of ranks.
    """

    def __init__(self, meeting: Meeting, failure: FailureState, launches: Launches) -> None:
        self._meeting, self._failure, self._launches = meeting, failure, launches
        self._linger = meeting.options.linger
        self.makes_transfers = False
        self._leaving = False
        self._work_ends_by = math.inf
        self._next_look = 0.0

    def begin(self) -> None:
        """Records that the closing group waits for its work, until `end` is called."""
        self._leaving = True

    def end(self) -> None:
        self._leaving, self._work_ends_by = False, math.inf

    def bound_transfers(self, now: float) -> None:
        """Limits the remaining wait for transfers to `linger` seconds, because the peer may itself wait for a transfer
        while the peer's program exits.
        """
        if self.makes_transfers and self._linger is not None:
            self._work_ends_by = now + self._linger

    def look(self, now: float, all_have_left: Callable[[], bool]) -> None:
        """Makes the group fail if this rank waits for peers that will make no more calls."""
        if self._leaving and self.makes_transfers and self._work_ends_by == math.inf and all_have_left():
            self.bound_transfers(now)
        if now > self._work_ends_by:
            self._work_ends_by = math.inf
            self._failure.abort(f"it ended here, and its work did not end within {self._linger:g} s")
        if now >= self._next_look and self._failure.usable:
            self._next_look = now + _LOOK_SECONDS
            self._compare_calls()

    def _compare_calls(self) -> None:
        calls = sum(counts_in(self._meeting.control).values())
        for peer, segment in self._meeting.segments.items():  # a peer that has set LEFT makes no more calls
            if segment.presence is Presence.LEFT and calls > sum(counts_in(segment).values()):
                self._note(peer)
                return

    def _note(self, peer: int) -> None:
        ((_, call),) = self._launches.recent_calls(1) or [(0, {"collective": "a collective"})]
        what = f"calls {call['collective']}, and rank {peer} has closed the communicator or ended its program"
        self._failure.file_mismatch(peer, lambda this_rank, _: f"{this_rank} {what}")
