"""The contents of a report on one rank of one communicator at one moment."""

from __future__ import annotations

from typing import Literal

from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.reports.document import MOST_BYTES, Member, require_moment
from proxyccl.proxy.ring import RingContents


class Failure(Message, frozen=True):
    """The error that made the communicator fail: its record (control.h) and its exception.

    Attributes:
        kind: the name of the exception's class.
        message: the exception's text.
        rank: the rank that noticed the error.
        peer: the rank that the error concerns, or None.
    """

    kind: str
    message: str
    rank: int
    peer: int | None


class Wait(Message, frozen=True):
    """A wait of some threads of a kernel.

    Attributes:
        what: what the kernel waits for, in words.
        kind: the ProxycclWaitKind.
        peer: the rank that the kernel waits for; None if the kernel waits for its rank's proxy or for other blocks.
        channel: channel id, if a channel is involved.
        expected: the ticket, semaphore value or packet flag that the kernel waits for.
        seen: the value that the kernel has last read.
    """

    what: str
    kind: int
    peer: int | None
    channel: int | None
    expected: int
    seen: int


class ProxyWait(Message, frozen=True):
    """A wait of the proxy in a schedule that makes no progress or has failed.

    Attributes:
        what: what the proxy waits for, in words.
        kind: the ProxycclWaitKind.
        peer: the rank that the proxy waits for, or to which its sends do not complete; None if the proxy waits for this
            rank's stream.
        schedule: the schedule's number.
    """

    what: str
    kind: int
    peer: int | None
    schedule: int


class Exchange(Message, frozen=True):
    """The call of the bootstrap that was in progress at the report. All ranks make the bootstrap's calls together.

    Attributes:
        purpose: the call's purpose in words.
        seconds: time since the call began.
    """

    purpose: str
    seconds: float


class Call(Message, frozen=True):
    """A collective call that was issued.

    Attributes:
        number: the call's number among the rank's calls, from 1.
        fields: the values that must agree between ranks, in words: collective, dtype, op, algorithm, root, count.
    """

    number: int
    fields: dict[str, str]


class ProxiedChannel(Message, frozen=True):
    """A channel whose triggers the proxy handles.

    Attributes:
        id: channel id.
        peer: the rank at the other end; for a handler's channel this rank.
        peer_channel: the peer's channel that receives this channel's signals; None if the peer has none.
        transport: the channel's transport; "handler" if a Python function handles the triggers.
        ring: the number of the ring that takes the channel's triggers.
        triggers, puts, gets, bytes, signals, flushes: the proxy's counters of this channel.
        outstanding: the number of issued triggers of all channels to this peer, and of schedules' sends to it, that are
            not known to be complete; None for a handler, or if the node daemon's memory can't be opened.
        signals_in: signals received.
        signals_used: how many of these signals kernels have waited for; None if unreadable.
        completed: all operations with tickets below this number are known to be complete.
        flushed: one more than the ticket of the last complete flush.
        flush_asked: one more than the ticket of the last flush that is still in the ring; None if there is none.
    """

    id: int
    peer: int
    peer_channel: int | None
    transport: str
    ring: int
    triggers: int
    puts: int
    gets: int
    bytes: int
    signals: int
    flushes: int
    outstanding: int | None
    signals_in: int
    signals_used: int | None
    completed: int
    flushed: int
    flush_asked: int | None


class Handling(Message, frozen=True):
    """A Python handler that was running when the report was made: its channel, and the seconds since it started."""

    channel: int
    seconds: float


class Semaphore(Message, frozen=True):
    """A semaphore of an SmChannel or of a collective's lane, in device memory; only used semaphores are listed.

    Attributes:
        peer: the rank at the other end.
        lane: the semaphore's index among the semaphores to the peer.
        signals_in: signals received.
        signals_used: received signals that kernels have waited for.
        signals_out: signals sent to the peer.
    """

    peer: int
    lane: int
    signals_in: int
    signals_used: int
    signals_out: int


class Thread(Message, frozen=True):
    """A thread that runs Python code of the program.

    Attributes:
        name: the thread's name.
        own: whether the thread made the communicator, and so probably uses it.
        stack: "file:line in function", the outermost call first.
        program: the innermost call of `stack` in the program's own code; if there is none, the innermost call in a
            package other than ProxyCCL.
    """

    name: str
    own: bool
    stack: list[str]
    program: str


class Report(Message, frozen=True, tag_field="format", tag="proxyccl report"):
    """One rank of one communicator at one moment.

    Attributes:
        version: the version of this format.
        communicator: the communicator's unique name.
        beside: names of the other communicators that the process had open.
        rank: this rank.
        members: where each rank runs, by rank.
        transports: by the peer's rank, the transport of ProxyChannels and, for a peer in another PID namespace, how its
            memory is mapped; "" for this rank.
        process: this rank's process.
        thread: number of the thread that made the communicator.
        daemon: the node daemon that runs the rank's proxy; None if the proxy runs in this process or was not started.
        command: the process's command line.
        runtime: the runtime and the device.
        timeout: the communicator's time-out, in seconds.
        written: the report's date and time in UTC.
        cause: why the report was written, in words.
        failure: the failure that ended the communicator, or None.
        waits: the waits of kernels; at most one for each peer.
        proxy_waits: this rank's proxy's waits in schedules; at most one for each peer.
        exchange: the call of the bootstrap that was in progress, or None.
        calls: the last collective calls in order.
        rings: the rings of this rank's proxy; empty if the proxy was not used.
        channels: the channels through the proxy.
        handling: Python handlers that were running.
        semaphores: the semaphores in device memory.
        threads: the process's threads.
        unread: the parts that could not be read, with the reason.
    """

    version: Literal[6]
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
    proxy_waits: list[ProxyWait]
    exchange: Exchange | None
    calls: list[Call]
    rings: list[RingContents]
    channels: list[ProxiedChannel]
    handling: list[Handling]
    semaphores: list[Semaphore]
    threads: list[Thread]
    unread: list[str]

    def __post_init__(self) -> None:
        require_moment(self.written)

    def encode(self) -> str:
        return _REPORTS.encode(self, indent=1).decode() + "\n"

    def require_ranks(self) -> None:
        """Raises ValueError if the report names a rank that the communicator does not have."""
        ranks = len(self.members)
        if not 0 <= self.rank < ranks:
            raise ValueError(f"rank: expected less than {ranks}, the number of members, got {self.rank}")
        with_peers = (self.waits, self.proxy_waits, self.channels, self.semaphores)
        peers = [item.peer for items in with_peers for item in items]
        if self.failure is not None:
            peers += [self.failure.rank, self.failure.peer]
        for peer in peers:
            if peer is not None and not 0 <= peer < ranks:
                raise ValueError(f"peer: expected less than {ranks}, the number of members, got {peer}")


_REPORTS = Codec(Report, MOST_BYTES, name="report")
