"""The common format of report files: a message as JSON, with a `format` and a `version`."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.codec import Message, Uint64
from proxyccl.proxy.hosts import host_name, same_host
from proxyccl.proxy.processes import start_of

MOST_BYTES = 64 << 20
"""The largest report file: many times the size of the largest report."""


class ReportError(ProxyCCLError):
    """Raised if a file is not a report or cannot be read. The message names the file."""


class Member(Message, frozen=True, eq=False):
    """Identifies a process on a host. Comparing ignores `started`.

    Attributes:
        host: the host's name and boot id.
        pid: the process's id on that host.
        started: the process's start time (`proxyccl.proxy.processes.start_of`), which distinguishes the process from
            later processes with the same id; None if the process had already ended.
        view: the process's `proc_view`, in which `pid` is valid; 0 if unknown.
    """

    host: str
    pid: int
    started: int | None
    view: Uint64 = 0

    @classmethod
    def own(cls) -> Member:
        pid = os.getpid()
        return cls(host_name(), pid, start_of(pid), proc_view())

    @property
    def is_visible(self) -> bool:
        """Whether `pid` is also the process's id in this PID namespace."""
        return same_host(self.host, host_name()) and self.view == proc_view() != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Member) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def place(self) -> tuple[str, int]:
        """A text that identifies the host and the PID namespace, followed by the process's id in that namespace."""
        return f"{self.host.partition('/')[2]}/{self.view}", self.pid

    @property
    def shown(self) -> str:
        """A readable text that names the process and its host."""
        return f"process {self.pid} on {self.host.partition('/')[0]}"


def require_moment(written: str) -> None:
    """Raises ValueError unless a report's `written` is a date and time in UTC."""
    if datetime.fromisoformat(written).utcoffset() != timedelta(0):
        raise ValueError(f"written: expected a date and time in UTC, got {written!r}")


def read(path: Path) -> bytes:
    """Reads a file, but at most `MOST_BYTES` + 1 bytes. Raises ReportError."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error
