"""The operations of execution plans by name, with their operands."""

from __future__ import annotations

from msgspec import Struct

from proxyccl.channels.execution_plans.document import ChannelType

COMBINATIONS = ("sum", "prod", "min", "max")
"""The operators with which operations reduce, in the order of ProxycclCombination (execution.h)."""


class Operand(Struct, frozen=True):
    """Consecutive entries of an operation's `src_buff` or `dst_buff` with the same properties."""

    remote: bool = False  # whether the operands are in a peer's buffer instead of this rank's
    packets: bool = False  # whether the operands are packets, in scratch memory
    most: int = 1  # the greatest number of operands; at least one is required


MANY = 1 << 20


class Moving(Struct, frozen=True):
    sources: tuple[Operand, ...]
    destinations: tuple[Operand, ...]
    # The channel types over which the operation may access remote buffers; () if the operation accesses no remote
    # buffer.
    channels: tuple[ChannelType, ...] = ()
    # Whether source i is copied to destination i; if not, the combination of all sources is stored in all destinations.
    pairs: bool = False
    # Whether the operation signals, or flushes, on its port channel after the data.
    signals: bool = False
    flushes: bool = False

    @property
    def combines(self) -> bool:
        return not self.pairs and (len(self.sources) > 1 or self.sources[0].most > 1)

    @property
    def packets(self) -> bool:
        return any(operand.packets for operand in (*self.sources, *self.destinations))


_OWN, _OWNS = Operand(), Operand(most=MANY)
_OWN_PACKETS = Operand(packets=True)
_OWNS_PACKETS = Operand(packets=True, most=MANY)
_PEERS = Operand(remote=True, most=MANY)
_PEERS_PACKETS = Operand(remote=True, packets=True, most=MANY)
_MEMORY: tuple[ChannelType, ...] = ("memory",)
_PORT: tuple[ChannelType, ...] = ("port",)
_ANY: tuple[ChannelType, ...] = ("memory", "port")

MOVING: dict[str, Moving] = {
    "copy": Moving((_OWNS,), (_OWNS,), pairs=True),
    "put": Moving((_OWNS,), (_PEERS,), _ANY, pairs=True),
    "pws": Moving((_OWNS,), (_PEERS,), _PORT, pairs=True, signals=True),
    "pwsf": Moving((_OWNS,), (_PEERS,), _PORT, pairs=True, signals=True, flushes=True),
    "get": Moving((_PEERS,), (_OWNS,), _MEMORY, pairs=True),
    "re": Moving((_OWNS,), (_OWN,)),
    "res": Moving((_OWNS,), (_OWN, _PEERS), _MEMORY),
    "rre": Moving((_OWN, _PEERS), (_OWN,), _MEMORY),
    "rres": Moving((_OWN, _PEERS), (_OWN, _PEERS), _MEMORY),
    "cpkt": Moving((_OWNS,), (_OWNS_PACKETS,), pairs=True),
    "upkt": Moving((_OWNS_PACKETS,), (_OWNS,), pairs=True),
    "ppkt": Moving((_OWNS,), (_PEERS_PACKETS,), _ANY, pairs=True),
    "rppkt": Moving((_OWN_PACKETS,), (_PEERS_PACKETS,), _ANY),
    "repkt": Moving((_OWN, _OWNS_PACKETS), (_OWN,)),
    "respkt": Moving((_OWN, _OWNS_PACKETS), (_OWN, _PEERS_PACKETS), _MEMORY),
    "recpkt": Moving((_OWN, _OWNS_PACKETS), (_OWN, _OWN_PACKETS)),
    "recspkt": Moving((_OWN, _OWNS_PACKETS), (_OWN, _OWN_PACKETS, _PEERS_PACKETS), _MEMORY),
}
"""The operations that move data, by their names in MSCCL++."""

MOVING_PACKETS_BY_PORT = Moving((_OWNS_PACKETS,), (_PEERS_PACKETS,), _PORT, pairs=True)
"""The operation `ppkt` on a port channel, whose source already holds packets."""

CHANNELLED: dict[str, tuple[ChannelType, ...]] = {
    "signal": _ANY,
    "rlxsignal": _ANY,
    "wait": _ANY,
    "rlxwait": _ANY,
    "flush": _PORT,
}
"""Operations on channels without data, and the types of channels that they take."""

OTHERS = frozenset({"nop", "barrier", "sem_acquire", "sem_release", "pipeline"})
SWITCHED = frozenset({"glre", "glres", "gstore", "gstorepkt"})
"""Operations that are refused, because they need a switch that multicasts."""
