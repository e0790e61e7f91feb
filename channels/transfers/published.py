"""How `proxyccl info` and `top` find agents: each publishes a small file with its links and their paths.

The files lie beside those of proxies. An agent that is killed leaves its file, which the next reader removes.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.shown_text import shown
from proxyccl.proxy._transfers import ffi
from proxyccl.proxy.codec import Codec, Message, ProtocolError
from proxyccl.proxy.observe.publications import OfProcess, find_running, new_name, this_process, withdraw, write

if TYPE_CHECKING:
    from proxyccl.channels.transfers.paths import Path as DataPath

_SUFFIX = ".agent"
_LOG = logging.getLogger("proxyccl.transfer")


class LinkSeen(Message, frozen=True):
    """A link that an agent opened, and the path of its data."""

    peer: str
    path: str


class AgentSeen(OfProcess, frozen=True):
    """An agent of this machine.

    Attributes:
        name: the agent's name.
        program: the program that it belongs to.
        links: the links that it opened.
        labels: the peer and the path that each number in records of transfers stands for.
        log: the handle of the memory that holds these records.
    """

    name: str
    program: str
    links: list[LinkSeen]
    labels: list[LinkSeen]
    log: Annotated[bytes, Meta(max_length=1024)]

    @property
    def reaches(self) -> str:
        """The agent's peers and the path to each, as text."""
        return ", ".join(f"{link.peer} by {link.path}" for link in self.links) or "no peer so far"


_SEEN = Codec(AgentSeen, 16 << 20)


class Published:
    """An agent's file. A failure to write the file is only logged, because the agent works without it. Any thread may
    use it.

    Attributes:
        log: the memory with its records of transfers, a ProxycclTransferLog.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.log = SharedMemory.allocate(ffi.sizeof("ProxycclTransferLog"))
        self._links: list[LinkSeen] = []
        self._labels: dict[tuple[str, str], int] = {}
        self._file = new_name(_SUFFIX)
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._failed = False

    def write(self, links: Iterable[tuple[str, DataPath]]) -> None:
        """Publishes the agent's links."""
        with self._lock:
            self._links = [LinkSeen(peer, str(path)) for peer, path in links]
        self._write()

    def label(self, peer: str, path: str) -> int:
        """Returns the number that stands for a peer and a path in records of transfers."""
        with self._lock:
            number = self._labels.get((peer, path))
            if number is not None:
                return number
            number = self._labels[peer, path] = len(self._labels)
        self._write()
        return number

    def _write(self) -> None:
        if self._failed:
            return
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        with self._lock:
            labels = [LinkSeen(*label) for label in self._labels]
            try:  # OSError, because no descriptor may be left to read /proc
                seen = AgentSeen(*this_process(), self._name, program, self._links, labels, self.log.handle)
                self._path = write(self._file, _SEEN.encode(seen))
            except (OSError, ArgumentError, ProtocolError) as error:
                self._failed = True
                _LOG.warning("`proxyccl info` and `top` cannot see agent %s: %s", shown(self._name), error)

    def withdraw(self) -> None:
        """Removes the file."""
        with self._lock:
            self._failed = True
            if self._path is not None:
                withdraw(self._path)


def find_agents() -> list[AgentSeen]:
    """Returns the agents of this user on this machine, by name. Removes files of processes that ended.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    agents = [seen for _, seen in find_running(_SUFFIX, _SEEN)]
    return sorted(agents, key=lambda seen: (seen.name, seen.pid))


def agents_text() -> str:
    """Returns a line for each agent of this user, with its peers and the path to each of them; "" if there is no
    agent."""
    return "\n".join(
        shown(f"agent {seen.name}: reaches {seen.reaches}; process {seen.pid}, {seen.program}")
        for seen in find_agents()
    )
