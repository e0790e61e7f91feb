"""Moving bytes by proxy: all_gather, all_to_all and broadcast as schedules, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from proxyccl.channels.collectives.by_proxy import ByProxy, rounds
from proxyccl.channels.schedules.memory import ScheduleSpan, Side
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.stream_operations import CopyBytes, StreamOperations
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend


class Transfer(Struct, frozen=True):
    """Bytes that go from a rank's input to a peer, come from a peer to a rank's output, or stay on the rank.

    Attributes:
        peer: the other rank.
        offset: in the input, or in the output, in bytes.
        nbytes: its size.
    """

    peer: int
    offset: int
    nbytes: int


class Exchange(Struct, frozen=True):
    """One rank's part in moving bytes.

    Attributes:
        sends: from its input, at most one to each peer.
        receives: to its output, at most one from each peer.
        kept: the bytes that stay on the rank, at their place in its output; None if none do.
        kept_from: their offset in the input, in bytes.
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    kept: Transfer | None = None
    kept_from: int = 0


Part = Callable[[int, int], Exchange]
"""A rank's part in moving some bytes of each share, by the offset of the first and their number."""


def prepare_move(by_proxy: ByProxy, source: ArrayView, target: ArrayView, share: int, part: Part) -> StreamOperations:
    """The stream operations of a collective that moves bytes.

    Args:
        by_proxy: the parts of schedules.
        source: input of this rank.
        target: its output.
        share: bytes that one rank sends to one other.
        part: this rank's part.
    """
    ranks = by_proxy.group.world_size
    steps: list[Step] = []
    for begin, nbytes in rounds(share, by_proxy.longest_round // ranks):
        steps += _Round(by_proxy, source, target, part(begin, nbytes), room=ranks * nbytes).steps()
    return by_proxy.rings.prepare(steps)


def _packed_bytes(transfers: Sequence[Transfer]) -> int:
    """Bytes that transfers take when each range is there once."""
    return sum({transfer.offset: transfer.nbytes for transfer in transfers}.values())


class _Round:
    """One schedule of a call. Each side of it may be staged.

    Args:
        room: bytes that suffice to stage a side, the same on all ranks.
    """

    def __init__(self, by_proxy: ByProxy, source: ArrayView, target: ArrayView, part: Exchange, *, room: int) -> None:
        self._by_proxy, self._room = by_proxy, room
        self._source, self._target, self._part = source, target, part
        # Of either side of any rank: where one side were pinned and the other not, a driver would copy between them.
        self._longest_side = max(_packed_bytes(part.sends), _packed_bytes(part.receives))
        self._inputs = self._places("source", part.sends, self._find_source)
        self._outputs = self._places("target", part.receives, self._find_target)

    def steps(self) -> list[Step]:
        """The stream's steps. It copies the bytes that stay on the rank while the proxy moves the rest."""
        source, target, part = self._source, self._target, self._part
        copies_in = [
            CopyBytes(place.ptr, source.ptr + send.offset, send.nbytes)
            for send, place in zip(part.sends, self._inputs, strict=True)
        ]
        copies_out = [
            CopyBytes(target.ptr + receive.offset, place.ptr, receive.nbytes)
            for receive, place in zip(part.receives, self._outputs, strict=True)
        ]
        kept = part.kept
        stays = []
        if kept is not None:
            own_copy = self._by_proxy.memories.own_copy
            stays = own_copy(target.ptr + kept.offset, source.ptr + part.kept_from, kept.nbytes)
        return [*dict.fromkeys(copies_in), self._schedule(), *stays, *self._by_proxy.rings.end(), *copies_out]

    def _schedule(self) -> Schedule:
        links = self._by_proxy.links
        return Schedule(
            posts=tuple(
                SchedulePost(links.posts[receive.peer], place.memory.id_at(receive.peer), place.offset)
                for receive, place in zip(self._part.receives, self._outputs, strict=True)
            ),
            sends=tuple(
                ScheduleSend(
                    links.sends[send.peer],
                    place.memory.source_id(send.peer),
                    place.offset,
                    send.nbytes,
                    post_channel=links.posts[send.peer],
                )
                for send, place in zip(self._part.sends, self._inputs, strict=True)
            ),
            receives=tuple(ScheduleReceive(links.sends[receive.peer]) for receive in self._part.receives),
        )

    def _places(
        self, side: Side, transfers: Sequence[Transfer], find: Callable[[], ScheduleSpan | None]
    ) -> list[ScheduleSpan]:
        """Where each transfer begins: in the array, whose memory `find` gives; else staged, one after the other."""
        memories = self._by_proxy.memories
        if not transfers and not memories.staged_together:
            return []
        packed: dict[int, int] = {}
        end = 0
        for transfer in transfers:
            if transfer.offset not in packed:
                packed[transfer.offset] = end
                end += transfer.nbytes
        box = memories.pinned(side, self._longest_side)
        found = find() if box is None else None
        place = box or memories.found_or_staged(found, side, self._room if memories.staged_together else end)
        return [place.at(transfer.offset if place is found else packed[transfer.offset]) for transfer in transfers]

    def _find_source(self) -> ScheduleSpan | None:
        return self._by_proxy.memories.source(self._source.ptr, self._source.nbytes)

    def _find_target(self) -> ScheduleSpan | None:
        """None also if received data would overwrite data that has not been sent."""
        source, target, part = self._source, self._target, self._part
        sends = [(source.ptr + send.offset, send.nbytes) for send in part.sends]
        receives = [(target.ptr + receive.offset, receive.nbytes) for receive in part.receives]
        if any(a < b + b_bytes and b < a + a_bytes for a, a_bytes in sends for b, b_bytes in receives):
            return None
        return self._by_proxy.memories.target(target.ptr, target.nbytes)
