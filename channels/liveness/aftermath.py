"""The time after a failure in which kernels of other ranks may still run, and use memory of this rank.

A rank that closes a failed communicator waits for its own kernels and its proxy, and records their end in its control
segment. Until each rank of the host has recorded this or its process has ended, no allocation of this process is freed
(device/gpu/unused_memory.py), and memory that peers reach is kept even if nothing else refers to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from proxyccl.channels.segment import process_descriptors
from proxyccl.channels.segment.control import ControlSegment, Presence
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.errors import ResourceError
from proxyccl.device.gpu.unused_memory import UnusedMemory, add_hold, is_held, remove_hold
from proxyccl.device.process.threads import Thread

_logger = logging.getLogger("proxyccl")
_POLL_SECONDS, _LATE_POLL_SECONDS = 0.02, 0.5


class Aftermath:
    """One rank's state in the aftermath of a failure. Any thread of the process may query it. Memory is held only for
    the time `patience`, because a rank that never closes its failed communicator would otherwise keep all memory from
    being freed. Memory that is held when the time is over is never freed; memory released later is freed normally.
    Memory that peers reach is still kept until the peers have ended.

    Args:
        processes: the processes of the host's other ranks.
        patience: returns the seconds for which memory is held, from the first query after a failure.

    Attributes:
        over: whether the aftermath has ended, so that no peer reaches this rank's memory.
    """

    def __init__(
        self,
        rank: int,
        own: ControlSegment,
        segments: Mapping[int, ControlSegment],
        processes: Mapping[int, PeerProcess],
        patience: Callable[[], float],
    ) -> None:
        self._rank = rank
        self._own: ControlSegment | None = own  # None once this rank has ended
        self._running = dict(segments)
        self._peers = {peer: process for peer, process in processes.items() if not process.is_here}
        self._patience = patience
        self._processes: dict[int, int] = {}  # a descriptor of each peer's process
        self._kept: list[object] = []
        self._since: float | None = None
        self._late = self.over = False
        self._lock = threading.RLock()  # reentrant: garbage collection may free memory anywhere

    def begin(self) -> None:
        """Starts watching: from now on, a failure of the group keeps memory from being freed."""
        add_hold(self)

    def end(self) -> None:
        """Ends the watch, because the group has ended without a failure."""
        with self._lock:
            self._end()

    def keep(self, *kept: object) -> None:
        with self._lock:
            if not self.over:
                self._kept += kept

    def watch_processes(self) -> None:
        """Starts noticing when peers' processes end. Call this while the watcher still has the descriptors of these
        processes open.
        """
        with self._lock:
            for peer in self._running.keys() & self._peers.keys():
                try:
                    self._processes[peer] = process_descriptors.acquire(self._peers[peer])
                except ProcessLookupError:
                    del self._running[peer]
                except (OSError, ResourceError):  # without a descriptor, only the peer's own record counts
                    continue

    def follow(self, kept: Iterable[object]) -> None:
        """Starts to wait for the end of a failure's aftermath, in a thread if one can be started. Before, this rank's
        kernels and proxy must have ended, and the rank must have recorded that.

        Args:
            kept: memory that peers reach; it is released when also the peers have ended.
        """
        with self._lock:
            self._kept += kept
            self._own = None
        is_held()  # other ranks of this process may wait only for this rank's end
        if not self.over:
            try:
                Thread(self._await_end, "proxyccl-aftermath").start()
            except ResourceError as error:
                _logger.warning("rank %d: memory that peers reach is released at the next free: %s", self._rank, error)

    def _await_end(self) -> None:
        while self.holds() or not self.over:  # after `patience` no memory is held, but peers may reach kept memory
            time.sleep(_LATE_POLL_SECONDS if self._late else _POLL_SECONDS)

    def holds(self) -> bool:
        """Whether kernels of a peer may still run, and `patience` is not over."""
        with self._lock:
            if self.over or (self._own is not None and not self._own.aborted):
                return False
            self._look()
            if not self._running:
                if self._own is None:
                    self._end()
                return False
            now = time.monotonic()
            self._since = now if self._since is None else self._since
            if not self._late and now > self._since + self._patience():
                self._late = True
                self._give_up()
            return not self._late

    def _look(self) -> None:
        """Removes peers that have closed the group or whose processes have exited."""
        for peer, segment in list(self._running.items()):
            ended = segment.presence in (Presence.LEFT, Presence.STOPPED)
            if not ended and peer in self._processes:
                ended = process_descriptors.has_ended(self._processes[peer])
            if ended:
                del self._running[peer]
                if peer in self._processes:
                    process_descriptors.release(self._processes.pop(peer))

    def _give_up(self) -> None:
        count = UnusedMemory.keep_all()
        _logger.warning(
            "rank %d: ranks %s have not closed the communicator within %g s of its failure, and their kernels may "
            "still use this process's memory: %d allocations are never freed",
            self._rank,
            sorted(self._running),
            self._patience(),
            count,
        )

    def _end(self) -> None:
        self.over = True
        remove_hold(self)
        for descriptor in self._processes.values():
            process_descriptors.release(descriptor)
        self._processes.clear()
        self._running.clear()
        self._kept.clear()
