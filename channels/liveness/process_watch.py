"""The ends of the processes of a host's other ranks, of which a rank watches few.

Whoever notices an end tells all ranks of the host through their segments. So it is enough that each process is watched
by some others, and a rank's descriptors do not grow with the number of ranks. A rank watches the next one, and those
that are 2, 4, 8, … places on: a rank whose watcher's thread is held up is still watched by others.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

from proxyccl.channels.segment import process_descriptors
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.memory.descriptors import naming_exhaustion


class ProcessWatch:
    """See above. `follow` is called by one thread at a time.

    Args:
        processes: those of the host's other ranks, by rank.
        has_left: whether a rank has left: its process may end in any way, and no longer watches others.

    Attributes:
        watched: the ranks whose processes are watched, by descriptor, which becomes readable when the process ends.
    """

    def __init__(self, rank: int, processes: Mapping[int, PeerProcess], has_left: Callable[[int], bool]) -> None:
        self._order = sorted(processes, key=lambda peer: (peer < rank, peer))
        self.processes = processes
        self._has_left = has_left
        self.watched: dict[int, int] = {}
        self._asked: dict[int, int] = {}  # descriptors, by rank
        self._lock = threading.Lock()  # of `_asked`

    def follow(self) -> tuple[list[int], list[int], list[int]]:
        """Watches others in the place of those that have left.

        Returns:
            The descriptors that are watched from now on; those that no longer are, for `release`; and the ranks whose
            processes have ended meanwhile.

        Raises:
            ResourceError: no descriptor is left, or the system forbids it. Those that were watched still are.
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
        """The first rank that has not left, from each of the places 1, 2, 4, … after this rank's on."""
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

    def is_ending(self, peer: int) -> bool:
        """Whether a rank's process has begun to end (`PeerProcess.is_ending`)."""
        return self.processes[peer].is_ending

    def descriptor_of(self, peer: int) -> int:
        """A descriptor of a rank's process, watched or not, until `close`. Any thread may call this.

        Raises:
            ProcessLookupError: it has ended.
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
