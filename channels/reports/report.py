"""What a report holds: one rank of one communicator at one moment. As JSON it is a file; nothing here looks at a rank.

A report is read back by other processes, perhaps on other machines and much later, so what is read is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyccl.proxy.reports.document import Member, decode, encode
from proxyccl.proxy.reports.rings import Ring

FORMAT = "proxyccl report"
VERSION = 3


@dataclass(frozen=True)
class Failure:
    """The error record that ended the communicator (control.h), and the exception made of it.

    Attributes:
        kind: name of the exception.
        message: its text.
        rank: the rank that found it.
        peer: the rank that it concerns, or None.
    """

    kind: str
    message: str
    rank: int
    peer: int | None


@dataclass(frozen=True)
class Wait:
    """What threads of a kernel waited for.

    Attributes:
        what: in words.
        kind: ProxycclWaitKind.
        peer: the rank waited for; None for the own proxy, or the own kernel's other blocks.
        channel: channel id where there is one.
        expected: value waited for: ticket, semaphore value or packet flag.
        seen: value last seen.
    """

    what: str
    kind: int
    peer: int | None
    channel: int
    expected: int
    seen: int


@dataclass(frozen=True)
class Exchange:
    """A call of the bootstrap that was under way: all ranks make them together.

    Attributes:
        purpose: in words.
        seconds: since it began.
    """

    purpose: str
    seconds: float


@dataclass(frozen=True)
class Call:
    """A collective call that was issued.

    Attributes:
        number: from 1, in the order of the calls.
        fields: what must agree between ranks, in words: collective, dtype, op, algorithm, root, count.
    """

    number: int
    fields: dict[str, str]


@dataclass(frozen=True)
class ProxiedChannel:
    """A channel through the proxy.

    Attributes:
        id: channel id.
        peer: the rank at the other end; for a handler's channel this rank.
        peer_channel: the peer's channel that signals on this one count for; None where there is none.
        transport: what moves its data; "handler" where a Python function gets the triggers.
        ring: number of the ring that its triggers go through.
        triggers, puts, bytes, signals, flushes: what the proxy did for it so far.
        outstanding: triggers of all channels to this peer that are issued and not known to be complete; None for a
            handler, and where the node daemon's memory can't be opened.
        signals_in: signals that have come in.
        signals_used: those that kernels have waited for; None where it could not be read.
        flushed: one more than the ticket of the last flush that is complete.
        flush_asked: the same of the last flush that the ring still shows; None if it shows none.
    """

    id: int
    peer: int
    peer_channel: int | None
    transport: str
    ring: int
    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int
    outstanding: int | None
    signals_in: int
    signals_used: int | None
    flushed: int
    flush_asked: int | None


@dataclass(frozen=True)
class Handling:
    """A Python handler that ran: its channel, and for how many seconds."""

    channel: int
    seconds: float


@dataclass(frozen=True)
class Semaphore:
    """A semaphore in device memory, of an SmChannel or a lane of a collective, that has been used.

    Attributes:
        peer: the rank at the other end.
        lane: number of it among those to the peer.
        signals_in: signals that have come in.
        signals_used: those that kernels have waited for.
        signals_out: signals sent to the peer.
    """

    peer: int
    lane: int
    signals_in: int
    signals_used: int
    signals_out: int


@dataclass(frozen=True)
class Thread:
    """A thread of the process that is in Python code of the program.

    Attributes:
        name: its name.
        own: whether it made the communicator: most often the one that uses it.
        stack: "file:line in function", the outermost call first.
        program: the innermost of those that is neither this package's nor, if there is such a one, another package's.
    """

    name: str
    own: bool
    stack: list[str]
    program: str


@dataclass(frozen=True)
class Report:
    """One rank of one communicator at one moment.

    Attributes:
        format: `FORMAT`.
        version: `VERSION`.
        communicator: its name, which its ranks share with no other communicator.
        beside: the names of the other communicators that the process had open.
        rank: this rank.
        members: where each rank runs, by rank.
        transports: what moves ProxyChannels' data, by peer's rank; empty for this one.
        process: where this rank runs.
        thread: number of the thread that made the communicator.
        daemon: the node daemon that runs its proxy; None for a proxy in this process, or none yet.
        command: the process's command line.
        runtime: the device.
        timeout: bound of the communicator's waits, in seconds.
        written: date and time in UTC.
        cause: why it was written, in words.
        failure: what ended the communicator; None if nothing has.
        waits: what kernels waited for; at most one for each peer.
        exchange: what the CPU waited for in the bootstrap, if it did.
        calls: the last collective calls in order.
        rings: of this rank's proxy; empty where nothing has used it.
        channels: through the proxy.
        handling: handlers that ran.
        semaphores: in device memory.
        threads: of the process.
        unread: what could not be read, and why.
    """

    format: str
    version: int
    communicator: str
    beside: list[str]
    rank: int
    members: list[Member]
    transports: list[str]
    process: Member
    thread: int
    daemon: Member | None
    command: str
    runtime: str
    timeout: float
    written: str
    cause: str
    failure: Failure | None
    waits: list[Wait]
    exchange: Exchange | None
    calls: list[Call]
    rings: list[Ring]
    channels: list[ProxiedChannel]
    handling: list[Handling]
    semaphores: list[Semaphore]
    threads: list[Thread]
    unread: list[str]

    def encode(self) -> str:
        """As text for a file."""
        return encode(self)


def from_json(data: dict[str, Any]) -> Report:
    """The report in a JSON object. Raises ValueError that says why it is none."""
    report: Report = decode(Report, VERSION, data)
    ranks = len(report.members)
    if not 0 <= report.rank < ranks:
        raise ValueError(f"rank: {report.rank} of {ranks}")
    peers = [item.peer for items in (report.waits, report.channels, report.semaphores) for item in items]
    if report.failure is not None:
        peers += [report.failure.rank, report.failure.peer]
    if any(peer is not None and not 0 <= peer < ranks for peer in peers):
        raise ValueError(f"peer: {peers} of {ranks}")
    return report
