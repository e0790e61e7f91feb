"""How `proxyccl info` and `top` find agents: each publishes a small file with its links and their paths.

The files lie beside those of proxies. An agent that is killed leaves its file; whoever looks next removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Codec, Message, ProtocolError, Uint64
from proxyccl.proxy.observe.publications import check_directory, publications_directory, withdraw, write
from proxyccl.proxy.processes import pid_namespace, start_of

if TYPE_CHECKING:
    from proxyccl.channels.transfers.paths import Path as DataPath

_SUFFIX = ".agent"
_numbers = itertools.count()
_LOG = logging.getLogger("proxyccl.transfer")


class LinkSeen(Message, frozen=True):
    """A link that an agent opened, and the path of its data."""

    peer: str
    path: str


class AgentSeen(Message, frozen=True):
    """An agent of this machine.

    Attributes:
        name: its name.
        program: the program that it belongs to.
        pid, started, namespace: its process, as in `Publication`.
        links: those that it opened.
    """

    name: str
    program: str
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    started: Uint64
    namespace: str
    links: list[LinkSeen]

    @property
    def reaches(self) -> str:
        """Its peers, and the path to each."""
        return ", ".join(f"{link.peer} by {link.path}" for link in self.links) or "no peer so far"


_SEEN = Codec(AgentSeen, 16 << 20)


class Published:
    """An agent's file. A failure to write it is only logged: the agent works without. Any thread may use it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = f"{os.getpid()}-{next(_numbers)}{_SUFFIX}"
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._failed = False

    def write(self, links: Iterable[tuple[str, DataPath]]) -> None:
        """Says which links the agent has."""
        if self._failed:
            return
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        shown = [LinkSeen(peer, str(path)) for peer, path in links]
        pid = os.getpid()
        seen = AgentSeen(self._name, program, pid, start_of(pid) or 0, pid_namespace(), shown)
        with self._lock:
            try:
                self._path = write(self._file, _SEEN.encode(seen))
            except (OSError, ArgumentError) as error:
                self._failed = True
                _LOG.warning("`proxyccl info` and `top` cannot see agent %s: %s", self._name, error)

    def withdraw(self) -> None:
        """Removes the file."""
        with self._lock:
            self._failed = True
            if self._path is not None:
                withdraw(self._path)


def find_agents() -> list[AgentSeen]:
    """The agents of this user on this machine, by name. Removes files of processes that ended.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    found = []
    directory = publications_directory()
    with contextlib.suppress(FileNotFoundError):
        check_directory(directory)
    for path in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError, ProtocolError):  # it ended meanwhile, or is of another version
            seen = _SEEN.decode(path.read_bytes(), str(path))
            if seen.namespace != pid_namespace():
                continue
            if start_of(seen.pid) == seen.started:
                found.append(seen)
            else:
                withdraw(path)
    return sorted(found, key=lambda seen: (seen.name, seen.pid))
