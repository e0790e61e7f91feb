"""The side that needs weights: a rank of a sampler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, NotStartedError
from proxyccl.channels.weights.card import MESSAGE, Card, HasRead, Join, Leave, decode_card
from proxyccl.channels.weights.connected import Connected, Group, grouped
from proxyccl.channels.weights.holder import Holder, deadline_of
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError


class Received(Struct, frozen=True):
    """Weights that have arrived.

    Attributes:
        version: their version.
        nbytes: bytes that this target read.
        seconds: from the first read's start to the end of the last one.
    """

    version: int
    nbytes: int
    seconds: float


class WeightTarget(Holder):
    """Reads versions of weights into its memory.

    Args:
        agent: the target takes its messages. Nothing else may.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._connected: Connected | None = None
        self._last = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a version moves to this target, once it is connected."""
        return 0 if self._connected is None else self._connected.nbytes

    def next_group(self) -> None:
        """Begins a group of parts. Groups are read one after another, so their parts may share memory: `receive` calls
        `each` between them."""
        self._groups.append(len(self._parts))

    def connect(self, sources: Iterable[bytes], *, peers: Iterable[bytes] = ()) -> None:
        """Plans and prepares the reads, and joins the sources. `add` all parts before. Call it again when a holder has
        ended and another one has taken its place.

        Args:
            sources: cards of all sources.
            peers: cards of other targets, which connect to the same sources and have this target's card. Where several
                of them are on one host, one of them reads each part from a source, and the others read it from that
                one. All of them receive each version.

        Raises:
            ArgumentError: no source has a part, shapes or element types differ, or peers have other numbers of groups.
            MetadataError: a card is not one.
            DisconnectedError: a holder can't be reached. `peer` is its name.
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
        """Waits until the sources offer a version, and reads it.

        Args:
            version: the one to read; None: the next that is not the last one received.
            timeout: seconds for all of it; None: the agent's.
            stream: of the device where the parts lie: the reads follow its work, and its later work follows the reads.
            each: called with the number of each group when its data is in place, before the next group is read. On a
                device it queues its work on `stream`.

        Returns:
            The version that has arrived, of which all sources were told.

        Raises:
            NotStartedError: it is not connected.
            DisconnectedError: a source or a peer, whose name is `peer`, has ended or was closed. The weights may be of
                two versions.
            TransferTimeoutError: not all sources offered the version, or the reads did not end, within the time.
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
        """Leaves the sources, and ends the registration of all parts. The agent stays open."""
        self._disconnect()
        super().close()

    def _meet_all(self, cards: Iterable[bytes]) -> dict[str, Card]:
        decoded = [decode_card(data) for data in cards]
        return {self._meet(card.metadata): card for card in decoded}

    def _disconnect(self) -> None:
        if self._connected is not None:
            connected, self._connected = self._connected, None
            connected.close()
            for source in connected.sources:
                with contextlib.suppress(DisconnectedError):  # it has ended
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
        """Reads a version. False: a source withdrew it meanwhile."""
        for number, group in enumerate(connected.groups):
            connected.move(group.direct, deadline, stream)
            if connected.versions(connected.sources, deadline) != {version}:
                return False
            if connected.peers or connected.readers:
                # A number that no group before has, as the parts of several may share memory. It fits in a word.
                shared = 1 + (version * len(connected.groups) + number) % (2**63 - 1)
                self._pass_on(connected, group, shared, deadline, stream)
            if each is not None:
                each(number)
        for source in connected.sources:
            self._agent.notify(source, MESSAGE.encode(HasRead(version, self._number)))
        return True

    def _pass_on(self, connected: Connected, group: Group, number: int, deadline: float, stream: StreamLike) -> None:
        """Lets peers read the parts of a group that this target has, and reads from them those that they have."""

        def peers_have_theirs() -> bool:
            return connected.versions(connected.peers, deadline) <= {number}

        def peers_have_mine() -> bool:
            for name, reason in self._lost_readers().items():
                raise DisconnectedError(f"agent {name} did not read this target's share: {reason}", name)
            return all(read == number for read in self._readers.values())

        self._take_messages()
        self._readers = dict.fromkeys(self._readers, 0)  # an earlier try, of the same version, had the same number
        self._open(number)
        try:
            whole = False
            while not whole:
                self._wait(peers_have_theirs, deadline, lambda: f"{connected.peers} did not read their shares")
                connected.move(group.relayed, deadline, stream)
                whole = peers_have_theirs()  # else one gave up meanwhile, and may have overwritten its share
            for peer in connected.peers:
                self._agent.notify(peer, MESSAGE.encode(HasRead(number, self._number)))
            self._wait(peers_have_mine, deadline, lambda: f"{list(self._readers)} did not read this target's share")
        finally:
            self._shut()
