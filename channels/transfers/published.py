"""Publishes each agent's links and their paths in a small file, from which `proxyccl info` and `top` find agents.

The agents' files are in the same directory as the proxies' files. If an agent's process is killed, the agent's file
remains until a reader removes it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Iterable
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
_KEPT_LABELS = 64
_LOG = logging.getLogger("proxyccl.transfer")


class LinkSeen(Message, frozen=True):
    """The peer of a link that an agent opened, and the link's path."""

    peer: str
    path: str


class AgentSeen(OfProcess, frozen=True):
    """The published description of an agent of this machine.

    Attributes:
        name: the agent's name.
        program: the file name of the agent's program.
        links: the links that the agent opened.
        labels: peers and paths, which records of transfers refer to by their indices in this list.
        log: the handle of the memory that holds these records.
    """

    name: str
    program: str
    links: list[LinkSeen]
    labels: list[LinkSeen]
    log: Annotated[bytes, Meta(max_length=1024)]

    @property
    def reaches(self) -> str:
        """A text with the agent's peers and the path to each peer."""
        return ", ".join(f"{link.peer} by {link.path}" for link in self.links) or "no peer so far"


_SEEN = Codec(AgentSeen, 16 << 20)


class Published:
    """An agent's file. A failure to write the file is only logged. Any thread may call the methods of this class.

    Attributes:
        log: the shared memory with the agent's records of transfers, a ProxycclTransferLog.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.log = SharedMemory.allocate(ffi.sizeof("ProxycclTransferLog"))
        self._links: list[LinkSeen] = []
        self._labels: dict[tuple[str, str], int] = {}
        self._former: dict[tuple[str, str], None] = {}  # labels of removed or lost peers, in this order
        self._file = new_name(_SUFFIX)
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._failed = False

    def write(self, links: Iterable[tuple[str, DataPath]]) -> None:
        """Writes the agent's links to its file."""
        with self._lock:
            self._links = [LinkSeen(peer, str(path)) for peer, path in links]
        self._write()

    def label(self, peer: str, path: str) -> int:
        """Returns the index in `AgentSeen.labels` of a peer and a path, and publishes it if it is new."""
        with self._lock:
            self._former.pop((peer, path), None)
            number = self._labels.get((peer, path))
            if number is not None:
                return number
            number = len(self._labels)
            if len(self._former) > _KEPT_LABELS:
                oldest = next(iter(self._former))
                del self._former[oldest]
                number = self._labels.pop(oldest)
            self._labels[peer, path] = number
        self._write()
        return number

    def forget(self, peers: Collection[str]) -> None:
        """Lets later labels replace those of removed or lost peers, once _KEPT_LABELS labels of such peers are kept for
        the records of their transfers.
        """
        with self._lock:
            self._former.update((label, None) for label in self._labels if label[0] in peers)

    def _write(self) -> None:
        if self._failed:
            return
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        with self._lock:
            labels = [LinkSeen(*label) for label in sorted(self._labels, key=self._labels.__getitem__)]
            try:  # `this_process` reads /proc, for which no descriptor may be left
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
    """Returns this user's agents on this machine, sorted by name, and removes the files of ended processes.

    Raises:
        ArgumentError: the directory of the files belongs to another user.
    """
    agents = [seen for _, seen in find_running(_SUFFIX, _SEEN)]
    return sorted(agents, key=lambda seen: (seen.name, seen.pid))


def agents_text() -> str:
    """Returns a line of text for each agent of this user, with its peers and their paths; "" if there is no agent."""
    return "\n".join(
        shown(f"agent {seen.name}: reaches {seen.reaches}; process {seen.pid}, {seen.program}")
        for seen in find_agents()
    )
