"""Publishes a small file for each rank of each communicator, by which observers find the rank's segment.

The files are in the directory of the proxies' files. `proxyccl.tools.communicators` reads the segments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from proxyccl.channels.segment.control import ControlSegment, segment_bytes
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


class Neighbour(Message, frozen=True):
    """A rank whose process is visible in the publishing rank's PID namespace. `started` is as in `OfProcess`."""

    rank: Annotated[int, Meta(ge=0, le=2**31)]
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    started: Uint64


class RankPublication(OfProcess, frozen=True):
    """A rank of a communicator."""

    description: Description  # the rank
    host: str  # the rank's host (`host_name`)
    runtime: str  # the name of the rank's runtime
    device: int  # the ordinal of the rank's device
    # The ranks of the communicator on this rank's host and in its PID namespace, including this rank.
    neighbours: tuple[Neighbour, ...]
    segment: str  # the handle of the rank's segment, in hexadecimal
    layout: int  # the size of a segment for one rank, which differs between versions of ProxyCCL

    def __post_init__(self) -> None:
        if self.layout != segment_bytes():
            raise ValueError(f"layout is {self.layout}; expected {segment_bytes()}")
        if all(each.rank != self.description.rank for each in self.neighbours):
            raise ValueError(f"neighbours lack rank {self.description.rank} itself")
        bytes.fromhex(self.segment)


_RANKS = Codec(RankPublication, 1 << 20)


class Published:
    """Publishes a rank's file until `withdraw`. If the file can't be written, only logs the failure, because the rank
    works without the file.

    Args:
        control: the rank's segment.
        description: the rank.
        host, runtime, device: as in `RankPublication`.
        neighbours: as in `RankPublication`.
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
        """Removes the file. Does nothing in a forked child."""
        path, self._path = self._path, None
        if path is not None and self._pid == os.getpid():
            withdraw(path)


def find_ranks() -> list[tuple[Path, RankPublication]]:
    """Returns this user's ranks on this machine with their files, ordered by communicator and rank. Removes files of
    processes that have ended.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    return sorted(
        find_running(_SUFFIX, _RANKS), key=lambda found: (found[1].description.job, found[1].description.rank)
    )
