"""Notices when processes of a host's other ranks end.

A rank that notices the end of a process tells all ranks of the host through their segments, so few ranks need to watch
each process. Of the host's n ranks, rank r watches ranks r + 1, r + 2, r + 4, r + 8, … (modulo n). Each rank thus needs
only about log2(n) descriptors, and each process has several watchers, in case one is delayed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

from proxyccl.channels.segment import process_descriptors
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.memory.descriptors import naming_exhaustion


class ProcessWatch:
    """The descriptors of the processes that one rank watches. Only one thread at a time may call `follow`.

    Args:
        processes: the processes of the host's other ranks, by rank.
        has_left: returns whether a rank has closed the communicator. The process of a rank that has closed the
            communicator may end, and watches no other process.

    Attributes:
        watched: by descriptor, the rank whose process is watched. A descriptor becomes readable when the process ends.
    """

    def __init__(self, rank: int, processes: Mapping[int, PeerProcess], has_left: Callable[[int], bool]) -> None:
        self._order = sorted(processes, key=lambda peer: (peer < rank, peer))
        self.processes = processes
        self._has_left = has_left
        self.watched: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # the descriptors that `descriptor_of` returned, by rank
        self._lock = threading.Lock()  # guards `_asked`

    def follow(self) -> tuple[list[int], list[int], list[int]]:
        """Replaces watched processes whose ranks have closed the communicator by other processes.

        Returns:
            The new descriptors, the replaced descriptors, which the caller must release, and the ranks whose processes
            had ended before they could be watched.

        Raises:
            ResourceError: no descriptor is left, or the system forbids pidfds. After this error `watched` is unchanged.
        """
        if self.watched and not any(self._has_left(peer) for peer in self.watched.values()):
            return [], [], []
        wanted, known = self._wanted(), set(self.watched.values())
        new: dict[int, int] = {}
        lost = []
        try:
            for peer in sorted(wanted - known):
                try:
                    new[self._acquire(peer)] = peer
                except ProcessLookupError:
                    lost.append(peer)
        except BaseException:
            for descriptor in new:
                process_descriptors.release(descriptor)
            raise
        old = [descriptor for descriptor, peer in self.watched.items() if peer not in wanted]
        for descriptor in old:
            del self.watched[descriptor]
        self.watched |= new
        return list(new), old, lost

    def _wanted(self) -> set[int]:
        present = [peer for peer in self._order if not self._has_left(peer)]
        if not present:
            return set()
        places = itertools.takewhile(lambda place: place <= len(self._order), (1 << i for i in itertools.count()))
        here = set(present)
        starts = (self._order[place - 1 :] + self._order[: place - 1] for place in places)
        return {next(peer for peer in start if peer in here) for start in starts}

    def _acquire(self, peer: int) -> int:
        with naming_exhaustion(f"the watch of rank {peer}'s process"):
            return process_descriptors.acquire(self.processes[peer])

    def descriptor_of(self, peer: int) -> int:
        """Returns a descriptor, valid until `close`, of a rank's process. Any thread may call this.

        Raises:
            ProcessLookupError: the process has ended.
            ResourceError: no descriptor is left, or the system forbids pidfds.
        """
        with self._lock:
            if peer not in self._asked:
                self._asked[peer] = self._acquire(peer)
            return self._asked[peer]

    def close(self) -> None:
        with self._lock:
            for descriptor in (*self.watched, *self._asked.values()):
                process_descriptors.release(descriptor)
            self.watched.clear()
            self._asked.clear()
