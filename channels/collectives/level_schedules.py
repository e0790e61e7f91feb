"""all_gather by proxy between nodes of several ranks: each share crosses to a node once, and is sent on inside it.

A rank's *rails* are the ranks with its number on the other nodes. They exchange shares in pieces. A rank's schedule
sends each piece that has come to the other ranks of its node, while the next one crosses.
"""

from __future__ import annotations

from proxyccl.channels.collectives.by_proxy import ByProxy, others, rounds
from proxyccl.channels.schedules.memory import ScheduleSpan
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.stream_operations import CopyBytes, StreamOperations
from proxyccl.proxy.schedule import STAGES, Schedule, SchedulePost, ScheduleReceive, ScheduleSend

_SHORTEST_PIECE = 1 << 20
_MOST_PIECES = 8


def serves(by_proxy: ByProxy, share: int) -> bool:
    """Whether shares of this many bytes are gathered so; the same on all ranks."""
    topology, ranks = by_proxy.group.topology, by_proxy.group.world_size
    fits = topology.node_count - 1 <= STAGES and 0 < share * ranks <= by_proxy.longest_round
    return fits and topology.has_levels()


def prepare_all_gather(by_proxy: ByProxy, source: ArrayView, target: ArrayView, share: int) -> StreamOperations:
    """The stream operations of an all_gather where it `serves`.

    Args:
        by_proxy: the parts of schedules.
        source: this rank's share.
        target: the shares of all ranks.
        share: bytes of each.
    """
    gather = _Gather(by_proxy, source, target, share)
    return by_proxy.rings.prepare(
        [
            CopyBytes(gather.sent.ptr, source.ptr, share),  # none in place, as all of these
            gather.schedule(),
            *by_proxy.memories.own_copy(target.ptr + by_proxy.group.rank * share, source.ptr, share),
            *by_proxy.rings.end(range(len(gather.rails))),
            *gather.copies_out(),
        ]
    )


class _Gather:
    """One rank's part.

    Attributes:
        sent: the memory of its own share.
        rails: the ranks with which it exchanges shares.
    """

    def __init__(self, by_proxy: ByProxy, source: ArrayView, target: ArrayView, share: int) -> None:
        self._by_proxy, self._target, self._share = by_proxy, target, share
        group, memories, topology = by_proxy.group, by_proxy.memories, by_proxy.group.topology
        sent, output = memories.pinned("source", target.nbytes), memories.pinned("target", target.nbytes)
        self.sent = sent or memories.found_or_staged(memories.source(source.ptr, share), "source", share)
        self._output = output or memories.found_or_staged(
            memories.target(target.ptr, target.nbytes), "target", target.nbytes
        )
        self.rails = others(group, [ranks[topology.local_rank] for ranks in topology.node_members()])
        self._near = others(group, topology.node_ranks)
        number = max(1, min(_MOST_PIECES, share // _SHORTEST_PIECE))
        self._pieces = list(rounds(share, -(-share // number)))

    def schedule(self) -> Schedule:
        """Posts the output, sends this rank's share to all, and passes on the shares of the rails."""
        links, output = self._by_proxy.links, self._output
        rank, peers = self._by_proxy.group.rank, (*self.rails, *self._near)
        crossing = [self._send(rail, rank, self.sent, piece) for piece in self._pieces for rail in self.rails]
        near = [self._send(peer, rank, self.sent, (0, self._share)) for peer in self._near]
        onwards = [
            self._send(peer, rail, output.at(rail * self._share), piece, stage=stage, gate=number + 1)
            for stage, rail in enumerate(self.rails)
            for number, piece in enumerate(self._pieces)
            for peer in self._near
        ]
        from_rails = [
            ScheduleReceive(links.sends[rail], stage=stage)
            for stage, rail in enumerate(self.rails)
            for _ in self._pieces
        ]
        sends = 1 + len(self.rails) * len(self._pieces)
        return Schedule(
            posts=tuple(SchedulePost(links.posts[peer], output.memory.id_at(peer), output.offset) for peer in peers),
            sends=(*crossing, *near, *onwards),
            receives=(*from_rails, *(ScheduleReceive(links.sends[peer], sends=sends) for peer in self._near)),
        )

    def copies_out(self) -> list[CopyBytes]:
        """Copies the others' shares to the output."""
        own, share = self._by_proxy.group.rank * self._share, self._share
        parts = ((0, own), (own + share, self._target.nbytes - own - share))
        return [CopyBytes(self._target.ptr + at, self._output.ptr + at, nbytes) for at, nbytes in parts]

    def _send(
        self,
        peer: int,
        rank: int,
        place: ScheduleSpan,
        piece: tuple[int, int],
        *,
        stage: int | None = None,
        gate: int = 0,
    ) -> ScheduleSend:
        """Sends a peer a piece of a rank's share, which lies at `place`."""
        begin, nbytes = piece
        links = self._by_proxy.links
        return ScheduleSend(
            links.sends[peer],
            place.memory.source_id(peer),
            place.offset + begin,
            nbytes,
            post_channel=links.posts[peer],
            dst_offset=rank * self._share + begin,
            gate=gate,
            gate_stage=stage,
        )
