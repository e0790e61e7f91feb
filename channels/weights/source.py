"""The source of weights, such as a rank of a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, TransferError, TransferTimeoutError
from proxyccl.channels.weights.holder import Holder, deadline_of
from proxyccl.device.arguments.integers import as_integer


class WeightSource(Holder):
    """Offers versions of weights, which targets read from the source's memory.

    A version may be read while it is offered. Outside of `offer` and `offered` the program may change the weights: a
    target that still reads notices this, and waits for the next version.

    Args:
        agent: the source's agent. Nothing else may take this agent's messages.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)

    @property
    def targets(self) -> list[str]:
        """The names of the targets that read from this source, as far as it knows."""
        self._take_messages()
        return list(self._readers)

    def offer(self, version: int, *, targets: int = 0, timeout: float | None = None) -> list[str]:
        """Offers a version, and returns when all known targets have read it.

        All work on the weights must have ended, also on the device. Every source must offer the same versions.

        Args:
            version: the version's number, from 1 on. Each number identifies one state of the weights.
            targets: the least number of targets that must have read the version. Targets may join during the wait.
            timeout: seconds; None: the agent's time-out.

        Returns:
            The names of the targets that have read the version.

        Raises:
            DisconnectedError: a target, whose name is `peer`, ended. The other targets have read the version, and the
                source is ready for the next one.
            TransferTimeoutError: targets, which the error names, did not read the version within the time.
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
        """Offers a version during the `with` block. The program must know by other means when the targets have read the
        version, and then leave the block.

        Raises:
            ArgumentError: the version is not an integer from 1 on.
            TransferError: another version is being offered.
        """
        as_integer(version, "version", "must be an integer from 1 on", 1, 2**63 - 1)
        if self._version[0]:
            raise TransferError(f"agent {self._agent.name} offers version {self._version[0]} already")
        self._take_messages()
        self._open(version)
        try:
            yield
        finally:
            self._shut()
