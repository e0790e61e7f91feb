"""The contents of a report of `DaemonReporter`: a node daemon's threads and clients at one moment."""

from __future__ import annotations

from typing import Literal

from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import ChannelView, ConnectionView, WorkerView
from proxyccl.proxy.reports.document import MOST_BYTES, Member, require_moment
from proxyccl.proxy.ring import RingContents


class EngineThread(Message, frozen=True):
    """A thread that runs clients' workers."""

    name: str  # the thread's name
    number: int  # the system's thread id
    state: str  # the state in /proc/PID/stat: R for running, S for sleeping, D for waiting in the kernel (a driver), …
    core: int  # the core that the thread last ran on
    cores: list[int]  # the cores that the thread may run on


class Worker(Message, frozen=True):
    """A worker of a client."""

    thread: str  # name of the thread that runs the worker
    # Whether the worker has ended, because the worker failed, the client's communicator failed, or the proxy was
    # closed.
    ended: bool
    # Number of polls of the worker's rings within the report's interval of `DaemonReport.meanwhile` seconds; 0 if the
    # thread was blocked or slept during the whole interval.
    looks_meanwhile: int
    seen: WorkerView  # the worker's counters


class Request(Message, frozen=True):
    """An unanswered request: the method's name, and the request's age in seconds."""

    name: str
    seconds: float


class Client(Message, frozen=True):
    """A process whose proxy the daemon runs."""

    pid: int | None  # the process's id; None until the process has sent its hello
    # The rank that the proxy works for; None if the client has no open proxy, or gave no description.
    description: Description | None
    device_id: str  # the rank's device
    seconds: float  # time since the client connected
    request: Request | None  # the request in progress, or None
    failure: str | None  # the reason of the client's latest failure of a worker, as text; None if no worker has failed
    workers: list[Worker]  # the client's workers, by number
    rings: list[RingContents]  # the client's rings, by number
    connections: list[ConnectionView]  # the client's connections, by worker and number
    channels: list[ChannelView]  # the client's channels in use, by id


class DaemonReport(Message, frozen=True, tag_field="format", tag="proxyccl daemon report"):
    """The state of a node daemon at one moment."""

    version: Literal[4]  # version of the report's format
    process: Member  # the daemon's process
    socket: str  # the daemon's socket
    command: str  # the process's command line
    written: str  # date and time of the report in UTC
    cause: str  # the reason for the report, in words
    meanwhile: float  # length in seconds of the interval in which `Worker.looks_meanwhile` was counted
    longest_sleep: float  # the longest time, in seconds, that an idle thread sleeps between two polls of its rings
    threads: list[EngineThread]  # the threads that run the workers
    clients: list[Client]  # the daemon's clients, in the order in which they connected
    unread: list[str]  # the parts of the state that could not be read, each with the reason

    def __post_init__(self) -> None:
        require_moment(self.written)

    def client_of(self, job: str, rank: int) -> Client | None:
        for client in self.clients:
            description = client.description
            if description is not None and (description.job, description.rank) == (job, rank):
                return client
        return None

    def encode(self) -> str:
        """Returns the report as text for a file."""
        return _DAEMON_REPORTS.encode(self, indent=1).decode() + "\n"


_DAEMON_REPORTS = Codec(DaemonReport, MOST_BYTES, name="report")
