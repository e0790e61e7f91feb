"""A target's plan, as prepared transfers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from proxyccl.channels.transfers import metadata as metadata_of
from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, FreedMemoryError, NotRegisteredError
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.channels.weights.card import Card
from proxyccl.channels.weights.parts import Part
from proxyccl.channels.weights.plan import Read, plan_one
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError

_WORDS = 2
"""A version, and the number of its holder (`Card.version_address`)."""


class Group(Struct):
    """The transfers of one group of parts: from sources, and from other targets, when these have theirs."""

    direct: list[Transfer]
    relayed: list[Transfer]


class Connected:
    """The reads of a target. All its peers compute the same plan.

    Args:
        agent: the target's. It has added the agents of all cards.
        sources, peers: cards by name.
        groups: for each group, its own parts.

    Attributes:
        groups: the transfers of each.
        sources: names of all, also of those that this target reads nothing from: it tells all of them what it has read,
            so each of them counts the same targets.
        peers: names of those that it reads from.
        readers: the peers that read from it, and their numbers, by name.
        nbytes: bytes of all transfers.
    """

    def __init__(
        self, agent: Agent, sources: Mapping[str, Card], peers: Mapping[str, Card], groups: Sequence[Sequence[Part]]
    ) -> None:
        self._agent = agent
        cards = {**sources, **peers}
        nodes = {name: _host(card.metadata) for name, card in cards.items()}
        nodes[agent.name] = _host(agent.metadata(()))
        has = {name: sources[name].parts for name in sorted(sources)}  # all peers make the same plan
        theirs = {name: grouped(card.parts, card.groups) for name, card in peers.items()}
        for name, each in theirs.items():
            if len(each) != len(groups):
                raise ArgumentError("peers", f"{name} has {len(each)} groups of parts, this target {len(groups)}")
        self.groups: list[Group] = []
        reads: list[Read] = []
        readers: set[str] = set()
        for number, parts in enumerate(groups):
            has_own = {**{name: each[number] for name, each in theirs.items()}, agent.name: parts}
            own, from_here = plan_one(agent.name, has, {name: has_own[name] for name in sorted(has_own)}, nodes)
            direct, relayed = ([self._prepare(read) for read in own if read.relayed is late] for late in (False, True))
            self.groups.append(Group(direct, relayed))
            reads += own
            readers |= from_here
        self.readers = {name: peers[name].holder for name in sorted(readers)}
        self.sources = list(sources)
        self.peers = list(dict.fromkeys(read.peer for read in reads if read.relayed))
        self.nbytes = sum(read.nbytes for read in reads)
        used = [*self.sources, *self.peers]
        self._words = np.zeros((len(used), _WORDS), np.uint64)
        self._holders = {name: cards[name].holder for name in used}
        self._region = agent.register(self._words)
        self._index = {name: index for index, name in enumerate(used)}
        size = self._words[:1].nbytes
        self._looks = [
            agent.prepare("read", name, [(self._region.address + index * size, cards[name].version_address, size)])
            for name, index in self._index.items()
        ]

    def _prepare(self, read: Read) -> Transfer:
        return self._agent.prepare("read", read.peer, read.blocks)

    def versions(self, names: Iterable[str], deadline: float) -> set[int]:
        """The versions that holders offer now; 0: none.

        Raises:
            DisconnectedError: one has ended, or was closed.
            TransferTimeoutError: one does not answer.
        """
        chosen = {name: self._index[name] for name in names}
        try:
            self.move([self._looks[index] for index in chosen.values()], deadline)
        except (NotRegisteredError, FreedMemoryError) as error:
            raise _closed(error.peer) from error
        for name, index in chosen.items():
            if self._words[index, 1] != self._holders[name]:
                raise _closed(name)
        return set(self._words[list(chosen.values()), 0].tolist())

    def move(self, transfers: Sequence[Transfer], deadline: float, stream: StreamLike = None) -> None:
        """Carries out transfers at once. When it returns, or raises, memory is no longer touched.

        Raises:
            DisconnectedError, TransferTimeoutError, TransferError: as `Agent.wait`.
        """
        try:
            for transfer in transfers:
                transfer.start(stream=stream)
            self._agent.wait(transfers, max(1e-3, deadline - time.monotonic()))
        finally:
            for transfer in transfers:
                transfer.cancel()

    def close(self) -> None:
        for group in self.groups:
            for transfer in (*group.direct, *group.relayed):
                transfer.close()
        for look in self._looks:
            look.close()
        self._agent.deregister(self._region)


def _closed(name: str) -> DisconnectedError:
    return DisconnectedError(f"agent {name} has closed its weights; connect to those that took their place", name)


def grouped(parts: Sequence[Part], groups: Sequence[int]) -> list[Sequence[Part]]:
    """The parts of each group, which begins with the part of an index."""
    return [parts[first:last] for first, last in itertools.pairwise((*groups, len(parts)))]


def _host(metadata: bytes) -> str:
    place = metadata_of.decode(metadata).place
    return "" if place is None else place.host
