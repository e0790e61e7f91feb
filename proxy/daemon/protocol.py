"""The messages between a rank and the node daemon, and the address at which they meet.

Both ends first identify their build, by `Hello` and `HelloAnswer`. Then the client sends requests. The daemon
answers all except `WriteReport`, in order and with the request's number. It sends an event when a worker fails and when
the daemon itself ends. `frames` carries the messages.
"""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from proxyccl.device._native import ffi as native
from proxyccl.device.errors import (
    ArgumentError,
    ProtocolError,
    ProxyCCLError,
    ProxyLostError,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
)
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy.codec import Codec, Message, Uint32, Uint64
from proxyccl.proxy.fabric.options import FabricOptions
from proxyccl.proxy.interface import Connection, EndpointInfo, ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.schedule import Schedule
from proxyccl.proxy.schedule_table import MAX_SCHEDULES
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.thread import LONGEST_US
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES, Trigger
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.workers import MAX_RINGS

VERSION = 15
LONGEST_FRAME = 64 * 1024
MOST_DESCRIPTORS = MAX_RINGS + 1
"""Descriptors in a frame: the control segment's and the rings'."""

CONTROL_BYTES = int(native.sizeof("ProxycclControl"))
LAYOUT = [CONTROL_BYTES, SharedWords.BYTES, int(engine.sizeof("ProxycclObserved"))]
"""Sizes of the structs in shared memory, which both ends must have built alike."""

_SEGMENT_ALIGNMENT = 128

Rank = Annotated[int, Meta(ge=0, le=2**31)]
MemoryId = Annotated[int, Meta(ge=0, le=MAX_MEMORIES - 1)]
ScheduleNumber = Annotated[int, Meta(ge=1, le=MAX_SCHEDULES - 1)]
ChannelId = Annotated[int, Meta(ge=0, le=MAX_CHANNELS - 1)]
Nbytes = Annotated[int, Meta(ge=0, le=2**62)]
PositiveNbytes = Annotated[int, Meta(ge=1, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
IdleTime = Annotated[float, Meta(ge=0, le=LONGEST_US)]
SegmentOffset = Annotated[int, Meta(ge=0, le=2**40)]


class Hello(Message, frozen=True):
    """A client's first frame; `hello` is its version of the protocol. It is of this form in every version."""

    hello: Uint64
    layout: list[Uint64]


class HelloAnswer(Message, frozen=True, omit_defaults=True):
    """The daemon's first frame, of this form in every version: version and process, or the reason for refusing the
    client."""

    version: Uint64 = 0
    pid: Uint64 = 0
    error: str = ""
    message: str = ""


def _wire_name(class_name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in class_name).lstrip("_")


class Request(Message, frozen=True, omit_defaults=True, kw_only=True, tag_field="do", tag=_wire_name):
    """A client's request. `request` is its number, which the answer carries too."""

    request: Uint64 | None = None

    @property
    def name(self) -> str:
        """The name of the request on the wire, such as "add_memory"."""
        return str(self.__struct_config__.tag)


class RemoteMissing(Request, frozen=True):
    """The requirements that the daemon lacks for remote transports. Answered by `Missing`."""


class WriteReport(Request, frozen=True):
    """Has the daemon write a report; `cause` says why. The only request without an answer."""

    cause: str


class Offer(Request, frozen=True):
    """Has the daemon introduce others to the client, by an `Introduced` for each. Answered by `Done`.

    Attributes:
        process: the token of the client's process, in hexadecimal.
    """

    process: str


class Reach(Request, frozen=True):
    """A connection to another process that has made an `Offer`, or to the daemon. Answered by `Reached`.

    Attributes:
        process: the token of that process, in hexadecimal.
    """

    process: str


class Prepare(Request, frozen=True):
    """Has the daemon open a device, and make ready to copy between it and others. Answered by `Done`.

    Attributes:
        runtime: name of the runtime.
        device_id: of the client's device.
        peers: device_ids of the devices of its peers.
    """

    runtime: str
    device_id: str
    peers: list[str]


class Open(Request, frozen=True):
    """A proxy service over the client's rings. Answered by `Opened`.

    Its frame carries the descriptors of the control segment and of each ring.

    Attributes:
        runtime: name of the runtime.
        device_id: of the device that pushes to the rings.
        fifo_size: slots in each ring.
        threads: number of workers.
        shared_offset: of `SharedWords` in the control segment.
        description: the rank that the service works for.
        semaphores_offset: of the words that peers signal in the control segment, by channel id; None for a service
            without schedules.
        ring_per_connection: see `ProxyService`.
        idle: the fields of the `IdlePolicy` that the client needs, in order; None for the daemon's.
    """

    runtime: str
    device_id: str
    fifo_size: Annotated[int, Meta(ge=2, le=2**20)]
    threads: Annotated[int, Meta(ge=1, le=MAX_RINGS)]
    shared_offset: Annotated[int, Meta(ge=CONTROL_BYTES, le=2**30)]
    description: Description | None = None
    semaphores_offset: Annotated[int, Meta(ge=CONTROL_BYTES, le=2**30)] | None = None
    ring_per_connection: bool = False
    idle: tuple[IdleTime, IdleTime, IdleTime] | None = None

    def __post_init__(self) -> None:
        for name in ("shared_offset", "semaphores_offset"):
            if (getattr(self, name) or 0) % _SEGMENT_ALIGNMENT:
                raise ValueError(f"{name} must be a multiple of {_SEGMENT_ALIGNMENT}, not {getattr(self, name)}")


class AddMemory(Request, frozen=True):
    """Memory that copies reach, which the daemon maps by its handle. Answered by `MemoryAdded`."""

    handle: bytes
    nbytes: Nbytes
    key: Uint32


class AddPinnedMemory(Request, frozen=True):
    """Pinned memory, which the daemon maps by its handle for copies and for its CPU. Answered by `MemoryAdded`."""

    handle: bytes


class AddRemoteMemory(Request, frozen=True):
    """Memory that remote transports reach by an address and a key. Answered by `MemoryAdded`."""

    address: Uint64
    nbytes: Nbytes
    key: Uint64


class RemoveMemory(Request, frozen=True):
    """Returns the ids of a memory; `first` is the first of them. Answered by `Done`."""

    first: MemoryId


class ConnectCopy(Request, frozen=True):
    """A connection that copies within the host. Answered by `Connected`."""

    peer: Rank | None
    transport: str = "copy"


class ConnectRemote(Request, frozen=True):
    """A remote connection, over an endpoint that is connected. Answered by `Connected`."""

    peer: Rank


class ReserveChannel(Request, frozen=True):
    """A channel id for a connection, by its number. Answered by `ChannelReserved`."""

    connection: Uint64


class ReserveElsewhere(Request, frozen=True):
    """A channel id that the client's process serves itself. Answered by `ChannelReserved`."""


class SetChannel(Request, frozen=True):
    """Puts a channel in use. Answered by `Done`.

    Attributes:
        channel: its id.
        connection: number of its connection.
        word: handle of the 8 bytes that its signals count up, on a connection that copies.
        address: their address as the peer knows it, on a remote connection.
    """

    channel: ChannelId
    connection: Uint64
    word: bytes = b""
    address: Uint64 = 0


class FreeChannels(Request, frozen=True):
    """Returns channel ids of one connection. Answered by `Done`."""

    channels: list[ChannelId]
    connection: Uint64


class AddSchedule(Request, frozen=True):
    """A schedule that the client's streams may ring. Answered by `ScheduleAdded`."""

    schedule: Schedule


class RemoveSchedule(Request, frozen=True):
    """Frees a schedule. Answered by `Done`."""

    number: ScheduleNumber


class Drain(Request, frozen=True):
    """Waits until all triggers in the rings are done. Answered by `Drained`."""

    timeout: Seconds


class Close(Request, frozen=True):
    """Drains the rings and frees everything of the client. Answered by `Closed`."""

    timeout: Seconds


class OpenRemote(Request, frozen=True):
    """A network device for this client. Answered by `Done`.

    Attributes:
        rdma: `RdmaOptions`, by field.
        fabric: `FabricOptions`, by field.
        signals: begin and end, in bytes, of the words in the control segment that peers may signal.
        near: NUMA node that the device should be near to.
        local_rank: the rank's number on its host.
        core_share: cores that the rank's threads may keep busy.
    """

    rdma: dict[str, str | int | None]
    fabric: dict[str, str | int | None]
    signals: tuple[SegmentOffset, SegmentOffset]
    near: Annotated[int, Meta(ge=0, le=2**16)] | None
    local_rank: Rank
    core_share: Annotated[int, Meta(ge=1, le=2**16)]

    def __post_init__(self) -> None:
        for name, kind, given in (("rdma", RdmaOptions, self.rdma), ("fabric", FabricOptions, self.fabric)):
            expected = [field.name for field in fields(kind)]
            if given.keys() != set(expected):
                raise ValueError(f"{name} has the fields {', '.join(given)}; expected {', '.join(expected)}")

    @property
    def options(self) -> TransportOptions:
        """The options. Raises ArgumentError for an impossible value."""
        rdma: dict[str, Any] = dict(self.rdma)
        fabric: dict[str, Any] = dict(self.fabric)
        return TransportOptions(RdmaOptions(**rdma), FabricOptions(**fabric))

    @classmethod
    def of(
        cls, options: TransportOptions, signals: range, near: int | None, local_rank: int, core_share: int
    ) -> OpenRemote:
        """The request for these options."""
        words = (signals.start, signals.stop)
        return cls(asdict(options.rdma), asdict(options.fabric), words, near, local_rank, core_share)


class RemoteUnsupportedReason(Request, frozen=True):
    """The reason why a remote transport can't reach the memory of the rank's device. Answered by `RemoteSupport`."""

    transport: str


class MakeEndpoint(Request, frozen=True):
    """The client's endpoint of a remote connection to a peer. Answered by `EndpointMade`."""

    peer: Rank
    transport: str


class ConnectEndpoint(Request, frozen=True):
    """Connects the client's endpoint to the peer's. Answered by `Done`."""

    peer: Rank
    end: EndpointInfo
    timeout: Seconds


class Expose(Request, frozen=True):
    """Lets peers on other hosts reach the client's memory. Answered by `Exposed`."""

    handle: bytes
    nbytes: PositiveNbytes
    transport: str


class ExposePinned(Request, frozen=True):
    """The same for pinned memory, which the daemon's CPU reaches too. Answered by `Exposed`."""

    handle: bytes
    transport: str


class Withdraw(Request, frozen=True):
    """Ends either; `number` is the one of its answer. Answered by `Done`."""

    number: Uint64


class Reply(Message, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind", tag=_wire_name):
    """An answer, with the number of the request; or an event, which has none."""

    request: Uint64 | None = None


class Done(Reply, frozen=True):
    """The request was carried out."""


class Reached(Reply, frozen=True):
    """A connection to the process; its frame carries the socket."""


class Introduced(Reply, frozen=True):
    """An event: another process has connected to the client's server of descriptors; its frame carries the socket."""


class Missing(Reply, frozen=True):
    """By remote transport, the requirements that the daemon lacks; empty if there are none."""

    missing: dict[str, str]


class Opened(Reply, frozen=True):
    """A service is open.

    Attributes:
        observed: the handle of its `ObservedSegment`.
        asleep: the handles of the words that wake its threads.
    """

    observed: bytes
    asleep: list[bytes]


class MemoryAdded(Reply, frozen=True):
    """`first` is the memory's first id."""

    first: MemoryId


class Connected(Reply, frozen=True):
    """A connection; see `proxyccl.proxy.interface.Connection`."""

    number: Uint64
    worker: Annotated[int, Meta(ge=0, le=MAX_RINGS - 1)]
    transport: str

    @classmethod
    def of(cls, connection: Connection) -> Connected:
        """The answer for a connection."""
        return cls(connection.number, connection.worker, connection.transport)

    def connection(self, peer: int | None) -> Connection:
        """The connection as the client knows it."""
        return Connection(self.number, self.worker, peer, self.transport)


class ChannelReserved(Reply, frozen=True):
    """A channel's id, and the number of the ring that its triggers go through; None where the client serves it."""

    channel: ChannelId
    ring: Annotated[int, Meta(ge=0, le=MAX_RINGS - 1)] | None = None


class ScheduleAdded(Reply, frozen=True):
    """A schedule's number."""

    number: ScheduleNumber


class Drained(Reply, frozen=True):
    """Whether all triggers in the rings are done."""

    drained: bool


class Closed(Reply, frozen=True):
    """Whether the workers ended."""

    ended: bool


class RemoteSupport(Reply, frozen=True):
    """The reason why the transport can't reach the device's memory; empty if it can."""

    unsupported_reason: str


class EndpointMade(Reply, frozen=True):
    """The client's endpoint, for the peer."""

    end: EndpointInfo


class Exposed(Reply, frozen=True):
    """Memory that peers reach; see `proxyccl.proxy.interface.ExposedMemory`. `number` is for `Withdraw`."""

    number: Uint64
    address: Uint64
    key: Uint64
    local_key: Uint32
    copied: bool


class Refused(Reply, frozen=True):
    """A request that the daemon did not carry out.

    Attributes:
        error: the kind of exception that the client raises. After "protocol" the daemon hangs up.
        message: the reason.
        argument: with "argument": its name.
    """

    error: Literal["argument", "resource", "protocol", "unavailable", "transport", "other"]
    message: str
    argument: str = ""

    @classmethod
    def of(cls, error: ProxyCCLError) -> Refused:
        """The answer to a request that raised."""
        text = str(error)
        match error:
            case ArgumentError():
                return cls("argument", text.removeprefix(f"{error.argument}: "), error.argument)
            case ResourceError():
                return cls("resource", text)
            case ProtocolError():
                return cls("protocol", text)
            case RuntimeUnavailableError():
                return cls("unavailable", text)
            case TransportError():
                return cls("transport", text)
            case _:
                return cls("other", text)

    def exception(self) -> ProxyCCLError:
        """The exception that the client raises."""
        match self.error:
            case "argument":
                return ArgumentError(self.argument, self.message)
            case "resource":
                return ResourceError(self.message)
            case "protocol":
                return ProxyLostError(f"the node daemon refuses this process: {self.message}", operation="proxy")
            case "unavailable":
                return RuntimeUnavailableError(self.message)
            case "transport":
                return TransportError(self.message, operation="connect")
            case "other":
                return ProxyCCLError(f"the node daemon: {self.message}")


class Failed(Reply, frozen=True):
    """An event: a worker of the client's service ended on an error. See `proxyccl.proxy.interface.ProxyFailure`."""

    code: Uint32
    channel: Uint64 | None
    trigger: tuple[Uint64, Uint64] | None
    status: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    reason: str
    peer: Uint64 | None
    schedule: Uint32 = 0
    wait: Uint32 = 0
    offset: Uint64 = 0

    @classmethod
    def of(cls, failure: ProxyFailure) -> Failed:
        """The event for a failure."""
        trigger = failure.trigger.encode() if failure.trigger is not None else None
        return cls(
            failure.code,
            failure.channel,
            trigger,
            failure.status,
            failure.reason,
            failure.peer,
            failure.schedule,
            failure.wait,
            failure.offset,
        )

    def failure(self) -> ProxyFailure:
        """The failure, without the exception of a handler."""
        trigger = Trigger.decode(*self.trigger) if self.trigger is not None else None
        return ProxyFailure(
            self.code,
            self.channel,
            trigger,
            self.status,
            self.reason,
            peer=self.peer,
            schedule=self.schedule,
            wait=self.wait,
            offset=self.offset,
        )


class Ending(Reply, frozen=True):
    """An event: the daemon is ending."""


ServiceRequest: TypeAlias = (
    AddMemory
    | AddPinnedMemory
    | AddRemoteMemory
    | RemoveMemory
    | ConnectCopy
    | ConnectRemote
    | ReserveChannel
    | ReserveElsewhere
    | SetChannel
    | FreeChannels
    | AddSchedule
    | RemoveSchedule
    | Drain
    | OpenRemote
    | RemoteUnsupportedReason
    | MakeEndpoint
    | ConnectEndpoint
    | Expose
    | ExposePinned
    | Withdraw
)
"""The requests that need an open service."""

AnyRequest: TypeAlias = RemoteMissing | WriteReport | Prepare | Open | Close | Offer | Reach | ServiceRequest

AnyReply: TypeAlias = (
    Done
    | Reached
    | Introduced
    | Missing
    | Opened
    | MemoryAdded
    | Connected
    | ChannelReserved
    | ScheduleAdded
    | Drained
    | Closed
    | RemoteSupport
    | EndpointMade
    | Exposed
    | Refused
    | Failed
    | Ending
)

HELLOS = Codec(Hello, LONGEST_FRAME)
HELLO_ANSWERS = Codec(HelloAnswer, LONGEST_FRAME, name="answer to Hello")
REQUESTS = Codec[AnyRequest](AnyRequest, LONGEST_FRAME, name="request")
REPLIES = Codec[AnyReply](AnyReply, LONGEST_FRAME, name="reply")


def socket_path(path: str | os.PathLike[str] | None = None) -> Path:
    """The daemon's socket: the path given, else ``PROXYCCL_DAEMON_SOCKET``, else this user's default.

    Raises:
        ArgumentError: it is too long for a socket.
    """
    chosen = path or os.environ.get("PROXYCCL_DAEMON_SOCKET")
    if not chosen:
        runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
        chosen = f"{runtime_dir}/proxyccl.sock" if runtime_dir else f"/tmp/proxyccl-{os.geteuid()}/daemon.sock"
    if len(os.fsencode(chosen)) > 107:
        raise ArgumentError("socket", f"{os.fspath(chosen)!r} is longer than the 107 bytes that a socket may have")
    return Path(chosen)
