"""Notices when processes of a host's other ranks end. Each rank watches only a few processes.

A rank that notices an end tells all ranks of the host through their segments. So each process needs only a few
watchers. A rank watches the ranks that are 1, 2, 4, 8, … places after it, so that a rank's number of descriptors grows
only logarithmically, and a process is still watched if one watcher's thread is held up.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

from proxyccl.channels.segment import process_descriptors
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.memory.descriptors import naming_exhaustion


class ProcessWatch:
    """A rank's watch of other processes (see the module). One thread at a time calls `follow`.

    Args:
        processes: the processes of the host's other ranks, by rank.
        has_left: returns whether a rank has left. The process of such a rank may end in any way, and no longer watches
            others.

    Attributes:
        watched: the ranks whose processes are watched, by descriptor, which becomes readable when the process ends.
    """

    def __init__(self, rank: int, processes: Mapping[int, PeerProcess], has_left: Callable[[int], bool]) -> None:
        self._order = sorted(processes, key=lambda peer: (peer < rank, peer))
        self.processes = processes
        self._has_left = has_left
        self.watched: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # the descriptors that `descriptor_of` returned, by rank
        self._lock = threading.Lock()  # guards `_asked`

    def follow(self) -> tuple[list[int], list[int], list[int]]:
        """Watches other processes in place of processes whose ranks have left.

        Returns:
            The descriptors to watch from now on; the descriptors that are no longer watched, which the caller releases;
            and the ranks to watch whose processes turned out to have ended.

        Raises:
            ResourceError: no descriptor is left, or the system forbids pidfds. Earlier descriptors are still watched.
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
        """Returns, for each of the places 1, 2, 4, … after this rank's, the first rank from that place on that has not
        left.
        """
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
        """Returns a descriptor of a rank's process, watched or not, which is valid until `close`. Any thread may call
        this.

        Raises:
            ProcessLookupError: the process has ended.
            ResourceError: as for `follow`.
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
