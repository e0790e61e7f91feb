"""The contents of a node daemon's report: the daemon's threads and clients at one moment. `DaemonReporter` writes such
reports.
"""

from __future__ import annotations

from typing import Literal

from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import ChannelView, ConnectionView, WorkerView
from proxyccl.proxy.reports.document import MOST_BYTES, Member, require_moment
from proxyccl.proxy.ring import RingContents


class EngineThread(Message, frozen=True):
    """A thread that runs clients' workers.

    Attributes:
        name: the thread's name.
        number: the system's thread id.
        state: the state in /proc/PID/stat: R for running, S for sleeping, D for waiting in the kernel (a driver), ….
        core: the core that the thread last ran on.
        cores: the cores that the thread may run on.
    """

    name: str
    number: int
    state: str
    core: int
    cores: list[int]


class Worker(Message, frozen=True):
    """A worker of a client.

    Attributes:
        thread: name of the thread that runs the worker.
        ended: whether the worker has ended, because the worker failed, the client's communicator failed, or the proxy
            was closed.
        looks_meanwhile: number of polls of the worker's rings within the report's interval of `DaemonReport.meanwhile`
            seconds; 0 if the thread was blocked or slept during the whole interval.
        seen: the worker's counters.
    """

    thread: str
    ended: bool
    looks_meanwhile: int
    seen: WorkerView


class Request(Message, frozen=True):
    """An unanswered request: the method's name, and the request's age in seconds."""

    name: str
    seconds: float


class Client(Message, frozen=True):
    """A process whose proxy the daemon runs.

    Attributes:
        pid: the process's id; None until the process has sent its hello.
        description: the rank that the proxy works for; None if the client has no open proxy, or gave no description.
        device_id: the rank's device.
        seconds: time since the client connected.
        request: the request in progress, or None.
        failure: the reason of the client's latest failure of a worker, as text; None if no worker has failed.
        workers: the client's workers, by number.
        rings: the client's rings, by number.
        connections: the client's connections, by worker and number.
        channels: the client's channels in use, by id.
    """

    pid: int | None
    description: Description | None
    device_id: str
    seconds: float
    request: Request | None
    failure: str | None
    workers: list[Worker]
    rings: list[RingContents]
    connections: list[ConnectionView]
    channels: list[ChannelView]


class DaemonReport(Message, frozen=True, tag_field="format", tag="proxyccl daemon report"):
    """The state of a node daemon at one moment.

    Attributes:
        version: version of the report's format.
        process: the daemon's process.
        socket: the daemon's socket.
        command: the process's command line.
        written: date and time of the report in UTC.
        cause: the reason for the report, in words.
        meanwhile: length in seconds of the interval in which `Worker.looks_meanwhile` was counted.
        longest_sleep: the longest time, in seconds, that an idle thread sleeps between two polls of its rings.
        threads: the threads that run the workers.
        clients: the daemon's clients, in the order in which they connected.
        unread: the parts of the state that could not be read, each with the reason.
    """

    version: Literal[4]
    process: Member
    socket: str
    command: str
    written: str
    cause: str
    meanwhile: float
    longest_sleep: float
    threads: list[EngineThread]
    clients: list[Client]
    unread: list[str]

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
