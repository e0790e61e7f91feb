"""The target of weights, such as a rank of a sampler."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, FreedMemoryError, NotRegisteredError, NotStartedError
from proxyccl.channels.transfers.metadata import host_of
from proxyccl.channels.transfers.transfer import Transfer
from proxyccl.channels.weights.card import CARD, MESSAGE, Card, HasRead, Join, Leave
from proxyccl.channels.weights.holder import Holder, deadline_of
from proxyccl.channels.weights.parts import Part
from proxyccl.channels.weights.plan import Read, plan_one
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError

_WORDS = 2
"""The number of words at `Card.version_address`."""


class Group(Struct):
    """The transfers of one group of parts: `direct` transfers from sources, and then `relayed` transfers from other
    targets."""

    direct: list[Transfer]
    relayed: list[Transfer]


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
        self, agent: Agent, sources: Mapping[str, Card], peers: Mapping[str, Card], groups: Sequence[Sequence[Part]]
    ) -> None:
        self._agent = agent
        cards = {**sources, **peers}
        nodes = {name: host_of(card.metadata) for name, card in cards.items()}
        nodes[agent.name] = host_of(agent.metadata(()))
        has = {name: sources[name].parts for name in sorted(sources)}  # sorted, so that peers compute the same plan
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
            direct, relayed = (
                [agent.prepare("read", read.peer, read.blocks) for read in own if read.relayed is late]
                for late in (False, True)
            )
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

    def versions(self, names: Iterable[str], deadline: float) -> set[int]:
        """Reads the version words of the named holders, and returns the set of versions that they offer now. The set
        contains 0 if a holder offers none. Raises DisconnectedError, TransferTimeoutError."""
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
        for group in self.groups:
            for transfer in (*group.direct, *group.relayed):
                transfer.close()
        for look in self._looks:
            look.close()
        self._agent.deregister(self._region)


def _closed(name: str) -> DisconnectedError:
    return DisconnectedError(f"agent {name} has closed its weights; connect to the weights that replace them", name)


def grouped(parts: Sequence[Part], groups: Sequence[int]) -> list[Sequence[Part]]:
    """Returns the parts of each group. `groups` has the index of each group's first part."""
    return [parts[first:last] for first, last in itertools.pairwise((*groups, len(parts)))]


class Received(Struct, frozen=True):
    """A version of the weights that a target has read.

    Attributes:
        version: the version's number.
        nbytes: the number of bytes that this target read.
        seconds: the time from the start of the first read to the end of the last one, in seconds.
    """

    version: int
    nbytes: int
    seconds: float


class WeightTarget(Holder):
    """Reads versions of weights from sources into this target's memory.

    Args:
        agent: the target's agent. The program must not call `messages` of this agent.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._connected: Connected | None = None
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes that this target reads for each version; 0 before `connect`."""
        return 0 if self._connected is None else self._connected.nbytes

    def next_group(self) -> None:
        """Begins a new group, to which later calls of `add` add parts. `receive` reads groups one after another, and
        calls `each` after each group, so parts of different groups may share memory."""
        self._groups.append(len(self._parts))

    def connect(self, sources: Iterable[bytes], *, peers: Iterable[bytes] = ()) -> None:
        """Connects to the sources, and plans and prepares the reads. Call `add` for all parts before this call. If a
        source or peer ends and another one replaces it, call this again.

        Args:
            sources: the cards of all sources.
            peers: the cards of other targets with which this target shares its reads. These other targets must connect
                to the same sources, with this target among their peers. Of the targets on one host, only one reads each
                piece from a source, and the others read the piece from that target, so all of the targets must receive
                each version.

        Raises:
            ArgumentError: no source has a part of this target, shapes or element types differ between holders, or a
                peer has another number of groups.
            MetadataError: an element of `sources` or `peers` is not a card.
            DisconnectedError: the holder whose name is `peer` can't be reached.
        """
        self._disconnect()
        theirs, others = self._meet_all(sources), self._meet_all(peers)
        connected = Connected(self._agent, theirs, others, grouped(self._parts, self._groups))
        if not connected.nbytes:
            connected.close()
            raise ArgumentError("sources", "this target has no part of a tensor to read")
        self._connected = connected
        self._readers, self._numbers = dict.fromkeys(connected.readers, 0), dict(connected.readers)
        for source in connected.sources:
            self._agent.notify(source, MESSAGE.encode(Join(self._agent.metadata(()), self._number)))

    def receive(
        self,
        version: int | None = None,
        *,
        timeout: float | None = None,
        stream: StreamLike = None,
        each: Callable[[int], object] | None = None,
    ) -> Received:
        """Waits until all sources offer a version, and reads it.

        Args:
            version: the version to read; None: the next version that is not the one received last.
            timeout: the longest that the whole call may take, in seconds; None: the agent's time-out.
            stream: a stream of the parts' device. The reads begin after the stream's earlier work, and its later work
                waits for the reads.
            each: called after each group was read, with the group's index, and before the next group is read. If the
                callback uses the parts on a device, it must queue that work on `stream`.

        Returns:
            The version that this target has read, and has reported to all sources.

        Raises:
            NotStartedError: the target is not connected.
            DisconnectedError: the source or peer whose name is `peer` has ended or was closed. The parts may contain
                data of two versions.
            TransferTimeoutError: not all sources offered the version, or the reads did not end, within `timeout`.
        """
        connected = self._connected
        if connected is None:
            raise NotStartedError(f"agent {self._agent.name}: connect first")
        if version is not None:
            as_integer(version, "version", "must be an integer from 1 on", 1, 2**63 - 1)
        deadline = deadline_of(self._agent, timeout)
        while True:
            found = self._await_version(connected, version, deadline)
            begin = time.perf_counter()
            if self._read(connected, found, deadline, stream, each):
                self._last = found
                return Received(found, connected.nbytes, time.perf_counter() - begin)

    def close(self) -> None:
        """Disconnects from the sources, and deregisters all parts, but leaves the agent open."""
        self._disconnect()
        super().close()

    def _meet_all(self, cards: Iterable[bytes]) -> dict[str, Card]:
        decoded = [CARD.decode(data, "a holder of weights") for data in cards]
        return {self._meet(card.metadata): card for card in decoded}

    def _disconnect(self) -> None:
        if self._connected is not None:
            connected, self._connected = self._connected, None
            connected.close()
            for source in connected.sources:
                with contextlib.suppress(DisconnectedError):  # a source that has ended
                    self._agent.notify(source, MESSAGE.encode(Leave(self._number)))
        self._last = 0

    def _await_version(self, connected: Connected, version: int | None, deadline: float) -> int:
        seen: set[int] = set()

        def offered() -> bool:
            nonlocal seen
            seen = connected.versions(connected.sources, deadline)
            return len(seen) == 1 and not seen & {0, self._last if version is None else 0} and version in {None, *seen}

        def expected() -> str:
            wanted = "a new version" if version is None else f"version {version}"
            now = ", ".join(str(each) if each else "none" for each in sorted(seen))
            return f"the sources did not offer {wanted} (now: {now})"

        self._wait(offered, deadline, expected)
        return seen.pop()

    def _read(
        self,
        connected: Connected,
        version: int,
        deadline: float,
        stream: StreamLike,
        each: Callable[[int], object] | None,
    ) -> bool:
        """Reads a version. Returns False if a source stopped offering the version during the reads."""
        for number, group in enumerate(connected.groups):
            connected.move(group.direct, deadline, stream)
            if connected.versions(connected.sources, deadline) != {version}:
                return False
            if connected.peers or connected.readers:
                # `shared` differs between groups, because groups may share memory.
                shared = 1 + (version * len(connected.groups) + number) % (2**63 - 1)
                self._pass_on(connected, group, shared, deadline, stream)
            if each is not None:
                each(number)
        for source in connected.sources:
            self._agent.notify(source, MESSAGE.encode(HasRead(version, self._number)))
        return True

    def _pass_on(self, connected: Connected, group: Group, number: int, deadline: float, stream: StreamLike) -> None:
        def peers_have_theirs() -> bool:
            return connected.versions(connected.peers, deadline) <= {number}

        def peers_have_mine() -> bool:
            for name, reason in self._lost_readers().items():
                raise DisconnectedError(f"agent {name} did not read this target's share: {reason}", name)
            return all(read == number for read in self._readers.values())

        self._take_messages()
        self._readers = dict.fromkeys(self._readers, 0)  # an earlier attempt may have used this number
        self._open(number)
        try:
            whole = False
            while not whole:
                self._wait(peers_have_theirs, deadline, lambda: f"{connected.peers} did not read their shares")
                connected.move(group.relayed, deadline, stream)
                whole = peers_have_theirs()  # if False, a peer may have overwritten its share during the reads
            for peer in connected.peers:
                self._agent.notify(peer, MESSAGE.encode(HasRead(number, self._number)))
            self._wait(peers_have_mine, deadline, lambda: f"{list(self._readers)} did not read this target's share")
        finally:
            self._shut()
