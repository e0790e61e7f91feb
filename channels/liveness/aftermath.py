"""Keeps memory of this rank after a failure, as long as kernels of other ranks may use it (the aftermath).

A rank that closes a failed communicator waits for its own kernels and its proxy to end, and then records in its control
segment that they have ended. No allocation of this process is freed (device/gpu/unused_memory.py) until each rank of
the host has recorded the end of its kernels, or the rank's process has ended. Memory that peers can access is kept even
if nothing else refers to it.
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
    """One rank's state in the aftermath of a failure. Any thread may call the methods of this class. If a peer does not
    close the failed communicator within `patience` seconds, allocations that the program has released by then are never
    freed, and allocations that it releases later are freed normally. Memory that peers can access is kept until the
    peers' kernels have ended.

    Args:
        processes: the processes of the host's other ranks.
        patience: returns how many seconds after a failure to wait for the peers.

    Attributes:
        over: whether all peers' kernels have ended, so that no peer accesses this rank's memory.
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
        self._own: ControlSegment | None = own  # None after `follow`
        self._running = dict(segments)
        self._peers = {peer: process for peer, process in processes.items() if not process.is_here}
        self._patience = patience
        self._processes: dict[int, int] = {}  # a descriptor of each peer's process
        self._kept: list[object] = []
        self._since: float | None = None
        self._late = self.over = False
        self._lock = threading.RLock()  # reentrant: freeing memory during garbage collection calls `holds`

    def begin(self) -> None:
        """From this call on, a failure of the group prevents this process from freeing memory."""
        add_hold(self.holds)

    def end(self) -> None:
        """Undoes `begin`, because the group was closed without a failure."""
        with self._lock:
            self._end()

    def keep(self, *kept: object) -> None:
        with self._lock:
            if not self.over:
                self._kept += kept

    def watch_processes(self) -> None:
        """Opens descriptors of the peers' processes, to notice when they end. Call this before the watcher closes its
        descriptors.
        """
        with self._lock:
            for peer in self._running.keys() & self._peers.keys():
                try:
                    self._processes[peer] = process_descriptors.acquire(self._peers[peer])
                except ProcessLookupError:
                    del self._running[peer]
                except (OSError, ResourceError):  # the peer also records its end in its segment
                    continue

    def follow(self, kept: Iterable[object]) -> None:
        """Keeps memory until the peers' kernels have ended. A thread waits for this, if a thread can be started. Before
        this call, this rank must have recorded that its kernels and its proxy have ended.

        Args:
            kept: owners of memory that peers can access, which are released when the peers have ended.
        """
        with self._lock:
            self._kept += kept
            self._own = None
        is_held()  # lets other ranks of this process notice that this rank has ended
        if not self.over:
            try:
                Thread(self._await_end, "proxyccl-aftermath").start()
            except ResourceError as error:
                _logger.warning("rank %d: memory that peers reach is released at the next free: %s", self._rank, error)

    def _await_end(self) -> None:
        while self.holds() or not self.over:  # after `patience`, `holds` is False while peers still run
            time.sleep(_LATE_POLL_SECONDS if self._late else _POLL_SECONDS)

    def holds(self) -> bool:
        """Returns whether kernels of a peer may still run, and `patience` is not over. While the result is True, no
        memory is freed."""
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
        remove_hold(self.holds)
        for descriptor in self._processes.values():
            process_descriptors.release(descriptor)
        self._processes.clear()
        self._running.clear()
        self._kept.clear()
