"""Moves bytes by proxy: all_gather, all_to_all and broadcast as schedules, without a kernel.

If nodes have several ranks, a share of an all_gather crosses to each other node once, and is forwarded within that
node. A rank's *rails* are the ranks with the same local rank on the other nodes. Each rank exchanges shares with its
rails, in pieces. A rank's schedule forwards each arrived piece to the other ranks of the node while the next piece
crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from proxyccl.channels.collectives.by_proxy import ByProxy, others, rounds
from proxyccl.channels.schedules.memory import ScheduleSpan, Side
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.stream_operations import CopyBytes
from proxyccl.proxy.schedule import STAGES, Schedule, ScheduleReceive

_SHORTEST_PIECE = 1 << 20
_MOST_PIECES = 8


class Transfer(Struct, frozen=True):
    """Bytes that go from a rank's input to a peer, come from a peer to a rank's output, or stay on the rank."""

    peer: int  # the other rank
    offset: int  # the offset in the input or in the output, in bytes
    nbytes: int


class Exchange(Struct, frozen=True):
    """One rank's part in moving bytes."""

    sends: tuple[Transfer, ...] = ()  # transfers from the rank's input, at most one to each peer
    receives: tuple[Transfer, ...] = ()  # transfers to the rank's output, at most one from each peer
    kept: Transfer | None = None  # the bytes that stay on the rank, with their offset in the output; None if none stay
    kept_from: int = 0  # the offset of the kept bytes in the input


Part = Callable[[int, int], Exchange]
"""Returns a rank's part in moving some bytes of each share, given the offset of the first byte and the number of bytes.
"""


def move_steps(by_proxy: ByProxy, source: ArrayView, target: ArrayView, share: int, part: Part) -> list[Step]:
    """Returns the steps that a stream takes for a collective that moves bytes.

    Args:
        share: bytes that one rank sends to one other rank.
        part: this rank's part.
    """
    ranks = by_proxy.group.world_size
    steps: list[Step] = []
    for begin, nbytes in rounds(share, by_proxy.longest_round // ranks):
        steps += _round(by_proxy, source, target, part(begin, nbytes), ranks * nbytes)
    return steps


def _round(by_proxy: ByProxy, source: ArrayView, target: ArrayView, part: Exchange, room: int) -> list[Step]:
    """Returns the steps of one schedule of a call. The stream copies the bytes that stay on the rank while the proxy
    moves the rest. Of the input and of the output, at most `room` bytes each may be staged; all ranks pass the same
    `room`.
    """
    memories, links = by_proxy.memories, by_proxy.links

    def find_source() -> ScheduleSpan | None:
        return memories.source(source.ptr, source.nbytes)

    def find_target() -> ScheduleSpan | None:
        """Returns the output's memory; None if the output must be staged, or if received data would overwrite unsent
        data.
        """
        sends = [(source.ptr + send.offset, send.nbytes) for send in part.sends]
        receives = [(target.ptr + receive.offset, receive.nbytes) for receive in part.receives]
        if any(a < b + b_bytes and b < a + a_bytes for a, a_bytes in sends for b, b_bytes in receives):
            return None
        return memories.target(target.ptr, target.nbytes)

    # Ranks use pinned memory depending on the longer of input and output, so that source and target of a copy are
    # either both pinned or both not.
    longest = max(sum({each.offset: each.nbytes for each in side}.values()) for side in (part.sends, part.receives))

    def places(
        side: Side, transfers: Sequence[Transfer], find: Callable[[], ScheduleSpan | None]
    ) -> list[tuple[Transfer, ScheduleSpan]]:
        if not transfers and not memories.staged_together:
            return []
        packed: dict[int, int] = {}
        end = 0
        for transfer in transfers:
            if transfer.offset not in packed:
                packed[transfer.offset] = end
                end += transfer.nbytes
        box = memories.pinned(side, longest)
        found = find() if box is None else None
        place = box or memories.found_or_staged(found, side, room if memories.staged_together else end)
        offsets = [each.offset if place is found else packed[each.offset] for each in transfers]
        return [(each, place.at(offset)) for each, offset in zip(transfers, offsets, strict=True)]

    inputs = places("source", part.sends, find_source)
    outputs = places("target", part.receives, find_target)
    schedule = Schedule(
        tuple(links.post(receive.peer, place) for receive, place in outputs),
        tuple(links.send(send.peer, place, send.nbytes) for send, place in inputs),
        tuple(ScheduleReceive(links.sends[receive.peer]) for receive in part.receives),
    )
    copies_in = [CopyBytes(place.ptr, source.ptr + send.offset, send.nbytes) for send, place in inputs]
    copies_out = [CopyBytes(target.ptr + receive.offset, place.ptr, receive.nbytes) for receive, place in outputs]
    kept, stays = part.kept, []
    if kept is not None:
        stays = memories.own_copy(target.ptr + kept.offset, source.ptr + part.kept_from, kept.nbytes)
    return [*dict.fromkeys(copies_in), schedule, *stays, *by_proxy.rings.end(), *copies_out]


def crosses_once(by_proxy: ByProxy, share: int) -> bool:
    """Returns whether a share of an all_gather crosses to each node only once; the same on all ranks."""
    topology, ranks = by_proxy.group.topology, by_proxy.group.world_size
    fits = topology.node_count - 1 <= STAGES and 0 < share * ranks <= by_proxy.longest_round
    return fits and topology.has_levels()


def all_gather_steps(by_proxy: ByProxy, source: ArrayView, target: ArrayView, share: int) -> list[Step]:
    """Returns the steps of an all_gather in which a share of `share` bytes crosses to each node once."""
    group, memories, links = by_proxy.group, by_proxy.memories, by_proxy.links
    pinned, output = memories.pinned("source", target.nbytes), memories.pinned("target", target.nbytes)
    sent = pinned or memories.found_or_staged(memories.source(source.ptr, share), "source", share)
    output = output or memories.found_or_staged(memories.target(target.ptr, target.nbytes), "target", target.nbytes)
    rails = others(group, [ranks[group.topology.local_rank] for ranks in group.topology.node_members()])
    near = others(group, group.topology.node_ranks)
    pieces = list(rounds(share, -(-share // max(1, min(_MOST_PIECES, share // _SHORTEST_PIECE)))))
    own = group.rank * share
    crossing = [
        links.send(rail, sent.at(begin), nbytes, dst_offset=own + begin) for begin, nbytes in pieces for rail in rails
    ]
    onwards = [
        links.send(
            peer,
            output.at(rail * share + begin),
            nbytes,
            dst_offset=rail * share + begin,
            gate=number + 1,
            gate_stage=stage,
        )
        for stage, rail in enumerate(rails)
        for number, (begin, nbytes) in enumerate(pieces)
        for peer in near
    ]
    from_rails = [ScheduleReceive(links.sends[rail], stage=stage) for stage, rail in enumerate(rails) for _ in pieces]
    sends = 1 + len(rails) * len(pieces)
    schedule = Schedule(
        tuple(links.post(peer, output) for peer in (*rails, *near)),
        (*crossing, *(links.send(peer, sent, share, dst_offset=own) for peer in near), *onwards),
        (*from_rails, *(ScheduleReceive(links.sends[peer], sends=sends) for peer in near)),
    )
    return [
        CopyBytes(sent.ptr, source.ptr, share),  # in an in-place call, the copies of this list are dropped
        schedule,
        *memories.own_copy(target.ptr + own, source.ptr, share),
        *by_proxy.rings.end(range(len(rails))),
        CopyBytes(target.ptr, output.ptr, own),
        CopyBytes(target.ptr + own + share, output.ptr + own + share, target.nbytes - own - share),
    ]
