"""all_gather: every rank's rows on every rank."""

from __future__ import annotations

from proxyccl.channels.arguments import rows_of_all
from proxyccl.channels.collectives import level_schedules
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collective import Call
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_schedules import Exchange, Transfer
from proxyccl.channels.collectives.moves import Move
from proxyccl.channels.group import Group
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.stream_operations import StreamOperations


class _AllGather(Move):
    name = "all_gather"

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        return rows_of_all(group, source)

    def schedule(self, collectives: Collectives, call: Call, share: int) -> StreamOperations:
        by_proxy = collectives.by_proxy()
        if level_schedules.serves(by_proxy, share):
            return level_schedules.prepare_all_gather(by_proxy, call.source, call.target, share)
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
