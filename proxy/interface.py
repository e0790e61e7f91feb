"""The interface of a proxy for a communicator.

A service in the communicator's own process implements `Proxy`, and so does a client of the node daemon. Callers name
memory twice, by an address in their process and by a handle: a service takes the address, the daemon opens the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct
from msgspec.structs import replace

from proxyccl.device.runtime import PinnedMemory
from proxyccl.device.sleepers import Sleepers
from proxyccl.proxy.codec import Message, Uint32, Uint64
from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.schedule import Schedule, SchedulePointers, ScheduleWait
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.trigger import Trigger

Handler = Callable[[Trigger], None]

HandleProvider = Callable[[], bytes]
"""Returns the bytes by which another process opens memory. Raises ArgumentError for memory that no other process can
open.
"""


class Connection(Message, frozen=True):
    """A connection to one peer. One worker serves the connection and all channels over it, so no lock is needed.

    Attributes:
        number: the connection's number in the proxy, from 0.
        worker: number of the worker that serves the connection.
        peer: the rank at the other end; None if unknown.
        transport: the transport's name.
        private: whether its channels copy from memory that only the caller's process can reach.
    """

    number: Uint64
    worker: Uint64
    peer: Uint64 | None
    transport: str
    private: bool = False


class ChannelCounters(Struct, frozen=True):
    """A proxy's counters of one channel.

    Attributes:
        triggers: triggers that the proxy acted on.
        puts: triggers that put data, and sends of schedules that carried data.
        bytes: bytes that the puts and gets moved.
        signals: triggers that signalled, and sends of schedules, which always signal.
        flushes: triggers that flushed.
        gets: triggers that got data.
    """

    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int
    gets: int


class ProxyFailure(Message, frozen=True):
    """The error that ended a worker.

    Attributes:
        code: a ProxycclErrorCode (control.h).
        channel: channel id; None if no channel is concerned.
        words: the two words of the trigger that failed, or None.
        status: status of the transport or the driver; 0 if neither failed.
        reason: the error in words.
        exception: a handler's exception, or None.
        peer: the peer of the connection that failed or that the trigger named; None if there is none.
        schedule: number of the schedule that failed; 0 if none is concerned.
        offset: for a refused trigger, the offset in the memory that caused the refusal, source or destination.
        wait: after a time-out, the kind of wait: a ProxycclWaitKind (control.h).
    """

    code: Uint32
    channel: Uint64 | None
    words: tuple[Uint64, Uint64] | None
    status: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    reason: str
    exception: BaseException | None = None
    peer: Uint64 | None = None
    schedule: Uint32 = 0
    wait: Uint32 = 0
    offset: Uint64 = 0

    @property
    def trigger(self) -> Trigger | None:
        """The trigger that failed, or None."""
        return Trigger.decode(*self.words) if self.words is not None else None


class EndpointWire(Message, frozen=True):
    """A further link of a staged connection that spreads its data over several links.

    Attributes:
        endpoint, rkey, area: see `EndpointInfo`.
    """

    endpoint: bytes
    rkey: Uint64
    area: Uint64


class EndpointInfo(Message, frozen=True):
    """A rank's message to a peer about its endpoint of a remote connection.

    Attributes:
        endpoint: the endpoint's address, encoded by its transport (for a queue pair an `EndpointAddress`).
        segment: address of the rank's control segment, as the peer's device names it.
        rkey: remote key of that segment or, if data is staged, of the staging area.
        area: address of the staging area, as the peer's device names it.
        ring_bytes: bytes of each ring in that area; 0 if data is not staged.
        more: further links; a connection has as many as both ranks offer.
    """

    endpoint: bytes
    segment: Uint64
    rkey: Uint64
    area: Uint64 = 0
    ring_bytes: Uint64 = 0
    more: tuple[EndpointWire, ...] = ()

    def wires(self) -> list[EndpointInfo]:
        """One `EndpointInfo` for each link of the connection."""
        others = [replace(self, endpoint=each.endpoint, rkey=each.rkey, area=each.area) for each in self.more]
        return [replace(each, more=()) for each in (self, *others)]


class ExposedMemory(Message, frozen=True):
    """Memory of this rank that peers reach by one transport; made by `RemoteContext.expose`.

    Attributes:
        transport: the transport's name.
        address: address of its first byte, as peers name it.
        key: key by which peers name it: a remote key, or the number of a target.
        local_key: key by which this rank's own requests name it; 0 if data is staged.
        copied: whether the proxy's copies use `address` too.
        owner: the context's state for withdrawing it.
    """

    transport: str
    address: Uint64
    key: Uint64
    local_key: Uint32
    copied: bool
    owner: Any


class RemoteContext(Protocol):
    """One rank's remote links: its endpoints, and the memory that peers reach.

    The first call that names a transport opens its device. That call also raises ArgumentError if an option names
    something that does not exist, and RuntimeUnavailableError if no device can be used; the message says why.
    """

    def unsupported_reason(self, transport: str) -> str:
        """The reason why a transport's device can't register the memory of the rank's GPU; empty if it can, or need
        not.

        Raises:
            ResourceError: the system or the device has no room.
        """
        ...

    def make_endpoint(self, peer: int, transport: str) -> EndpointInfo:
        """Makes this rank's endpoint of a connection to a peer.

        Args:
            peer: the peer's rank.
            transport: name of a remote transport.

        Raises:
            ArgumentError: the peer has an endpoint already, or there is no such transport.
            ResourceError: the device or the system has no room.
        """
        ...

    def connect_endpoint(self, peer: int, theirs: EndpointInfo, timeout: float) -> None:
        """Connects this rank's endpoint to the peer's. It does not wait for the peer.

        Args:
            peer: the peer's rank.
            theirs: the result of the peer's `make_endpoint`.
            timeout: seconds to keep trying while the network does not know the peer.

        Raises:
            ArgumentError: the peer's endpoint is malformed, or can't be reached from here.
            TransportError: the system refuses to connect.
        """
        ...

    def open_connection(self, peer: int) -> Connection:
        """The proxy's connection over a connected endpoint."""
        ...

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> ExposedMemory:
        """Lets peers reach memory of this rank. Pair each call with a `withdraw`.

        Args:
            ptr: the memory's address in the caller's process.
            nbytes: its size.
            transport: name of the transport.
            handle: handle by which another process opens it, which also identifies its allocation; empty if it has
                none.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ResourceError: the device or the system has no room.
            RuntimeUnavailableError: the device can't register it.
        """
        ...

    def expose_pinned(self, memory: PinnedMemory, transport: str) -> ExposedMemory:
        """Lets peers reach pinned memory, to which CPUs copy short data, by a transport that stages data.

        The memory stays open until `withdraw`.

        Raises:
            ArgumentError: the proxy can't reach the memory, or the transport does not stage data.
            ResourceError: the system has no room.
        """
        ...

    def withdraw(self, memory: ExposedMemory) -> None:
        """Undoes `expose` or `expose_pinned`. Triggers must no longer name the memory, on this rank or on a peer."""
        ...

    def close(self) -> None:
        """Frees endpoints, registrations and devices. The proxy must have ended."""
        ...


class Proxy(Protocol):
    """Drains a rank's rings and issues their triggers' operations."""

    @property
    def sleepers(self) -> Sleepers:
        """The proxy's threads, which launches wake."""
        ...

    def fifo_for(self, channel: int) -> Fifo:
        """The ring that a channel's triggers go through."""
        ...

    @property
    def rings(self) -> list[Fifo]:
        """All rings of this rank's kernels."""
        ...

    @property
    def handling(self) -> dict[int, float]:
        """The running handlers: for each handler's channel, the time.monotonic() at which the handler began."""
        ...

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last completed flush of a channel."""
        ...

    def outstanding(self, channel: int) -> int | None:
        """The number of triggers and sends of schedules on a channel's connection without a known completion.

        None for a handler's channel, and if this process can't tell.
        """
        ...

    def schedule_waits(self) -> list[ScheduleWait]:
        """The waits of schedules that make no progress, or that a failure stopped.

        Empty if this process can't tell.
        """
        ...

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        ...

    def completed(self, channel: int) -> int:
        """One more than the ticket up to which all triggers of a channel are known to be complete, or of a handler's
        channel handled. Their effects are visible to the caller.
        """
        ...

    def completed_pointer(self, channel: int) -> int:
        """The device's address of the word that holds `completed`."""
        ...

    @property
    def memory_limits_pointer(self) -> int:
        """The device's address of a table: for each memory id, the bytes from its first to the memory's end."""
        ...

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        ...

    def add_memory(self, base: int, nbytes: int, key: int = 0, *, handle: HandleProvider | None = None) -> int:
        """Registers memory under a free id, or under consecutive ones if it is longer than 4 GiB.

        Args:
            base: the memory's address in the caller's process.
            nbytes: its size.
            key: the memory's key in this rank's requests on remote transports; 0 for none.
            handle: returns the handle by which another process opens the memory.

        Returns:
            The first id.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ResourceError: no ids are left.
        """
        ...

    def add_pinned_memory(self, memory: PinnedMemory) -> int:
        """Registers pinned memory, this rank's own or a peer's that was opened here.

        Where source and destination of a put are such memory, the CPU copies up to `PROXYCCL_CPU_COPY_BYTES`
        (copy_transport.h), in less time than a copy engine takes. Remote links do not reach the memory by this id.

        Args:
            memory: stays open until `remove_memory`.

        Returns:
            The first id.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ClosedError: the memory is closed.
            ResourceError: no ids are left.
        """
        ...

    def add_remote_memory(self, address: int, nbytes: int, key: int) -> int:
        """Registers memory, this rank's or a peer's, that only a remote link reaches, by an address and a key.

        The engine refuses a trigger on a channel that would copy from or to it.

        Returns:
            The first id.

        Raises:
            ResourceError: no ids are left.
        """
        ...

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Frees a memory's ids. Triggers must no longer name these ids."""
        ...

    def connect_copy(self, *, peer: int | None = None, transport: str = "copy", private: bool = False) -> Connection:
        """Returns a new connection that copies within the host.

        Args:
            peer: the rank at the other end, which errors name.
            transport: name of a transport that copies within a host.
            private: whether its channels copy from memory that only the caller's process can reach.

        Raises:
            ArgumentError: the transport is remote, or does not exist.
            ResourceError: the worker has no room for another connection.
        """
        ...

    def open_remote(
        self,
        options: TransportOptions,
        signals: range,
        *,
        near: int | None,
        local_rank: int,
        core_share: int,
    ) -> RemoteContext:
        """Opens the rank's remote links. Called once; the caller closes the result after the proxy.

        Args:
            options: the network device to use, and the device's settings.
            signals: byte range of the control segment with the words that peers' proxies may signal.
            near: NUMA node that the device should be near; None if all nodes are equally near.
            local_rank: the rank's number on its host.
            core_share: cores that the rank's threads may keep busy.

        Raises:
            ArgumentError: `signals` leaves the control segment.
        """
        ...

    def reserve_channel(self, connection: Connection) -> int:
        """Reserves a channel id for a connection. The engine refuses triggers on it until `set_channel`."""
        ...

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: HandleProvider | None = None
    ) -> None:
        """Puts a reserved channel in use.

        Args:
            channel: its id.
            connection: the connection that it was reserved for.
            remote_semaphore: address, as the transport reaches it, of the word that its signals count up.
            handle: returns the handle by which another process opens that word.
        """
        ...

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Frees channel ids of a connection. All their triggers must be drained, and peers must no longer signal."""
        ...

    @property
    def schedule_pointers(self) -> SchedulePointers:
        """The device's addresses of the words by which streams start schedules."""
        ...

    def add_schedule(self, schedule: Schedule) -> int:
        """Adds a schedule, which streams may then start. The schedule's channels must have connections of this proxy.

        Returns:
            Its number, from 1.

        Raises:
            ArgumentError: an id is out of range, or a send names no destination.
            ResourceError: no numbers are left.
        """
        ...

    def remove_schedule(self, number: int) -> None:
        """Frees a schedule, which streams must no longer start. Raises ResourceError if the schedule is running."""
        ...

    def check_turns(self, timeout: float) -> None:
        """Fails the proxy if a stream has waited `timeout` seconds for a schedule while a worker took no turn.

        Nothing else would end the stream's wait. A worker that waits for a peer takes turns and bounds its own wait. A
        worker takes no turn while its process is stopped, a driver call does not return, or a Python handler runs.

        Args:
            timeout: the longest wait, in seconds. One thread calls this method every few milliseconds.
        """
        ...

    def stopped(self) -> str:
        """Says in words that a signal has stopped the proxy's process; "" if not, or if the proxy runs here."""
        ...

    def end_waits(self) -> None:
        """Releases streams that wait for schedules or stages. For use after a failure, when no worker will."""
        ...

    def add_handler(self, handler: Handler) -> int:
        """Makes a channel whose triggers are passed to a Python function of this process. Returns its id."""
        ...

    def drain(self, timeout: float, given_up: Callable[[], bool] = ...) -> bool:
        """Waits until all triggers in the rings are done and nothing is outstanding.

        Args:
            timeout: in seconds.
            given_up: polled during the wait, which ends when `given_up` returns True.

        Returns:
            False if the wait ended early.
        """
        ...

    def close(self, timeout: float = ...) -> bool:
        """Drains the rings and frees everything. Returns False if a worker did not end in time."""
        ...
