"""The common format of report files: each is a message as JSON, with a `format` and a `version`."""

from __future__ import annotations

from pathlib import Path

from proxyccl.device.errors import ProxyCCLError
from proxyccl.proxy.codec import Message

MOST_BYTES = 64 << 20
"""The largest report file: many times the size of the largest report."""


class ReportError(ProxyCCLError):
    """A file is not a report, or cannot be read. The message names it."""


class Member(Message, frozen=True, eq=False):
    """A process on a host. Comparing ignores `started`.

    Attributes:
        host: the host's name and boot id.
        pid: the process's number there.
        started: when it began (`proxyccl.proxy.processes.start_of`), which distinguishes it from later processes of
            that number; None if it had already ended.
    """

    host: str
    pid: int
    started: int | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Member) and (self.host, self.pid) == (other.host, other.pid)

    def __hash__(self) -> int:
        return hash((self.host, self.pid))


def read(path: Path) -> bytes:
    """A file's bytes; of a longer file one more than `MOST_BYTES`. Raises ReportError."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error
