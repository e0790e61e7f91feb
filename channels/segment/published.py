"""How observers find ranks: each rank of each communicator publishes a small file that names its segment.

The files lie beside those of proxies, which a rank may not have. Observers open a segment through `/proc` and read in
it the calls that the rank has made, and whether it has failed.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Annotated

from msgspec import Meta

from proxyccl.channels.segment.call_log import calls_in, counts_in
from proxyccl.channels.segment.calls import describe_call, name_of
from proxyccl.channels.segment.control import ControlSegment, Presence, segment_bytes
from proxyccl.channels.segment.error_record import exception_from
from proxyccl.device._native import lib
from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.observe.publications import (
    Description,
    OfProcess,
    find_running,
    new_name,
    this_process,
    try_write,
    withdraw,
)

_SUFFIX = ".rank"
_OTHERS = "other collectives"
"""Those beyond the kinds that are counted one by one (PROXYCCL_CALL_KINDS)."""


class Neighbour(Message, frozen=True):
    """A rank whose process an observer of the same container sees too; `started` as in `OfProcess`."""

    rank: Annotated[int, Meta(ge=0, le=2**31)]
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    started: Uint64


class RankPublication(OfProcess, frozen=True):
    """A rank of a communicator.

    Attributes:
        description: the rank.
        host: its host (`host_name`).
        runtime: its runtime's name.
        device: the ordinal of its device.
        neighbours: the ranks of the communicator on its host and in its PID namespace, itself among them.
        segment: handle of its segment, in hexadecimal.
        layout: the size of a segment of one rank. Where it differs, the segment is of another version of ProxyCCL.
    """

    description: Description
    host: str
    runtime: str
    device: int
    neighbours: tuple[Neighbour, ...]
    segment: str
    layout: int

    def __post_init__(self) -> None:
        if self.layout != segment_bytes():
            raise ValueError(f"layout is {self.layout}; expected {segment_bytes()}")
        if all(each.rank != self.description.rank for each in self.neighbours):
            raise ValueError(f"neighbours lack rank {self.description.rank} itself")
        bytes.fromhex(self.segment)


_RANKS = Codec(RankPublication, 1 << 20)


class Published:
    """A rank's file, from now until `withdraw`. A failure to write it is only logged: the rank works without.

    Args:
        control: the rank's segment.
        description: the rank.
        host, runtime, device: as in `RankPublication`.
        neighbours: likewise.
    """

    def __init__(
        self,
        control: ControlSegment,
        description: Description,
        host: str,
        runtime: str,
        device: int,
        neighbours: tuple[Neighbour, ...],
    ) -> None:
        segment = control.memory.export(control.host_pointer, segment_bytes(description.world_size)).hex()
        own = next(each for each in neighbours if each.rank == description.rank)
        rank = RankPublication(
            *this_process(own.started), description, host, runtime, device, neighbours, segment, segment_bytes()
        )
        self._pid = rank.pid
        self._path = try_write(new_name(_SUFFIX), _RANKS.encode(rank))

    def withdraw(self) -> None:
        path, self._path = self._path, None
        if path is not None and self._pid == os.getpid():
            withdraw(path)


def find_ranks() -> list[tuple[Path, RankPublication]]:
    """The ranks of this user on this machine, by communicator and rank. Removes files of processes that ended.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    return sorted(
        find_running(_SUFFIX, _RANKS), key=lambda found: (found[1].description.job, found[1].description.rank)
    )


class Call(Message, frozen=True):
    """A collective call: its number among its rank's, from 1, and its fields in words."""

    number: int
    fields: dict[str, str]


class RankView(Message, frozen=True):
    """A rank of a communicator at one moment.

    Attributes:
        publication: the rank.
        calls: collective calls that it has made, by collective. A graph's calls count when they are captured, and not
            when it is replayed.
        last: the last of them; None if there is none, or it is being logged.
        failure: the error that has ended the communicator, in words; "" if it can be used.
        failure_code: its ProxycclErrorCode; 0 if it can be used.
        leaving: whether the rank closes the communicator.
    """

    publication: RankPublication
    calls: dict[str, int]
    last: Call | None
    failure: str
    failure_code: int
    leaving: bool

    @property
    def rank(self) -> int:
        return self.publication.description.rank

    @property
    def made(self) -> int:
        return sum(self.calls.values())


class RankObserver:
    """Observes a rank, which takes no part in it. Use it as a context manager, or call `close`.

    Raises:
        ArgumentError: the rank is gone, or its publication is wrong.
    """

    def __init__(self, publication: RankPublication) -> None:
        self.publication = publication
        memory = SharedMemory.open(bytes.fromhex(publication.segment))
        if memory.nbytes < segment_bytes(publication.description.world_size):
            memory.close()
            raise ArgumentError("segment", f"has {memory.nbytes} bytes, fewer than a segment")
        self._segment = ControlSegment(memory)

    def __enter__(self) -> RankObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._segment.close()

    def snapshot(self) -> RankView:
        """The rank now. Raises ArgumentError if the segment is not one of a rank."""
        counts = {name_of(digest, _OTHERS): calls for digest, calls in counts_in(self._segment).items()}
        recent = [Call(number, describe_call(fields)) for number, fields in calls_in(self._segment, 1)]
        code, failure = self._failure()
        try:
            leaving = self._segment.presence in (Presence.LEFT, Presence.STOPPED)
        except ValueError as error:
            raise ArgumentError("segment", str(error)) from None
        return RankView(self.publication, counts, recent[0] if recent else None, failure, code, leaving)

    def _failure(self) -> tuple[int, str]:
        if not self._segment.aborted:
            return 0, ""
        record = self._segment.filed()
        if record is None:  # a peer has told it
            return lib.PROXYCCL_ERROR_LOCAL, "another rank has failed"
        return record.code, str(exception_from(record, -1))
