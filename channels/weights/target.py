"""The target of weights, such as a rank of a sampler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, NotStartedError
from proxyccl.channels.weights.card import CARD, MESSAGE, Card, HasRead, Join, Leave
from proxyccl.channels.weights.casts import LEAST_STAGING, Staging
from proxyccl.channels.weights.connected import Connected, Group, grouped
from proxyccl.channels.weights.holder import Holder, Place, deadline_of
from proxyccl.channels.weights.sharding import Sharding
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError

_STAGING_BYTES = 256 << 20
_SHOWN = 10
"""The most tensors that the note of an error names."""


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
        staging_bytes: the maximum size, in bytes, of the buffer into which elements of another type than the target's
            are read before they are cast. The buffer is on the device of the parts.
    """

    def __init__(self, agent: Agent, *, staging_bytes: int = _STAGING_BYTES) -> None:
        super().__init__(agent)
        self._staging_bytes = as_integer(
            staging_bytes, "staging_bytes", f"must be an integer from {LEAST_STAGING} on", LEAST_STAGING, 2**62
        )
        self._incomplete: set[str] = set()
        self._connected: Connected | None = None
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes that this target reads for each version; 0 before `connect`."""
        return 0 if self._connected is None else self._connected.nbytes

    @property
    def incomplete(self) -> list[str]:
        """The names of the tensors whose parts may contain data of two versions, because `receive` has failed; empty
        after the next successful `receive`. The parts of other tensors contain a whole version, but not necessarily the
        same one.
        """
        return sorted(self._incomplete)

    def add(
        self,
        tensor: str,
        array: Any,
        *,
        sharding: Sharding | None = None,
        start: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        within: Any = (),
        scale: Any = None,
    ) -> None:
        """Adds an array that receives a tensor or a part of it, and registers the array with the agent.

        An array in float32, float16 or bfloat16 may receive a tensor of another of these types: `receive` rounds to
        nearest, ties to even, as torch's `Tensor.to` does. An array in float8_e4m3fn may receive a tensor of these
        types if it has scales, and if the sources measure amaxes (`WeightSource(amax=True)`). A scale is amax / 448,
        where amax is the greatest magnitude of the whole tensor, or of the whole block, so all targets get the same
        scale; the scale is 1 if amax is at most 1e-30. Elements are multiplied by 1 / scale, and rounded; the greatest
        magnitude of a float8 element is 448.

        Args:
            tensor, array, sharding, start, size, within: as for `WeightSource.add`.
            scale: a float32 array on the array's device, which receives the scales. An array of shape () or (1,)
                receives one scale of the whole tensor. An array of another shape receives a scale for each block of
                128 x 128 elements in the last two dimensions: its last two extents are those of the part, divided by
                128 and rounded up, and its other extents are those of the part.

        Raises:
            ArgumentError: as for `WeightSource.add`; or `scale` has another type, shape or device, or the part begins
                within a block that has one scale.
        """
        self._add(tensor, array, sharding, start, size, within, scale)

    def next_group(self) -> None:
        """Begins a new group, to which later calls of `add` add parts. `receive` reads groups one after another, and
        calls `each` after each group, so parts of different groups may share memory."""
        self._groups.append(len(self._parts))

    def connect(self, sources: Iterable[bytes], *, peers: Iterable[bytes] = ()) -> None:
        """Connects to the sources, and plans and prepares the reads. Call `add` for all parts before this call. If a
        source or peer ends and another one replaces it, call `connect` again.

        Args:
            sources: the cards of all sources.
            peers: the cards of other targets with which this target shares its reads. These other targets must connect
                to the same sources, with this target among their peers. Of the targets on one host, only one reads each
                piece from a source, and the others read the piece from that target, so all of the targets must receive
                each version.

        Raises:
            ArgumentError: no source has a part of this target, shapes differ between holders, the sources' element type
                can't be cast to this target's, or a peer has another element type or another number of groups.
            MetadataError: an element of `sources` or `peers` is not a card.
            DisconnectedError: the holder whose name is `peer` can't be reached.
        """
        self._disconnect()
        theirs, others = self._meet_all(sources), self._meet_all(peers)
        memories = {id(part): memory for part, memory in zip(self._parts, self._memories, strict=True)}
        groups = grouped(self._parts, self._groups)
        connected = Connected(self._agent, theirs, others, groups, lambda part: memories[id(part)], self._stage)
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
            DisconnectedError: the source or peer whose name is `peer` has ended or was closed.
            TransferTimeoutError: not all sources offered the version, or the reads did not end, within `timeout`.

        After an error nothing still writes to the parts. `incomplete`, and a note of the error, name the tensors
        whose parts may contain data of two versions.
        """
        connected = self._connected
        if connected is None:
            raise NotStartedError(f"agent {self._agent.name}: connect first")
        if version is not None:
            as_integer(version, "version", "must be an integer from 1 on", 1, 2**63 - 1)
        deadline = deadline_of(self._agent, timeout)
        try:
            while True:
                found = self._await_version(connected, version, deadline)
                begin = time.perf_counter()
                if self._read(connected, found, deadline, stream, each):
                    self._last = found
                    return Received(found, connected.nbytes, time.perf_counter() - begin)
        except Exception as error:
            if self._incomplete:
                names, more = self.incomplete[:_SHOWN], len(self._incomplete) - _SHOWN
                error.add_note(f"incomplete tensors: {', '.join(names)}" + (f" and {more} more" if more > 0 else ""))
            raise

    def close(self) -> None:
        """Disconnects from the sources, and deregisters all parts, but leaves the agent open."""
        self._disconnect()
        super().close()

    def _stage(self, place: Place, nbytes: int) -> Staging:
        size = min(self._staging_bytes, max(nbytes + LEAST_STAGING, LEAST_STAGING))
        return Staging(self._agent, self._runtime(place), size, is_device=place[2])

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
            connected.read_from_sources(group, deadline, stream, self._incomplete)
            if connected.versions(connected.sources, deadline) != {version}:
                return False
            if connected.peers or connected.readers:
                # `shared` differs between groups, because groups may share memory.
                shared = 1 + (version * len(connected.groups) + number) % (2**63 - 1)
                self._pass_on(connected, group, shared, deadline, stream)
            self._incomplete -= group.tensors
            if each is not None:
                each(number)
        for source in connected.sources:
            self._agent.notify(source, MESSAGE.encode(HasRead(version, self._number)))
        self._incomplete.clear()
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
