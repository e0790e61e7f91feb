"""Collectives that proxies carry out directly on the caller's arrays, each as a schedule that a stream starts. See
channels/schedules/DESIGN.md.

If peers' proxies can't reach an array, the stream copies the array's data to or from memory that these proxies can
reach (*staging*). Each rank decides alone whether to stage, because peers send to whatever address the rank posts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxyccl.channels.group import Group
from proxyccl.channels.schedules.links import ScheduleLinks
from proxyccl.channels.schedules.memory import ScheduleMemories
from proxyccl.channels.schedules.rings import ScheduleRings

_SHORTEST_PIECE = 2 << 20
_LONGEST_ROUND = 256 << 20


class ByProxy:
    """The objects from which a rank makes the schedules of its collectives. All ranks construct a `ByProxy` together.

    Attributes:
        memories: finds the memory of arrays, or stages them.
        links: the channels that schedules use.
        rings: hands schedules to the proxy.
        in_turn: whether the proxy copies to one peer after the other; true if a single driver call issues all copies.
        awaits_data: whether the kernel of a short reduction is launched as soon as all ranks have joined, and waits for
            their data itself. True only within a host, where the data arrives shortly after the kernel starts.
        one_crossing_bytes: if a rank receives at most this many bytes in a reduction, the data crosses the links only
            once.
        shortest_piece: the least bytes of the pieces into which a reduction divides a share.
        longest_round: the most bytes that one schedule stages. A call of more bytes takes several schedules, the same
            number on all ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.memories = ScheduleMemories(group)
        self.links = ScheduleLinks(group)
        self.rings = ScheduleRings(group)
        self.in_turn = group.runtime.calls.copy_many != 0 and not self.memories.staged_together
        self.awaits_data = group.runtime.launch_defaults.awaits_data and not self.memories.staged_together
        self.one_crossing_bytes = group.runtime.launch_defaults.one_crossing_bytes
        self.shortest_piece, self.longest_round = _SHORTEST_PIECE, _LONGEST_ROUND

    def close(self) -> None:
        """Frees the schedules' memory. All streams of all ranks must have completed the schedules."""
        self.memories.close()


def others(group: Group, members: Sequence[int] | None = None) -> list[int]:
    """Returns all other ranks, beginning with the next rank, so that each rank begins with a different peer.

    Args:
        members: the ranks that take part, this rank included; None for all.
    """
    ranks = range(group.world_size) if members is None else members
    own = ranks.index(group.rank)
    return [ranks[(own + step) % len(ranks)] for step in range(1, len(ranks))]


def rounds(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Cuts a count into pieces of at most `most`, and yields the offset and the length of each piece."""
    for begin in range(0, count, most):
        yield begin, min(most, count - begin)
