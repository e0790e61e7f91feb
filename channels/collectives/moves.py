"""The common part of the collectives that only move bytes."""

from __future__ import annotations

import functools
from abc import abstractmethod

from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_schedules import Exchange, prepare_move
from proxyccl.channels.collectives.table import COLLECTIVES, LINE_KERNELS, PACKET_MOVES
from proxyccl.channels.group import Group
from proxyccl.device.stream_operations import StreamOperations


class Move(Collective):
    """A collective whose kernel takes (team, source, target, share in bytes[, root]).

    The proxies do it instead, by each rank's `part`, where `Collectives.goes_by_schedule`.

    Attributes:
        rereads_output: whether a rank in place reads what peers would overwrite, so nobody may store to its output.
    """

    rereads_output = False

    @abstractmethod
    def part(self, group: Group, root: int | None, share: int, begin: int, nbytes: int) -> Exchange:
        """This rank's part in moving some bytes of each share.

        Args:
            group: the ranks.
            root: the call's.
            share: size of a share in bytes.
            begin, nbytes: offset in the share, and number.
        """

    def schedule(self, collectives: Collectives, call: Call, share: int) -> StreamOperations:
        """The stream operations of a call by schedule.

        Args:
            collectives: the group's.
            call: the call.
            share: size of a share in bytes.
        """
        part = functools.partial(self.part, collectives.group, call.root, share)
        return prepare_move(collectives.by_proxy(), call.source, call.target, share, part)

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """See `Collective.launch`."""
        group, source, target = collectives.group, call.source, call.target
        share = self.share(group.world_size, call) * source.dtype.itemsize
        algorithm = collectives.choose(self.name, call.request, source.dtype, call.nbytes)
        if collectives.goes_by_schedule(algorithm):
            return self.schedule(collectives, call, share)
        team = collectives.team()
        packets = team.packets
        if self.name in PACKET_MOVES and packets is not None and share <= packets.move_bytes:
            launch = packets.move(share, call.request.cta_policy)
            kernel = (LINE_KERNELS if launch.lines else PACKET_MOVES)[self.name]
            shipped = group.runtime.shipped(kernel.file, kernel.name)
            return shipped.prepare(launch.blocks, launch.threads, launch.parameter, source.ptr, target.ptr, share)
        kernel = COLLECTIVES[self.name][0]
        root = () if call.root is None else (call.root,)
        staged = self.rereads_output and source.ptr == target.ptr
        reached = call.reached and not staged
        arguments = (team.parameter(nbytes=share, reached=reached), source.ptr, target.ptr, share, *root)
        blocks = team.grid(share, call.request.cta_policy)
        return group.runtime.shipped(kernel.file, kernel.name).prepare(blocks, team.threads, *arguments)
