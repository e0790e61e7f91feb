"""broadcast: one rank's values on all ranks."""

from __future__ import annotations

from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.move_schedules import Exchange, Transfer
from proxyccl.channels.collectives.moves import Move
from proxyccl.channels.group import Group


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
