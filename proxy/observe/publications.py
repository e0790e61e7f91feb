"""Lets observers find services: each service publishes a small file with its identity and the handles of its memory.

The files are in a directory that only the user can enter. Observers remove the files of killed services.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import stat
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from proxyccl.device.errors import ArgumentError
from proxyccl.device.process.namespaces import pid_namespace
from proxyccl.device.process.user_directories import runtime_directory
from proxyccl.proxy._engine import lib
from proxyccl.proxy.codec import Codec, Message, ProtocolError, Uint64
from proxyccl.proxy.processes import start_of

FORMAT: int = lib.PROXYCCL_OBSERVE_FORMAT
_SUFFIX = ".json"
_MOST_WORKERS: int = lib.PROXYCCL_MAX_RINGS
# The numbers start at random, because processes in different containers may have the same id and share the directory.
_numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))
_warning = threading.Lock()
P = TypeVar("P", bound="OfProcess")


_WAYS = {"network": "an abstract socket", "directory": "a socket file", "daemon": "the node daemon"}


class Description(Message, frozen=True):
    """Describes a service's rank to observers. The service itself does not use the description."""

    rank: Annotated[int, Meta(ge=0, le=2**31)]  # number of the rank
    world_size: Annotated[int, Meta(ge=0, le=2**31)]  # the number of ranks
    job: str  # the communicator's name, which no other communicator has
    program: str  # the rank's program
    # For each rank of the host in another PID namespace, the kind of socket that passes descriptors.
    ways: dict[int, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of_this_program(
        cls, rank: int, world_size: int, job: str, ways: Mapping[int, str] | None = None
    ) -> Description:
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        return cls(rank, world_size, job, program, dict(ways or {}))

    def way_text(self, peer: int | None) -> str:
        """Returns a text that says how descriptors of a peer's memory are passed; "" within this PID namespace."""
        return way_text(self.ways.get(peer, "")) if peer is not None else ""


def way_text(way: str) -> str:
    """Returns a text that says how descriptors of a peer's memory are passed; "" within this PID namespace."""
    return f"memory by descriptors over {_WAYS.get(way, way)}" if way else ""


class RingPlace(Message, frozen=True):
    """A ring. `handle` names, in hexadecimal, the memory of the ring's slots and tail; `worker` is the number of the
    worker that drains the ring; `size_log2` is the binary logarithm of the number of slots.
    """

    handle: str
    worker: Annotated[int, Meta(ge=0, lt=_MOST_WORKERS)]
    size_log2: Annotated[int, Meta(ge=1, le=31)]


class OfProcess(Message, frozen=True):
    """Base class of publications of objects that belong to a process."""

    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]  # the process's id
    started: Uint64  # when the process started (`start_of`), which together with `pid` identifies the process
    namespace: str  # the PID namespace of `pid`

    @property
    def is_alive(self) -> bool:
        return start_of(self.pid) == self.started


def this_process(started: int | None = None) -> tuple[int, int, str]:
    """Returns this process's `pid`, `started` (which is looked up if None) and `namespace`, as in `OfProcess`."""
    pid = os.getpid()
    return pid, started or start_of(pid) or 0, pid_namespace()


class Publication(OfProcess, frozen=True):
    """A service's publication for observers."""

    description: Description  # the rank that the service works for
    runtime: str  # name of the service's runtime
    workers: Annotated[int, Meta(ge=1, le=_MOST_WORKERS)]  # number of workers
    observed: str  # handle of the service's `ObservedSegment`, in hexadecimal
    counters: str  # handle of the channels' counters, in hexadecimal
    rings: tuple[RingPlace, ...]  # the service's rings
    format: int  # `FORMAT`, the layout of the observed memory

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format}; expected {FORMAT}")

    @classmethod
    def of_this_process(cls, description: Description, runtime: str, **places: Any) -> Publication:
        return cls(*this_process(), description, runtime, format=FORMAT, **places)


_PUBLICATIONS = Codec(Publication, 1 << 20)


def check_directory(directory: Path) -> None:
    """Raises ArgumentError unless the path is a directory (not a link to a directory) that only this user can enter."""
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ArgumentError("directory", f"{directory} is not a directory")
    if info.st_uid != os.geteuid():
        raise ArgumentError("directory", f"{directory} belongs to user {info.st_uid}, not to this user")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ArgumentError("directory", f"other users can enter {directory}; run: chmod 700 {directory}")


def publish(publication: Publication) -> Path:
    """Writes a publication's file atomically. Returns the file's path. Raises the errors of `write`."""
    return write(new_name(_SUFFIX), _PUBLICATIONS.encode(publication))


def new_name(suffix: str) -> str:
    """Returns a file name that is unique among the objects of this process."""
    return f"{os.getpid()}-{next(_numbers)}{suffix}"


def write(name: str, data: bytes) -> Path:
    """Writes or replaces a file in the directory of publications, atomically. Returns the file's path. Raises OSError
    if the file can't be written, and ArgumentError if the directory is not this user's own.
    """
    directory = runtime_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    check_directory(directory)
    path = directory / name
    written = path.with_name(f".{path.name}")
    written.unlink(missing_ok=True)  # a killed process with the same id may have left a file with this name
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    written.rename(path)
    return path


def try_publish(publication: Publication) -> Path | None:
    """Calls `publish`. If the call fails, logs the error and returns None."""
    return try_write(new_name(_SUFFIX), _PUBLICATIONS.encode(publication))


def try_write(name: str, data: bytes) -> Path | None:
    """Calls `write`. Logs each error once and then returns None, because a service works without observers."""
    try:
        return write(name, data)
    except (OSError, ArgumentError) as error:
        with _warning:  # functools.cache may call a function twice if several threads call it at once
            _warn(str(error))
        return None


@functools.cache
def _warn(reason: str) -> None:
    logging.getLogger("proxyccl").warning("`proxyccl top` and `trace` cannot see this process: %s", reason)


def withdraw(path: Path) -> None:
    """Removes a publication's file. If the removal fails, observers remove the file after this process has ended."""
    with contextlib.suppress(OSError):
        path.unlink()


def _read(path: Path, codec: Codec[P]) -> P | None:
    with path.open("rb") as file:
        data = file.read(codec.limit + 1)
    try:
        return codec.decode(data, str(path))
    except ProtocolError:
        return None


def _is_stale(path: Path) -> bool:
    pid = path.name.lstrip(".").partition("-")[0]
    return pid.isdecimal() and start_of(int(pid)) is None


def find_running(suffix: str, codec: Codec[P]) -> list[tuple[Path, P]]:
    """Returns this user's publications of running processes, from the files with this suffix. Removes the files of
    ended processes. Raises the errors of `check_directory`.
    """
    found = []
    directory = runtime_directory()
    with contextlib.suppress(FileNotFoundError):
        check_directory(directory)
    for path in sorted(each for each in directory.glob(f"*{suffix}") if each.is_file()):
        with contextlib.suppress(OSError):  # the file was removed or is not readable
            publication = _read(path, codec)
            if publication is None:  # another version of ProxyCCL wrote the file
                if _is_stale(path):
                    withdraw(path)
            elif publication.namespace == pid_namespace():
                if publication.is_alive:
                    found.append((path, publication))
                else:
                    withdraw(path)
    return found


def find(
    job: str | None = None, ranks: Collection[int] | None = None, process: int | None = None
) -> list[tuple[Path, Publication]]:
    """Returns this user's services on this machine, ordered by job and rank. If `job`, `ranks` or `process` (a process
    id) is given, returns only the services of that job, of these ranks, or in that process. Removes the files of ended
    processes. Raises the errors of `check_directory`.
    """
    wanted = [
        (path, publication)
        for path, publication in find_running(_SUFFIX, _PUBLICATIONS)
        if (job is None or publication.description.job == job)
        and (ranks is None or publication.description.rank in ranks)
        and process in (None, publication.pid)
    ]
    return sorted(wanted, key=lambda item: (item[1].description.job, item[1].description.rank, item[1].pid))


def none_found(job: str | None = None, ranks: Collection[int] | None = None, process: int | None = None) -> str:
    """Returns the message for an empty result of `find` with these arguments."""
    of_job = "" if job is None else f" of job {job}"
    of_ranks = "" if ranks is None else f" of rank {', '.join(map(str, sorted(ranks)))}"
    where = "on this machine" if process is None else f"in process {process}"
    return (
        f"this user runs no proxy{of_job}{of_ranks} {where}; looked in {runtime_directory()} "
        "(a proxy that was started with another XDG_RUNTIME_DIR publishes elsewhere)"
    )
