"""The collectives that only move bytes: all_gather, all_to_all and broadcast."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence

from proxyccl.channels.arguments import rows_of_all, share_shape
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_schedules import (
    Exchange,
    Transfer,
    all_gather_steps,
    crosses_once,
    move_steps,
)
from proxyccl.channels.collectives.table import COLLECTIVES, LINE_KERNELS, PACKET_MOVES
from proxyccl.channels.group import Group
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView


class Move(Collective):
    """A collective whose kernel takes (team, source, target, share in bytes[, root]).

    If `Collectives.goes_by_schedule` returns true, the proxies move the bytes as each rank's `part` describes.

    Attributes:
        rereads_output: whether a rank reads its output during an in-place call, so that peers must not store to the
            output.
    """

    rereads_output = False

    @abstractmethod
    def part(self, group: Group, root: int | None, share: int, begin: int, nbytes: int) -> Exchange:
        """Returns this rank's part in moving `nbytes` bytes from offset `begin` of each share; a share has `share`
        bytes.
        """

    def schedule(self, collectives: Collectives, call: Call, share: int) -> Sequence[Step]:
        """Returns the steps of a call that a schedule carries out; `share` is in bytes."""
        part = functools.partial(self.part, collectives.group, call.root, share)
        return move_steps(collectives.by_proxy(), call.source, call.target, share, part)

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        return collectives.launchable(self.steps(collectives, call))

    def steps(self, collectives: Collectives, call: Call) -> Sequence[Step]:
        """Returns the steps that a stream takes for a call."""
        group, source, target = collectives.group, call.source, call.target
        share = self.share(group.world_size, call) * source.dtype.itemsize
        algorithm = collectives.choose(self.name, call.request, source.dtype, call.nbytes)
        if collectives.goes_by_schedule(algorithm):
            return self.schedule(collectives, call, share)
        team = collectives.team()
        packets = team.packets
        if self.name in PACKET_MOVES and packets is not None and share <= packets.move_bytes:
            launch = packets.move(share, call.request.cta_policy)
            kernel = (LINE_KERNELS if launch.lines else PACKET_MOVES)[self.name].load(group.runtime)
            return [kernel.prepare(launch.blocks, launch.threads, launch.parameter, source.ptr, target.ptr, share)]
        root = () if call.root is None else (call.root,)
        reached = call.reached and not (self.rereads_output and source.ptr == target.ptr)
        arguments = (team.parameter(nbytes=share, reached=reached), source.ptr, target.ptr, share, *root)
        blocks = team.grid(share, call.request.cta_policy)
        return [COLLECTIVES[self.name][0].load(group.runtime).prepare(blocks, team.threads, *arguments)]


class _AllGather(Move):
    name = "all_gather"

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        return rows_of_all(group, source)

    def schedule(self, collectives: Collectives, call: Call, share: int) -> Sequence[Step]:
        by_proxy = collectives.by_proxy()
        if crosses_once(by_proxy, share):
            return all_gather_steps(by_proxy, call.source, call.target, share)
        return super().schedule(collectives, call, share)

    def part(self, group: Group, root: int | None, share: int, begin: int, nbytes: int) -> Exchange:
        return Exchange(
            sends=tuple(Transfer(peer, begin, nbytes) for peer in others(group)),
            receives=tuple(Transfer(peer, peer * share + begin, nbytes) for peer in others(group)),
            kept=Transfer(group.rank, group.rank * share + begin, nbytes),
            kept_from=begin,
        )


ALL_GATHER = _AllGather()
"""See `Communicator.all_gather`."""


class _AllToAll(Move):
    name = "all_to_all"
    rereads_output = True

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        share_shape(group, source)
        return source.shape

    def share(self, ranks: int, call: Call) -> int:
        return call.source.size // ranks

    def part(self, group: Group, root: int | None, share: int, begin: int, nbytes: int) -> Exchange:
        shares = tuple(Transfer(peer, peer * share + begin, nbytes) for peer in others(group))
        kept = Transfer(group.rank, group.rank * share + begin, nbytes)
        return Exchange(sends=shares, receives=shares, kept=kept, kept_from=kept.offset)


ALL_TO_ALL = _AllToAll()
"""See `Communicator.all_to_all`."""


class _Broadcast(Move):
    name = "broadcast"
    rooted = in_place = True

    def part(self, group: Group, root: int | None, share: int, begin: int, nbytes: int) -> Exchange:
        assert root is not None
        if group.rank != root:
            return Exchange(receives=(Transfer(root, begin, nbytes),))
        sends = tuple(Transfer(peer, begin, nbytes) for peer in others(group))
        return Exchange(sends=sends, kept=Transfer(root, begin, nbytes), kept_from=begin)


BROADCAST = _Broadcast()
"""See `Communicator.broadcast`."""
