"""Takes a snapshot of this machine's communicators and their ranks, for RAS clients and `proxyccl top --web`.

The module reads the memory segments that ranks publish, through `/proc`, without joining the communicators.
"""

from __future__ import annotations

import contextlib
import itertools

import msgspec

import proxyccl.channels.communicator  # noqa: F401  # the names of all collectives
from proxyccl.channels.segment.call_log import calls_in, counts_in
from proxyccl.channels.segment.calls import describe_call, name_of
from proxyccl.channels.segment.control import ControlSegment, Presence, segment_bytes
from proxyccl.channels.segment.error_record import exception_from
from proxyccl.channels.segment.published import RankPublication, find_ranks
from proxyccl.device._native import lib
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message
from proxyccl.proxy.observe.rates import MemoryByRank
from proxyccl.proxy.observe.segment import open_published
from proxyccl.proxy.processes import is_stopped, start_of

_MIB = 1 << 20
_OTHERS = "other collectives"
"""The name for calls of collectives beyond the PROXYCCL_CALL_KINDS that are counted separately."""


class RankView(Message, frozen=True):
    """A rank of this machine."""

    rank: int  # the rank's number
    pid: int  # the id of the rank's process
    # "runs"; "failed" if an error has ended the communicator; "leaves" while the rank closes the communicator. A
    # missing rank is "ended" if its process has ended, "stopped" if a signal has stopped the process, or "absent" if
    # the process does not have the communicator open; the fields below then have their defaults.
    state: str
    host: str = ""  # the rank's host (`host_name`)
    device: int | None = None  # the ordinal of the rank's device; None if the rank is missing
    # For each collective, the number of calls that the rank has made. A call in a graph is counted at the capture, not
    # at the replays of the graph.
    calls: dict[str, int] = msgspec.field(default_factory=dict)
    made: int = 0  # the number of all collective calls of the rank
    last: str = ""  # the last call as text; "" if there is none, or while the rank writes the call's log record
    failure: str = ""  # the error that has ended the communicator, as text; "" if the communicator can be used
    failure_code: int = 0  # the ProxycclErrorCode of `failure`; 0 if the communicator can be used
    leaving: bool = False  # whether the rank is closing the communicator
    # The rank's device memory in bytes, by purpose (`Communicator.memory_usage`), a quarter of a second old.
    memory: dict[str, int] = msgspec.field(default_factory=dict)


class WaitView(Message, frozen=True):
    """A rank that waits for another rank, and the evidence for this wait."""

    rank: int
    peer: int
    text: str


class CommunicatorView(Message, frozen=True):
    """A communicator and its ranks on this machine."""

    name: str  # the communicator's name
    program: str  # the first rank's program
    size: int  # the number of ranks, on all hosts
    ranks: tuple[RankView, ...]  # the ranks by number
    waits: tuple[WaitView, ...] = ()  # the waits of ranks for other ranks; () if the caller did not look for waits

    @property
    def present(self) -> list[RankView]:
        return [rank for rank in self.ranks if rank.device is not None]

    @property
    def missing(self) -> list[RankView]:
        return [rank for rank in self.ranks if rank.device is None]


def communicators() -> list[CommunicatorView]:
    """Returns this user's communicators that at least one rank on this machine has open, sorted by name. Raises
    ArgumentError if another user owns the directory of publications.
    """
    found = []
    for name, of in itertools.groupby(find_ranks(), lambda item: item[1].description.job):
        seen = {}
        first = None
        for _, publication in of:
            with contextlib.suppress(ArgumentError):  # the communicator may have been closed
                view = rank_view(publication)
                first = first or publication
                if not is_stopped(view.pid):
                    seen[view.rank] = view
        if first is not None:
            seen = _with_missing(first, seen)
            ranks = tuple(seen[rank] for rank in sorted(seen))
            found.append(CommunicatorView(name, first.description.program, first.description.world_size, ranks))
    return found


def device_memory() -> MemoryByRank:
    """Returns the bytes of device memory by purpose of each rank that has any. Raises ArgumentError as `communicators`
    does.
    """
    return {(each.name, rank.rank): rank.memory for each in communicators() for rank in each.present if rank.memory}


def memory_text(job: str | None = None) -> str:
    """Returns a line for each rank that has device memory, of the communicator called `job` or of all, with its bytes
    by purpose; "" if no rank has any.
    """
    lines = []
    for (name, rank), memory in device_memory().items():
        if job in (None, name):
            parts = sorted(memory.items(), key=lambda part: -part[1])
            purposes = ", ".join(f"{purpose} {nbytes / _MIB:.1f}" for purpose, nbytes in parts)
            total = sum(memory.values()) / _MIB
            lines.append(f"{name}, rank {rank}: {total:.1f} MiB of device memory ({purposes})")
    return "\n".join(lines)


def _with_missing(first: RankPublication, seen: dict[int, RankView]) -> dict[int, RankView]:
    missing = {}
    for each in first.neighbours:
        if each.rank not in seen:
            ended = start_of(each.pid) != each.started
            state = "ended" if ended else "stopped" if is_stopped(each.pid) else "absent"
            missing[each.rank] = RankView(each.rank, each.pid, state)
    return seen | missing


def rank_view(publication: RankPublication) -> RankView:
    """Returns the view of a rank. Raises ArgumentError if it is closed, or its publication or segment is invalid."""
    who = publication.description
    with contextlib.closing(open_published(publication.segment, segment_bytes(who.world_size))) as memory:
        segment = ControlSegment(memory)
        calls = {name_of(digest, _OTHERS): count for digest, count in counts_in(segment).items()}
        last = "".join(f"{describe_call(fields)['collective']} #{number}" for number, fields in calls_in(segment, 1))
        code, failure = _failure(segment)
        memory_usage = segment.memory_usage
        try:
            leaving = segment.presence in (Presence.LEFT, Presence.STOPPED)
        except ValueError as error:
            raise ArgumentError("segment", str(error)) from None
    return RankView(
        who.rank,
        publication.pid,
        "failed" if failure else "leaves" if leaving else "runs",
        publication.host,
        publication.device,
        calls,
        sum(calls.values()),
        last,
        failure,
        code,
        leaving,
        memory_usage,
    )


def _failure(segment: ControlSegment) -> tuple[int, str]:
    if not segment.aborted:
        return 0, ""
    record = segment.filed()
    if record is None:  # this rank learned of the failure from a peer
        return lib.PROXYCCL_ERROR_LOCAL, "another rank has failed"
    return record.code, str(exception_from(record, -1))
