"""What a communicator asks of a proxy, whoever runs it: a service in the same process, or a daemon that is asked over a
socket.

Memory is named by its address in the caller's process and by a handle, as the proxy may be in another: each takes
the one that is good for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Event, Stream
from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.trigger import Trigger
from proxyccl.proxy.verbs.options import RdmaOptions

Handler = Callable[[Trigger], None]

Handle = Callable[[], bytes]
"""Gives the bytes by which another process opens memory; raises ArgumentError for memory that is private to its own."""


@dataclass(frozen=True)
class Connection:
    """A way to one peer. Belongs to one worker, and so do the channels over it: a connection has no locks.

    Attributes:
        number: among the proxy's, from 0.
        worker: number of its worker.
        peer: the rank that it leads to, or None where nobody said.
        transport: the transport's name.
        pointer: the engine's; None where the proxy is another process.
        owned: what is closed after it, in this order.
    """

    number: int
    worker: int
    peer: int | None
    transport: str
    pointer: Any = None
    owned: tuple[Stream | Event, ...] = ()


@dataclass(frozen=True)
class ChannelCounters:
    """What one channel did so far."""

    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int


@dataclass(frozen=True)
class ProxyFailure:
    """Why a worker ended on its own account.

    Attributes:
        code: an error code of control.h.
        channel: channel id, or None.
        trigger: the trigger that failed, or None.
        status: the transport's or driver's status.
        reason: in words.
        exception: what a handler raised, or None.
        peer: the peer of the connection that failed, or that the trigger was for; None where there is none.
    """

    code: int
    channel: int | None
    trigger: Trigger | None
    status: int
    reason: str
    exception: BaseException | None = None
    peer: int | None = None


@dataclass(frozen=True)
class VerbsOptions:
    """A queue pair and how to use it (verbs_transport.h).

    Attributes:
        qp: address of the ibv_qp, connected and ready to send. No other may use it, nor its queue of send completions.
        send_depth: work requests that its send queue takes.
        cq_depth: completions that its queue of send completions takes. Fewer than `send_depth` leave that much of the
            send queue unused.
        max_message: bytes that one request may carry; longer puts become several.
        signal_rkey: remote key of the memory that the peer's semaphore words lie in.
        fetch_add: signal by an atomic add of one, for a device that takes no inline data.
        scratch: with `fetch_add`, address of 8 registered bytes, aligned to 8, that receive the words' old values.
        scratch_lkey: their local key.
    """

    qp: int
    send_depth: int
    cq_depth: int
    max_message: int
    signal_rkey: int
    fetch_add: bool = False
    scratch: int = 0
    scratch_lkey: int = 0


@dataclass(frozen=True)
class StagedOptions:
    """A queue pair and the memory that stands between it and what it can't reach (staged_transport.h).

    Attributes:
        wire: the queue pair; its `signal_rkey` is of the peer's area.
        area: address of this end's, `staged_area_bytes` of zeroed pinned memory that is registered.
        device_area: the device's address of it.
        area_lkey: its local key.
        peer_area: the peer's, by the address that the peer has registered.
        ring_bytes: of the two rings in an area; the same on both ends, and a multiple of 64.
        chunk_bytes: of a put, are moved at a time.
        landings: address of the table of own memory that peers may have data put in (`Landings`).
        signals: address of the own words that the peer may signal.
        signals_bytes: their size.
    """

    wire: VerbsOptions
    area: int
    device_area: int
    area_lkey: int
    peer_area: int
    ring_bytes: int
    chunk_bytes: int
    landings: int
    signals: int
    signals_bytes: int


@dataclass(frozen=True)
class RdmaEnd:
    """One end of a way to a peer by RDMA, as the peer is told of it.

    Attributes:
        endpoint: address of its queue pair (`EndpointAddress`).
        segment: address of the rank's control segment, as peers name it.
        rkey: remote key of that segment or, where data is staged, of the area.
        area: address of the area; 0 where data is not staged.
        ring_bytes: of each of the rings in it.
    """

    endpoint: bytes
    segment: int
    rkey: int
    area: int = 0
    ring_bytes: int = 0

    def encode(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {**asdict(self), "endpoint": self.endpoint.hex()}

    @classmethod
    def decode(cls, values: Any) -> RdmaEnd:
        """The inverse of `encode`.

        Raises:
            ArgumentError: these values are no end.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names or not isinstance(values["endpoint"], str):
            raise ArgumentError("peer", "what it tells of its end of an RDMA connection makes no sense")
        for name in names - {"endpoint"}:
            if type(values[name]) is not int or not 0 <= values[name] < 1 << (32 if name == "rkey" else 64):
                raise ArgumentError("peer", f"its end of an RDMA connection has {values[name]!r:.40} for {name}")
        try:
            return cls(**{**values, "endpoint": bytes.fromhex(values["endpoint"])})
        except ValueError:
            raise ArgumentError("peer", "the endpoint of its RDMA connection is no bytes in hexadecimal") from None


@dataclass(frozen=True)
class RdmaMemory:
    """Own memory as peers reach it by one transport; made by `RdmaContext.expose`.

    Attributes:
        transport: "verbs" or "staged".
        address: by which peers name its first byte.
        key: by which they name the memory: a remote key, or the number of a landing.
        local_key: by which own requests do; 0 where data is staged.
        copied: whether copies of the proxy reach it by the same address.
        owner: what its context knows it by.
    """

    transport: str
    address: int
    key: int
    local_key: int
    copied: bool
    owner: Any


class RdmaContext(Protocol):
    """An opened RDMA device, with all that one rank has on it: its ends of connections, and memory that peers reach."""

    def refusal(self) -> str:
        """Why the device can't register the memory of the rank's GPU; empty if it can.

        Raises ResourceError: the system or the device has no room.
        """
        ...

    def make_end(self, peer: int, transport: str) -> RdmaEnd:
        """This rank's end of a way to a peer.

        Args:
            peer: its rank.
            transport: "verbs", or "staged" for data that goes through pinned memory.

        Raises:
            ArgumentError: there is one already, or no such transport.
            ResourceError: the device or the system has no room.
        """
        ...

    def connect_end(self, peer: int, theirs: RdmaEnd, timeout: float) -> None:
        """Makes the end ready to send to the peer's. It does not wait for the peer.

        Args:
            peer: its rank.
            theirs: what the peer's `make_end` gave.
            timeout: seconds to keep trying while the network does not know the peer.

        Raises:
            ArgumentError: the peer's end makes no sense, or can't be reached from here.
            TransportError: the system refuses to connect.
        """
        ...

    def open_connection(self, peer: int) -> Connection:
        """The proxy's way to a peer, over a connected end."""
        ...

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> RdmaMemory:
        """Lets peers reach own memory. Each call is paired with a `withdraw`.

        Args:
            ptr: its address in the caller's process.
            nbytes: its size.
            transport: by which.
            handle: by which another process opens it, and what tells its allocation from all others; empty where
                nothing does.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ResourceError: there is no room.
            RuntimeUnavailableError: the device can't register it.
        """
        ...

    def withdraw(self, memory: RdmaMemory) -> None:
        """Ends `expose`. No trigger, of a peer either, may name the memory any more."""
        ...

    def close(self) -> None:
        """Frees it all. The proxy must have ended."""
        ...


class Proxy(Protocol):
    """Drains a rank's rings and issues what their triggers ask for."""

    def fifo_for(self, channel: int) -> Fifo:
        """The ring that a channel's triggers go through."""
        ...

    @property
    def rings(self) -> list[Fifo]:
        """All rings of this rank's kernels."""
        ...

    @property
    def handling(self) -> dict[int, float]:
        """The channel of each handler that runs, and time.monotonic() when it began."""
        ...

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last flush that is complete on a channel."""
        ...

    def outstanding(self, channel: int) -> int | None:
        """Triggers of a channel's connection that are issued and not known to be complete; None where this process
        can't tell, and for a handler.
        """
        ...

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        ...

    @property
    def extents_pointer(self) -> int:
        """The device's address of the table that says for each memory id how many bytes follow it."""
        ...

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        ...

    def add_memory(self, base: int, nbytes: int, key: int = 0, *, handle: Handle | None = None) -> int:
        """Registers memory under a free id, or under consecutive ones if it is longer than 4 GiB. Returns the first.

        Raises ArgumentError for memory that the proxy can't reach, ResourceError when no ids are left.
        """
        ...

    def add_keyed_memory(self, address: int, nbytes: int, key: int) -> int:
        """Registers memory that RDMA knows by an address and a key: own, or a peer's. Returns the first id.

        A trigger that has it copied is refused.

        Raises ResourceError when no ids are left.
        """
        ...

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Gives ids back. No trigger may name them any more."""
        ...

    def connect_copy(self, *, peer: int | None = None) -> Connection:
        """A connection that copies within the node."""
        ...

    def open_rdma(
        self, options: RdmaOptions, signals: range, *, near: int | None = None, local_rank: int = 0
    ) -> RdmaContext:
        """Opens an RDMA device for this rank, once. It is closed behind the proxy.

        Args:
            options: which device, and its settings.
            signals: where in the control segment, in bytes, the words lie that peers' proxies may signal.
            near: NUMA node that the device is to be near to; None: all are equally near.
            local_rank: the rank's number on its host.

        Raises:
            ArgumentError: an option names what is not there.
            RuntimeUnavailableError: there is no device that can be used; the message says why.
        """
        ...

    def reserve_channel(self, connection: Connection) -> int:
        """A channel id for a connection's ring. Triggers on it are refused until `set_channel`."""
        ...

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: Handle | None = None
    ) -> None:
        """Puts a channel in use. `remote_semaphore` is the word that its signals count up."""
        ...

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Gives a connection's channel ids back."""
        ...

    def add_handler(self, handler: Handler) -> int:
        """A channel whose triggers are passed to a Python function of this process."""
        ...

    def drain(self, timeout: float, given_up: Callable[[], bool] = ...) -> bool:
        """Waits until what the rings held is done and nothing is outstanding; False if that did not come to be."""
        ...

    def close(self, timeout: float = ...) -> bool:
        """Drains the rings and frees everything; False if that did not end in time."""
        ...
