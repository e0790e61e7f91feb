"""The reads of a target that is connected to sources and peers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, FreedMemoryError, NotRegisteredError
from proxyccl.channels.transfers.metadata import host_of
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.channels.weights.amax import Scales
from proxyccl.channels.weights.card import Card
from proxyccl.channels.weights.casts import Casts, Staging
from proxyccl.channels.weights.holder import Memory, Place
from proxyccl.channels.weights.parts import Part
from proxyccl.channels.weights.plan import Read, plan_one
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError

_WORDS = 2
"""The number of words at `Card.version_address`."""


class Group(Struct):
    """The reads of one group of parts.

    Attributes:
        direct: the transfers from sources into the parts.
        relayed: the transfers from other targets, which follow all reads from sources.
        casts: the reads from sources whose elements are cast; None if there are none.
        scales: the scales of the parts; None if there are none.
        scaled: the names of the tensors that have scales.
        written: the names of the tensors that `direct` and `relayed` write.
        tensors: the names of all tensors with parts in this group and in no later group.
    """

    direct: list[Transfer]
    relayed: list[Transfer]
    casts: Casts | None
    scales: Scales | None
    scaled: set[str]
    written: set[str]
    tensors: set[str]


class Connected:
    """The prepared reads of a target. The target's agent must have added the agents of all cards.

    Attributes:
        groups: the transfers of each group.
        sources: the names of all sources, even those from which this target reads no parts, because all sources wait
            for the same targets.
        peers: the names of the targets from which this target reads.
        readers: by name, the number of each peer that reads from this target.
    """

    def __init__(
        self,
        agent: Agent,
        sources: Mapping[str, Card],
        peers: Mapping[str, Card],
        groups: Sequence[Sequence[Part]],
        memory_of: Callable[[Part], Memory],
        stage: Callable[[Place, int], Staging],
    ) -> None:
        self._agent = agent
        cards = {**sources, **peers}
        nodes = {name: host_of(card.metadata) for name, card in cards.items()}
        nodes[agent.name] = host_of(agent.metadata(()))
        has = {name: sources[name].parts for name in sorted(sources)}  # sorted, so that peers compute the same plan
        theirs = {name: grouped(card.parts, card.groups) for name, card in peers.items()}
        for name, each in theirs.items():
            if len(each) != len(groups):
                raise ArgumentError("peers", f"{name} has {len(each)} groups of parts; this target has {len(groups)}")
        planned: list[list[Read]] = []
        readers: set[str] = set()
        for number, parts in enumerate(groups):
            has_own = {**{name: each[number] for name, each in theirs.items()}, agent.name: parts}
            own, from_here = plan_one(agent.name, has, {name: has_own[name] for name in sorted(has_own)}, nodes)
            planned.append(own)
            readers |= from_here
        reads = list(itertools.chain.from_iterable(planned))
        self.readers = {name: peers[name].holder for name in sorted(readers)}
        self.sources = list(sources)
        self.peers = list(dict.fromkeys(read.peer for read in reads if read.relayed))
        self.nbytes = sum(read.nbytes for read in reads)
        self._staging: Staging | None = None
        self.groups: list[Group] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_groups)
            self._staging = _staging_for(groups, planned, memory_of, stage)
            for parts, own in zip(groups, planned, strict=True):
                self._add_group(parts, own, has, memory_of)
            undo.pop_all()
        later: set[str] = set()
        for group in reversed(self.groups):
            group.tensors, later = group.tensors - later, group.tensors | later
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

    def _add_group(
        self,
        parts: Sequence[Part],
        reads: Sequence[Read],
        sources: Mapping[str, Sequence[Part]],
        memory_of: Callable[[Part], Memory],
    ) -> None:
        agent, tensors = self._agent, {part.tensor for part in parts}
        direct, relayed = (
            [
                agent.prepare("read", read.peer, read.blocks)
                for read in reads
                if read.relayed is late and len(read.blocks)
            ]
            for late in (False, True)
        )
        order = {id(part): number for number, part in enumerate(parts)}
        # Casts are sorted in the order of the parts, so that transfers from all sources fill the staging buffer
        # together.
        casts = sorted(
            ((read.peer, cast) for read in reads for cast in read.casts),
            key=lambda each: (order[id(each[1].here)], each[1].box.start),
        )
        written = tensors if relayed else tensors - {cast.here.tensor for _, cast in casts}
        scaled = [(part, view) for part in parts if part.nbytes and (view := memory_of(part).scales) is not None]
        group = Group(direct, relayed, None, None, {part.tensor for part, _ in scaled}, written, tensors)
        self.groups.append(group)
        if self._staging is not None:
            if scaled:
                group.scales = Scales(agent, self._staging.runtime, scaled, sources)
            if casts:
                scales = {id(part): view.ptr for part, view in scaled}
                group.casts = Casts(agent, self._staging, casts, scales)

    def read_from_sources(self, group: Group, deadline: float, stream: StreamLike, incomplete: set[str]) -> None:
        """Reads a group's blocks from the sources, and casts elements. Adds the name of each tensor to `incomplete`
        before the tensor's part is written. Raises the errors of `Agent.wait`, but only after all writes to the parts
        have ended.
        """
        incomplete |= group.written
        looks = [] if group.scales is None else group.scales.looks
        self.move([*group.direct, *looks] if looks else group.direct, deadline, stream)
        if self._staging is None or (group.scales is None and group.casts is None):
            return
        if stream is not None:
            self._staging.runtime.synchronize_stream(stream)
        try:
            if group.scales is not None:
                incomplete |= group.scaled
                group.scales.store(self._staging.stream)
            if group.casts is not None:
                group.casts.move(deadline, incomplete)
        finally:
            self._staging.stream.synchronize()

    def versions(self, names: Iterable[str], deadline: float) -> set[int]:
        """Reads the version words of the named holders, and returns the set of versions that they offer now. The set
        contains 0 if a holder offers no version. Raises DisconnectedError, TransferTimeoutError."""
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
        """Makes transfers concurrently, and waits for them. Raises the errors of `Agent.wait`, but only after all
        transfers have ended."""
        try:
            for transfer in transfers:
                transfer.start(stream=stream)
            self._agent.wait(transfers, max(1e-3, deadline - time.monotonic()))
        finally:
            for transfer in transfers:
                transfer.cancel()

    def close(self) -> None:
        self._close_groups()
        for look in self._looks:
            look.close()
        self._agent.deregister(self._region)

    def _close_groups(self) -> None:
        for group in self.groups:
            for part in (*group.direct, *group.relayed, group.scales, group.casts):
                if part is not None:
                    part.close()
        if self._staging is not None:
            self._staging.close()


def _staging_for(
    groups: Sequence[Sequence[Part]],
    planned: Sequence[Sequence[Read]],
    memory_of: Callable[[Part], Memory],
    stage: Callable[[Place, int], Staging],
) -> Staging | None:
    """Makes the staging buffer, with two halves of the size that the largest group needs; returns None if nothing is
    cast.
    """
    casts = [[cast for read in reads for cast in read.casts] for reads in planned]
    parts = [cast.here for each in casts for cast in each]
    parts += [part for each in groups for part in each if part.nbytes and part.scales]
    places = {memory_of(part).place for part in parts}
    if len(places) > 1:
        raise ArgumentError("sources", "parts with other element types than the sources' are on several devices")
    return next((stage(place, 2 * max(sum(cast.nbytes for cast in each) for each in casts)) for place in places), None)


def _closed(name: str) -> DisconnectedError:
    return DisconnectedError(f"agent {name} has closed its weights; connect to the weights that replace them", name)


def grouped(parts: Sequence[Part], groups: Sequence[int]) -> list[Sequence[Part]]:
    """Returns the parts of each group. `groups` has the index of each group's first part."""
    return [parts[first:last] for first, last in itertools.pairwise((*groups, len(parts)))]
