"""all_to_all: the i-th share of each rank goes to rank i."""

from __future__ import annotations

from proxyccl.channels.arguments import share_shape
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collective import Call
from proxyccl.channels.collectives.move_schedules import Exchange, Transfer
from proxyccl.channels.collectives.moves import Move
from proxyccl.channels.group import Group
from proxyccl.device.arrays.array import ArrayView


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
