"""Reductions by proxy: schedules move the data, and a small kernel reduces each piece after the piece has arrived.

Each rank reduces one share of the elements. A share is cut into pieces, so that one piece is reduced while the next is
in flight. In an all_reduce, a piece's result goes to all ranks while the next piece is reduced. In a short all_reduce
the data crosses the links only once: each rank sends all its elements to every other rank, and all ranks reduce the
same values in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from proxyccl.channels.collectives.by_proxy import ByProxy, others, rounds
from proxyccl.channels.collectives.table import REDUCTION_OF_SCHEDULES
from proxyccl.channels.schedules.memory import BLOCKS_DONE, CHUNKS_DONE, HERE, OPENED, TAKEN
from proxyccl.channels.schedules.rings import Step
from proxyccl.device._native import ffi
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.kernel import Launch
from proxyccl.device.stream_operations import CopyBytes
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend

_SLOT_ALIGNMENT = 128
_PIECE_ALIGNMENT = 128  # elements
_CHUNK_ALIGNMENT = 32  # elements, 16 bytes or more
_FEW_BLOCKS = 16  # blocks for each rank's elements, up to _MOST_RANKS ranks
_MOST_RANKS = 4  # the most ranks that were measured
_LONGEST_CHUNK = 8
"""Longest chunk for up to _MOST_RANKS ranks, as a multiple of the shortest chunk. The limit keeps the wait for late
blocks short. Chunks of more ranks are shorter, because each block fetches its chunk of all ranks into the device's
cache.
"""
_MOST_PER_BLOCK = 32
"""If one block's data of all ranks is at most this multiple of the shortest chunk, the kernel has few blocks, because a
busy GPU has room for few.
"""
_MOST_PIECES = 3
"""Most pieces of a share. Two pieces keep the link busy; each further piece adds a pause between copies."""
_JOINED = _MOST_PIECES  # the stage whose counter counts posts; the earlier stages' counters count transfers
_MOST_AWAITED = 16 << 20
"""Most bytes of peers' values for which the kernel waits, instead of its stream: such values take some 40 µs to arrive.
"""


class _Shares(Struct, frozen=True):
    """The positions and lengths of the members' shares among the elements of a call."""

    members: Sequence[int]  # the ranks that take part, in order
    first: int  # index of the first member's first element
    stride: int  # elements from the start of one member's share to the start of the next member's
    lengths: tuple[int, ...]  # elements of each member's share; the first member's share is the longest

    def start(self, rank: int) -> int:
        return self.first + self.members.index(rank) * self.stride

    def whole(self, rank: int) -> int:
        return self.lengths[self.members.index(rank)]

    def length(self, rank: int, begin: int, most: int) -> int:
        return max(0, min(most, self.whole(rank) - begin))


class _Pieces:
    """The pieces of a share, and the order in which a rank sends them to its peers.

    If each link leads to one peer, all peers get the first piece, then all get the second, and so on. If the proxy
    copies to one peer after the other, a peer gets its whole share at once, so that all ranks proceed to the next peer
    at about the same time, and no two ranks send to the same peer at once. Such a proxy sends values in pieces only to
    the last peer, so that a piece is reduced while the next piece is in flight. The proxy sends results in pieces only
    to the first peer, each piece as soon as it is reduced.

    Args:
        longest: elements of the longest share.
        itemsize: bytes of an element.
        peers: the peers in the order in which this rank sends.
        by_proxy: has the shortest piece, and tells whether the proxy copies to one peer after the other.

    Attributes:
        bounds: the offset and the most elements of each piece.
    """

    def __init__(self, longest: int, itemsize: int, peers: Sequence[int], by_proxy: ByProxy) -> None:
        number = max(1, min(_MOST_PIECES, longest * itemsize // by_proxy.shortest_piece))
        self.bounds = list(rounds(longest, round_up(-(-longest // number), _PIECE_ALIGNMENT)))
        self._whole = (0, longest)
        self._peers, self._in_turn = peers, by_proxy.in_turn

    def values(self) -> list[tuple[int, int, int]]:
        return [(peer, *bounds) for peer, _, bounds in self._sends(self._peers[-1:])]

    def results(self) -> list[tuple[int, int, int, int]]:
        """Returns a tuple (peer, offset, most elements, number of the last piece that the send contains) for each send
        of results.
        """
        return [(peer, *bounds, number) for peer, number, bounds in self._sends(self._peers[:1])]

    def values_from(self, peer: int) -> range:
        """Returns the numbers of the pieces in which a peer's values arrive; a whole share arrives as piece 0."""
        return range(len(self.bounds) if not self._in_turn or peer in self._peers[:1] else 1)

    def results_from(self, peer: int) -> int:
        return len(self.bounds) if not self._in_turn or peer in self._peers[-1:] else 1

    def _sends(self, cut: Sequence[int]) -> list[tuple[int, int, tuple[int, int]]]:
        if not self._in_turn:
            return [(peer, number, bounds) for number, bounds in enumerate(self.bounds) for peer in self._peers]
        whole = [(len(self.bounds) - 1, self._whole)]
        return [
            (peer, number, bounds)
            for peer in self._peers
            for number, bounds in (enumerate(self.bounds) if peer in cut else whole)
        ]


def reduce_scatter_steps(by_proxy: ByProxy, source: ArrayView, target: ArrayView, op: str) -> list[Step]:
    """Returns the steps that a stream takes for a reduce_scatter. `source` has `target.size` elements for each rank."""
    ranks, itemsize = by_proxy.group.world_size, source.dtype.itemsize
    steps: list[Step] = []
    for begin, count in rounds(target.size, by_proxy.longest_round // (ranks * itemsize)):
        shares = _Shares(range(ranks), begin, target.size, (count,) * ranks)
        part = _Reduction(by_proxy, source, op, shares, ranks)
        steps += [*part.copies_in, Schedule(part.posts(), part.sends(), part.receives(), joined=_JOINED)]
        steps += part.reduce(target.ptr + begin * itemsize, posts=ranks - 1, gated=False)
    return steps


def all_reduce_steps(
    by_proxy: ByProxy, source: ArrayView, target: ArrayView, op: str, members: Sequence[int], divisor: int
) -> list[Step]:
    """Returns the steps that a stream takes for an all_reduce among `members`; `target` may be `source`. All ranks of
    the group call this together, with arrays of the same size. Each rank passes the set of members to which the rank
    belongs. `divisor` is the divisor if the operator is an average.
    """
    ranks, itemsize = len(members), source.dtype.itemsize
    if source.nbytes * (ranks - 1) <= by_proxy.one_crossing_bytes:
        return _one_crossing(by_proxy, source, target, op, members, divisor)
    steps: list[Step] = []
    for begin, count in rounds(source.size, by_proxy.longest_round // itemsize):
        share = round_up(-(-count // ranks), 16 // itemsize)
        lengths = tuple(max(0, min(share, count - number * share)) for number in range(ranks))
        shares = _Shares(members, begin, share, lengths)
        steps += _all_reduce_round(by_proxy, source, target, op, shares, divisor)
    return steps


def _all_reduce_round(
    by_proxy: ByProxy, source: ArrayView, target: ArrayView, op: str, shares: _Shares, divisor: int
) -> list[Step]:
    """Returns the steps of an all_reduce in which each rank sends its reduced share from its output to its peers'
    outputs.
    """
    links, memories, rank = by_proxy.links, by_proxy.memories, by_proxy.group.rank
    peers = others(by_proxy.group, shares.members)
    itemsize, nbytes = source.dtype.itemsize, sum(shares.lengths) * source.dtype.itemsize
    part = _Reduction(by_proxy, source, op, shares, divisor)
    start, own = shares.first * itemsize, (shares.start(rank) - shares.first) * itemsize
    found = memories.target(target.ptr + start, nbytes)
    output = memories.found_or_staged(found, "target", nbytes)
    sends = tuple(
        links.send(
            peer,
            output.at(own + begin * itemsize),
            shares.length(rank, begin, most) * itemsize,
            dst_offset=own + begin * itemsize,
            gate=number + 1,
        )
        for peer, begin, most, number in part.pieces.results()
    )
    posts = tuple(links.post(peer, output) for peer in peers)
    receives = tuple(ScheduleReceive(links.sends[peer], sends=part.pieces.results_from(peer)) for peer in peers)
    schedule = Schedule((*part.posts(), *posts), (*part.sends(), *sends), (*part.receives(), *receives), joined=_JOINED)
    copies_out = [CopyBytes(target.ptr + start, output.ptr, nbytes)]  # no copy if the output is not staged
    reduction = part.reduce(output.ptr + own, posts=2 * len(peers), gated=True)
    return [*part.copies_in, schedule, *reduction, *copies_out]


def _one_crossing(
    by_proxy: ByProxy, source: ArrayView, target: ArrayView, op: str, members: Sequence[int], divisor: int
) -> list[Step]:
    links, memories, peers = by_proxy.links, by_proxy.memories, others(by_proxy.group, members)
    nbytes = source.nbytes
    slots = _Slots(by_proxy, source.dtype, op, nbytes, members, divisor, may_be_pinned=True)
    sent = memories.pinned("source", slots.nbytes) or memories.found_or_staged(
        memories.source(source.ptr, nbytes), "source", nbytes
    )
    replaced = sent.ptr == target.ptr  # the result replaces the elements that are sent
    schedule = Schedule(
        posts=slots.posts(links.posts),
        sends=tuple(links.send(peer, sent, nbytes, stage=0 if replaced else None) for peer in peers),
        receives=tuple(ScheduleReceive(links.sends[peer], stage=0) for peer in peers),
        joined=_JOINED,
    )
    copy_in = CopyBytes(sent.ptr, source.ptr, nbytes)  # no copy if the input is not staged
    transfers = len(peers) * (2 if replaced else 1)
    own_wait = transfers if by_proxy.awaits_data else 0
    reduction = slots.reduce(source.ptr, target.ptr, source.size, [(0, source.size)], first=own_wait)
    wait = by_proxy.rings.stage(_JOINED, len(peers)) if own_wait else by_proxy.rings.stage(0, transfers)
    return [copy_in, schedule, wait, reduction, *by_proxy.rings.end(() if own_wait else [_JOINED])]


class _Slots:
    """This rank's memory for the data that peers send to this rank for a reduction: a slot for each peer.

    Args:
        nbytes: the most bytes that a peer sends.
        members: the ranks that take part, in order.
        may_be_pinned: whether short data goes from pinned memory to pinned memory.

    Attributes:
        nbytes: total size of the slots.
    """

    def __init__(
        self,
        by_proxy: ByProxy,
        dtype: DType,
        op: str,
        nbytes: int,
        members: Sequence[int],
        divisor: int,
        *,
        may_be_pinned: bool = False,
    ) -> None:
        self._group, self._dtype, self._words = by_proxy.group, dtype, by_proxy.rings.words
        self._of_blocks = ffi.cast("uint32_t *", by_proxy.memories.reduction_words.ptr)
        self._members, self._peers = members, others(by_proxy.group, members)
        self._divisor = divisor
        self._slot_bytes = round_up(nbytes, _SLOT_ALIGNMENT)
        self.nbytes = len(self._peers) * self._slot_bytes
        pinned = by_proxy.memories.pinned("scratch", self.nbytes) if may_be_pinned else None
        self._memory = pinned or by_proxy.memories.stage("scratch", self.nbytes)
        self._kernel = REDUCTION_OF_SCHEDULES.load(self._group.runtime, dtype.name, op)

    def offset(self, peer: int) -> int:
        return (self._members.index(peer) - (peer > self._group.rank)) * self._slot_bytes

    def posts(self, channels: Mapping[int, int]) -> tuple[SchedulePost, ...]:
        memory, offset = self._memory.memory, self._memory.offset
        return tuple(
            SchedulePost(channels[peer], memory.id_at(peer), offset + self.offset(peer)) for peer in self._peers
        )

    def reduce(
        self,
        own: int,
        result: int,
        count: int,
        pieces: Sequence[tuple[int, int]],
        *,
        first: int = 0,
        transfers: int = 0,
        gated: bool = False,
    ) -> Launch:
        """Returns the launch of the kernel that reduces each piece and then resets the counter of the piece's stage.
        The kernel waits for each piece except the first. If `first` is not 0, the kernel is launched when all ranks
        have joined, and therefore also waits for the first piece, and resets the counter of posts.

        Args:
            own: the address of this rank's elements.
            result: the address for the reduced elements.
            pieces: the offset and the most elements of each piece; piece n is stage n of the schedule.
            first: number of transfers of the first stage; 0 if they are complete when the kernel is launched.
            transfers: number of transfers of each later stage.
            gated: whether the kernel opens the gate after each piece; the proxy's sends of results wait for the gate.
        """
        group, words, defaults = self._group, self._words, self._group.runtime.launch_defaults
        arrived = ffi.new("ProxycclArrived *")
        arrived.slots, arrived.slot_bytes = ffi.cast("char *", self._memory.ptr), self._slot_bytes
        arrived.rank, arrived.world_size = self._members.index(group.rank), len(self._members)
        arrived.divisor = self._divisor
        piece, shortest = pieces[0][1], -(-defaults.small_bytes // self._dtype.itemsize)
        ranks = len(self._members)  # blocks read the data of all ranks, so the number of blocks grows with the ranks
        few = min(_FEW_BLOCKS * min(ranks, _MOST_RANKS), -(-piece // shortest))
        many = -(-piece * ranks // (_MOST_PER_BLOCK * shortest))
        blocks = min(defaults.small_blocks, max(few, many))
        longest = _LONGEST_CHUNK * shortest * _MOST_RANKS // max(ranks, _MOST_RANKS)
        chunk = round_up(max(shortest, min(-(-piece // blocks), longest)), _CHUNK_ALIGNMENT)
        arrived.pieces, arrived.piece, arrived.transfers = len(pieces), piece, transfers
        arrived.chunks, arrived.chunk = -(-piece // chunk), chunk
        arrived.first = first
        arrived.stages = ffi.cast("uint64_t *", words.stages[0])
        arrived.joined = ffi.cast("uint64_t *", words.stages[_JOINED] if first else 0)
        arrived.gate = ffi.cast("uint64_t *", words.gate if gated else 0)
        arrived.chunks_done, arrived.here = self._of_blocks + CHUNKS_DONE, self._of_blocks + HERE
        arrived.taken, arrived.opened = self._of_blocks + TAKEN, self._of_blocks + OPENED
        arrived.blocks_done = self._of_blocks + BLOCKS_DONE
        arrived.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        return self._kernel.prepare(blocks, defaults.small_threads, bytes(ffi.buffer(arrived)), own, result, count)


class _Reduction:
    """One rank's part of one schedule: the data that its peers reduce, and the share that the rank itself reduces.

    Attributes:
        pieces: how shares are cut into pieces, and the order in which the pieces are sent.
        copies_in: the copies of the peers' shares of the input to staging memory, if the input must be staged.
    """

    def __init__(self, by_proxy: ByProxy, source: ArrayView, op: str, shares: _Shares, divisor: int) -> None:
        self._by_proxy, self._source, self._shares = by_proxy, source, shares
        self._peers = others(by_proxy.group, shares.members)
        self._itemsize = itemsize = source.dtype.itemsize
        longest = shares.lengths[0]
        self.pieces = _Pieces(longest, itemsize, self._peers, by_proxy)
        memories = by_proxy.memories
        self._slots = _Slots(by_proxy, source.dtype, op, longest * itemsize, shares.members, divisor)
        found = memories.source(source.ptr, source.nbytes)
        place = memories.found_or_staged(found, "source", len(shares.members) * longest * itemsize)
        starts = {peer: shares.start(peer) * itemsize for peer in self._peers}
        packed = {peer: i * longest * itemsize for i, peer in enumerate(self._peers)}
        self._inputs = {peer: place.at((starts if place is found else packed)[peer]) for peer in self._peers}
        self.copies_in = [
            CopyBytes(self._inputs[peer].ptr, source.ptr + starts[peer], shares.whole(peer) * itemsize)
            for peer in self._peers
        ]

    def posts(self) -> tuple[SchedulePost, ...]:
        return self._slots.posts(self._by_proxy.links.scratch_posts)

    def sends(self) -> tuple[ScheduleSend, ...]:
        links = self._by_proxy.links
        return tuple(
            links.send(
                peer,
                self._inputs[peer].at(begin * self._itemsize),
                self._shares.length(peer, begin, most) * self._itemsize,
                dst_offset=begin * self._itemsize,
                to_scratch=True,
            )
            for peer, begin, most in self.pieces.values()
        )

    def receives(self) -> tuple[ScheduleReceive, ...]:
        channels = self._by_proxy.links.sends
        return tuple(
            ScheduleReceive(channels[peer], stage=number)
            for peer in self._peers
            for number in self.pieces.values_from(peer)
        )

    def reduce(self, result: int, *, posts: int, gated: bool) -> list[Step]:
        """Returns the steps that wait for data, reduce this rank's share by a kernel, and end the schedule. If the data
        is short, the kernel is launched when all ranks have joined, and waits for the data itself; otherwise the stream
        waits for the first piece before the kernel.

        Args:
            result: the address for the reduced share.
            posts: the number of posts that the schedule's sends wait for.
            gated: whether the proxy sends reduced pieces to peers.
        """
        rank = self._by_proxy.group.rank
        own, count = self._source.ptr + self._shares.start(rank) * self._itemsize, self._shares.whole(rank)
        first, transfers = (sum(number in self.pieces.values_from(peer) for peer in self._peers) for number in (0, 1))
        rings, bounds = self._by_proxy.rings, self.pieces.bounds
        awaits = self._by_proxy.awaits_data and self._slots.nbytes <= _MOST_AWAITED
        reduction = self._slots.reduce(
            own, result, count, bounds, first=first if awaits else 0, transfers=transfers, gated=gated
        )
        wait = rings.stage(_JOINED, posts) if awaits else rings.stage(0, first)
        return [wait, reduction, *rings.end(() if awaits else [_JOINED], gated=gated)]
