"""The source of weights, such as a rank of a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, TransferError, TransferTimeoutError
from proxyccl.channels.weights.amax import Amaxes, is_measured
from proxyccl.channels.weights.holder import Holder, Place, deadline_of
from proxyccl.device.arguments.integers import as_integer


class WeightSource(Holder):
    """Offers versions of weights, which targets read from this source's memory.

    Targets may read a version during `offer` and `offered`. At other times the program may change the weights: a target
    that is still reading then discards the version, and waits for the next one.

    Args:
        agent: the source's agent. The program must not call `messages` of this agent.
        amax: whether to measure, at the start of each offer, the greatest magnitude (amax) of each block of 128 x 128
            elements in the last two dimensions of parts in float32, float16 and bfloat16. Targets with float8 scales
            need these amaxes.
    """

    def __init__(self, agent: Agent, *, amax: bool = False) -> None:
        super().__init__(agent)
        self._measures = amax
        self._amaxes: list[Amaxes] = []
        self._described = 0  # number of parts that the last card described, with their amaxes

    def card(self) -> bytes:
        if self._measures:
            by_place: dict[Place, list[int]] = {}
            for index in range(self._described, len(self._parts)):
                if is_measured(self._parts[index]):
                    by_place.setdefault(self._memories[index].place, []).append(index)
            for place, indices in by_place.items():
                amaxes = Amaxes(self._agent, self._runtime(place), [self._parts[index] for index in indices])
                self._regions[amaxes.region.address, amaxes.region.nbytes] = amaxes.region
                self._amaxes.append(amaxes)
                for index, part in zip(indices, amaxes.parts, strict=True):
                    self._parts[index] = part
            self._described = len(self._parts)
        return super().card()

    def close(self) -> None:
        super().close()
        self._amaxes.clear()
        self._described = 0

    @property
    def targets(self) -> list[str]:
        """The names of the targets that have connected to this source."""
        self._take_messages()
        return list(self._readers)

    def offer(self, version: int, *, targets: int = 0, timeout: float | None = None) -> list[str]:
        """Offers a version, and returns when all connected targets have read it.

        Before this call, all work that writes to the weights must have ended, including work on a device. All sources
        must offer the same versions.

        Args:
            version: the version's number, at least 1, which identifies one state of the weights.
            targets: the number of targets to wait for at least, including those that connect during the wait.
            timeout: the longest wait in seconds; None: the agent's time-out.

        Returns:
            The names of the targets that have read the version.

        Raises:
            DisconnectedError: the target whose name is `peer` has ended. The remaining targets have read the version,
                and the source can offer another version.
            TransferTimeoutError: the targets that the error names did not read the version within `timeout`.
        """
        deadline = deadline_of(self._agent, timeout)
        lost: dict[str, str] = {}

        def all_have_read() -> bool:
            lost.update(self._lost_readers())
            enough = bool(lost) or len(self._readers) >= targets
            return enough and all(read == version for read in self._readers.values())

        def expected() -> str:
            slow = [name for name, read in self._readers.items() if read != version]
            reason = f"{', '.join(slow)} did not read version {version}" if slow else ""
            return reason or f"{targets} targets did not join, but {len(self._readers)}"

        with self.offered(version):
            try:
                self._wait(all_have_read, deadline, expected)
            except TransferTimeoutError as error:
                raise TransferTimeoutError(str(error), next(iter(lost), "")) from None
        for name, reason in lost.items():
            raise DisconnectedError(f"agent {name} did not read version {version}: {reason}", name)
        return list(self._readers)

    @contextlib.contextmanager
    def offered(self, version: int) -> Iterator[None]:
        """Offers a version during a `with` block. The program must leave the block when it knows, by its own means,
        that the targets have read the version.

        Raises:
            ArgumentError: `version` is not an integer of at least 1.
            TransferError: this source is offering another version.
        """
        as_integer(version, "version", "must be an integer from 1 on", 1, 2**63 - 1)
        if self._version[0]:
            raise TransferError(f"agent {self._agent.name} offers version {self._version[0]} already")
        self._take_messages()
        for amaxes in self._amaxes:
            amaxes.begin()
        for amaxes in self._amaxes:
            amaxes.wait()
        self._open(version)
        try:
            yield
        finally:
            self._shut()
