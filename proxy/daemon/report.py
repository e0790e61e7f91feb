"""What a report of the node daemon holds: its threads and its clients at one moment. Nothing here looks at a daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import ChannelView, ConnectionView, WorkerView
from proxyccl.proxy.reports.document import Member, decode
from proxyccl.proxy.reports.rings import Ring

FORMAT = "proxyccl daemon report"
VERSION = 2


@dataclass(frozen=True)
class EngineThread:
    """A thread that runs clients' workers.

    Attributes:
        name: its name.
        number: the system's.
        state: of /proc/PID/stat: R for one that runs, S for one that sleeps, D for one that a driver holds in the
            kernel, ….
        core: where it ran last.
        cores: where it may run.
    """

    name: str
    number: int
    state: str
    core: int
    cores: list[int]


@dataclass(frozen=True)
class Worker:
    """A worker of a client's.

    Attributes:
        thread: name of the thread that runs it.
        ended: whether the thread has let go of it: it failed, the client's communicator has, or its proxy is closed.
        looks_meanwhile: how often it looked at its rings while the report was made: 0 if something holds its thread, or
            that sleeps for so long.
        seen: what it has done so far.
    """

    thread: str
    ended: bool
    looks_meanwhile: int
    seen: WorkerView


@dataclass(frozen=True)
class Request:
    """Something that a client asked the daemon for and has no answer to, and for how many seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Client:
    """A process that the daemon runs a proxy for.

    Attributes:
        pid: the process; None for one that has not said hello.
        description: the rank that the proxy works for; None for one that has opened none, or says nothing of itself.
        device_id: the rank's device.
        seconds: since it came.
        request: the one under way; None: it may ask.
        failure: why a worker of it failed; None if none has.
        workers: by number.
        rings: by number.
        connections: by worker and number.
        channels: those in use, by id.
    """

    pid: int | None
    description: Description | None
    device_id: str
    seconds: float
    request: Request | None
    failure: str | None
    workers: list[Worker]
    rings: list[Ring]
    connections: list[ConnectionView]
    channels: list[ChannelView]

    def connection_of(self, channel: ChannelView) -> ConnectionView | None:
        """The way that a channel's triggers take."""
        place = (channel.worker, channel.connection)
        return next((each for each in self.connections if (each.worker, each.number) == place), None)


@dataclass(frozen=True)
class DaemonReport:
    """A node daemon at one moment.

    Attributes:
        format: `FORMAT`.
        version: `VERSION`.
        process: where it runs.
        socket: where it listens.
        command: the process's command line.
        written: date and time in UTC.
        cause: why it was written, in words.
        meanwhile: seconds in which `looks_meanwhile` were counted.
        longest_sleep: seconds that a thread with nothing to do sleeps at most between two looks.
        threads: that run the workers.
        clients: in the order in which they came.
        unread: what could not be read, and why.
    """

    format: str
    version: int
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

    def client_of(self, job: str, rank: int) -> Client | None:
        """The client that is a rank of a job."""
        for client in self.clients:
            whose = client.description
            if whose is not None and (whose.job, whose.rank) == (job, rank):
                return client
        return None


def from_json(data: dict[str, Any]) -> DaemonReport:
    """The report in a JSON object. Raises ValueError that says why it is none."""
    report: DaemonReport = decode(DaemonReport, VERSION, data)
    return report
