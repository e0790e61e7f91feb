"""How observers find services: each publishes one small file that says who it is and where its memory can be opened.

The files lie in a directory that nobody but the user can enter. A service that is killed can't take its file away; who
finds such a file does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy._engine import lib
from proxyccl.proxy.processes import start_of

FORMAT: int = lib.PROXYCCL_OBSERVE_FORMAT
_numbers = itertools.count()
_warning = threading.Lock()


@dataclass(frozen=True)
class Description:
    """Who a service works for, in words that mean nothing to it.

    Attributes:
        rank: number of the rank.
        world_size: how many ranks there are.
        job: what all ranks of a communicator have in common, and no other.
        program: what the rank runs.
    """

    rank: int
    world_size: int
    job: str
    program: str

    @classmethod
    def of_this_program(cls, rank: int, world_size: int, job: str) -> Description:
        """That of a rank in this process."""
        return cls(rank, world_size, job, Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python")


@dataclass(frozen=True)
class RingPlace:
    """Where a ring can be read: a handle, in hexadecimal, of memory with the slots and behind them the tail."""

    handle: str
    worker: int
    size_log2: int


@dataclass(frozen=True)
class Publication:
    """What a service says of itself.

    Attributes:
        pid: its process.
        started: the process's start, as the system counts it: with the pid it names one process only.
        namespace: in which `pid` is a number.
        description: who it works for.
        runtime: name of its runtime.
        workers: number of its workers.
        observed: handle of its `ObservedSegment`, in hexadecimal.
        counters: handle of the channels' counters.
        rings: its rings.
    """

    pid: int
    started: int
    namespace: str
    description: Description
    runtime: str
    workers: int
    observed: str
    counters: str
    rings: tuple[RingPlace, ...]

    @classmethod
    def of_this_process(cls, description: Description, runtime: str, **places: Any) -> Publication:
        """A publication of a service of this process."""
        pid = os.getpid()
        return cls(pid, start_of(pid) or 0, _namespace(), description, runtime, **places)

    def encode(self) -> str:
        """The text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, text: str) -> Publication | None:
        """The publication that a file's text says, or None if that is none of this version."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                return None
            fields["description"] = Description(**fields["description"])
            fields["rings"] = tuple(RingPlace(**ring) for ring in fields["rings"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return start_of(self.pid) == self.started


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def publications_directory() -> Path:
    """Where this user's publications lie."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "proxyccl"
    return Path("/tmp") / f"proxyccl-{os.geteuid()}"


def check_directory(directory: Path) -> None:
    """Raises ArgumentError unless a directory is one that only this user can enter, and no link to one."""
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ArgumentError("directory", f"{directory} is no directory")
    if info.st_uid != os.geteuid():
        raise ArgumentError("directory", f"{directory} belongs to user {info.st_uid}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ArgumentError("directory", f"{directory} can be entered by others than its owner: chmod 700 it")


def publish(publication: Publication) -> Path:
    """Writes a publication's file, whole or not at all.

    Raises:
        OSError: it can't be written.
        ArgumentError: the directory is not this user's own.
    """
    directory = publications_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    check_directory(directory)
    path = directory / f"{publication.pid}-{next(_numbers)}.json"
    written = path.with_name(f".{path.name}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(publication.encode())
    written.rename(path)
    return path


def try_publish(publication: Publication) -> Path | None:
    """The same; but what prevents it is only logged, once: the work that is to be seen goes on without."""
    try:
        return publish(publication)
    except (OSError, ArgumentError) as error:
        with _warning:  # of two ranks in threads, neither has warned yet
            _warn(str(error))
        return None


@functools.cache
def _warn(reason: str) -> None:
    logging.getLogger("proxyccl").warning("this process can't be seen by `proxyccl top` and `trace`: %s", reason)


def withdraw(path: Path) -> None:
    """Removes a publication's file, if an observer has not."""
    path.unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    pid = path.name.lstrip(".").partition("-")[0]
    return pid.isdigit() and start_of(int(pid)) is None


def find(
    job: str | None = None, ranks: Collection[int] | None = None, process: int | None = None
) -> list[tuple[Path, Publication]]:
    """The services of this user on this machine, by job and rank. Files of processes that are gone are removed.

    Args:
        job: of this job only; None for all.
        ranks: of these ranks only; None for all.
        process: those that run in this process only, a rank's or a daemon's; None for all.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    found = []
    directory = publications_directory()
    with contextlib.suppress(FileNotFoundError):
        check_directory(directory)
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # its service was closed meanwhile
            publication = Publication.decode(path.read_text())
            if publication is None:  # another version's, which may use it
                if _is_stale(path):
                    withdraw(path)
            elif publication.namespace == _namespace():
                if publication.is_alive:
                    found.append((path, publication))
                else:
                    withdraw(path)
    wanted = [
        (path, publication)
        for path, publication in found
        if (job is None or publication.description.job == job)
        and (ranks is None or publication.description.rank in ranks)
        and process in (None, publication.pid)
    ]
    return sorted(wanted, key=lambda item: (item[1].description.job, item[1].description.rank, item[1].pid))


def none_found(job: str | None = None, ranks: Collection[int] | None = None, process: int | None = None) -> str:
    """In words, that `find` found nothing."""
    of_job = "" if job is None else f" of job {job}"
    of_ranks = "" if ranks is None else f" of rank {', '.join(map(str, sorted(ranks)))}"
    where = "here" if process is None else f"in process {process}"
    return (
        f"no proxy{of_job}{of_ranks} runs {where} for this user; looked in {publications_directory()} "
        "(one that was started with another XDG_RUNTIME_DIR shows itself elsewhere)"
    )
