"""The proxy service that the daemon runs for one client, and the methods by which the client uses the service."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from proxyccl.device.errors import ArgumentError, ProtocolError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.codec import Message, Uint64
from proxyccl.proxy.daemon.protocol import CONTROL_BYTES, method
from proxyccl.proxy.daemon.session_memories import REST_SECONDS, SessionMemories
from proxyccl.proxy.interface import Connection, EndpointInfo, ExposedMemory, Keys, ProxyFailure, Signals
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.placement import Place
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions, TransportOptions
from proxyccl.proxy.ring import Ring, ring_bytes
from proxyccl.proxy.schedule import Schedule
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.service_remote import ServiceRemote
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.tables import MAX_SCHEDULES, windows_of
from proxyccl.proxy.thread import LONGEST_US, IdlePolicy, ProxyThread
from proxyccl.proxy.transports.table import find_transport, remote_functions
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES
from proxyccl.proxy.workers import MAX_RINGS

_SEMAPHORE_BYTES = 8
_PCI_ADDRESS = "^[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]$"
_SEMAPHORES_BYTES = _SEMAPHORE_BYTES * MAX_CHANNELS

Rank = Annotated[int, Meta(ge=0, le=2**31)]
Options = dict[str, str | int | list[str] | None]
MemoryId = Annotated[int, Meta(ge=0, le=MAX_MEMORIES - 1)]
ScheduleNumber = Annotated[int, Meta(ge=1, le=MAX_SCHEDULES - 1)]
ChannelId = Annotated[int, Meta(ge=0, le=MAX_CHANNELS - 1)]
RingNumber = Annotated[int, Meta(ge=0, le=MAX_RINGS - 1)]
Nbytes = Annotated[int, Meta(ge=0, le=2**62)]
PositiveNbytes = Annotated[int, Meta(ge=1, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
IdleTime = Annotated[float, Meta(ge=0, le=LONGEST_US)]
SegmentOffset = Annotated[int, Meta(ge=0, le=2**40)]
TableOffset = Annotated[int, Meta(ge=CONTROL_BYTES, le=2**30, multiple_of=128)]

T = TypeVar("T")


class ServiceOptions(Message, frozen=True):
    """A client's options for its service."""

    runtime: str  # name of the runtime
    device_id: str  # device_id of the device whose kernels push to the rings
    fifo_size: Annotated[int, Meta(ge=2, le=2**20)]  # slots in each ring
    threads: Annotated[int, Meta(ge=1, le=MAX_RINGS)]  # number of workers
    shared_offset: TableOffset  # offset of `SharedWords` in the control segment
    description: Description | None = None  # the rank that the service works for
    # Offset, in the control segment, of the words that peers signal, by channel id; None for a service without
    # schedules.
    semaphores_offset: TableOffset | None = None
    ring_per_connection: bool = False  # see `ProxyService`
    # The fields, in order, of the `IdlePolicy` that the client requires; None for the daemon's policy.
    idle: tuple[IdleTime, IdleTime, IdleTime] | None = None


class SessionService:
    """A client's service with its memories, channels, schedules and remote links.

    A client may name only objects that the daemon has made for this client: a method raises ProtocolError for any other
    object. A method that changes a table pauses the workers, because a trigger may name any id at any time. The
    client's remote links have their own device context, so no other client can use the client's keys. Raises
    ArgumentError if a descriptor is not memory of the required size.

    Args:
        options: the client's options.
        descriptors: descriptors of the control segment and the rings, which the caller closes.
        runtime, threads, idle, on_failure, on_warning: see `ProxyService`.
        has_left: returns whether the client has hung up.
    """

    def __init__(
        self,
        options: ServiceOptions,
        descriptors: Sequence[int],
        runtime: Runtime,
        threads: Sequence[ProxyThread],
        idle: IdlePolicy,
        on_failure: Callable[[ProxyFailure], None],
        on_warning: Callable[[str], None],
        has_left: Callable[[], bool],
    ) -> None:
        with contextlib.ExitStack() as undo:
            nbytes = options.shared_offset + SharedWords.BYTES
            if options.semaphores_offset is not None:
                nbytes = max(nbytes, options.semaphores_offset + _SEMAPHORES_BYTES)
            segment = runtime.adopt_pinned(os.dup(descriptors[0]), nbytes)
            undo.callback(segment.close)
            rings: list[Ring] = []
            for descriptor in descriptors[1:]:
                # In the daemon only the engine reads a ring; the client gives the device access to the ring.
                memory = SharedMemory.adopt(os.dup(descriptor), ring_bytes(options.fifo_size))
                rings.append(Ring(memory, options.fifo_size))
                undo.callback(rings[-1].close)
            self.proxy = ProxyService(
                runtime,
                segment.host_ptr,
                segment,
                shared_offset=options.shared_offset,
                semaphores_offset=options.semaphores_offset,
                shared_threads=threads,
                rings=rings,
                ring_per_connection=options.ring_per_connection,
                on_failure=on_failure,
                on_warning=on_warning,
                description=options.description,
                idle=idle,
                started=False,
            )
            undo.pop_all()
        self._runtime = runtime
        self._segment = segment
        self._has_left = has_left
        self._started = False
        self.memories = SessionMemories(self.proxy, runtime)  # the memory that is mapped for the client
        self._sizes: dict[int, int] = {}  # maps a memory's first id to its size
        self._connections: list[Connection] = []
        self._channels: dict[int, Connection | None] = {}  # None if the client's process serves the channel
        self._schedules: set[int] = set()
        self._remote: ServiceRemote | None = None
        self._exposed: dict[int, ExposedMemory] = {}
        self._next_exposed = 0

    # -- memories ---

    @method()
    def add_memory(self, handle: bytes, nbytes: Nbytes, keys: Keys, first: MemoryId | None = None) -> MemoryId:
        """Maps memory by its handle, and registers the memory for copies. Returns the first of the memory's ids:
        `first`, or any id.
        """
        self._require_free(first, nbytes)
        if nbytes == 0:
            return self._register(0, lambda: self.proxy.add_memory(0, 0, keys, first=first))
        with contextlib.ExitStack() as undo:
            memory = self.memories.map(handle, nbytes, undo)
            return self._register(nbytes, lambda: self.proxy.add_memory(memory.ptr, nbytes, keys, first=first), undo)

    @method()
    def add_pinned_memory(self, handle: bytes, first: MemoryId | None = None) -> MemoryId:
        """Maps pinned memory, and registers it for copies by the device and the CPU. Returns the memory's first id."""
        with contextlib.ExitStack() as undo:
            memory = self.memories.map_pinned(handle, undo)
            self._require_free(first, memory.nbytes)
            return self._register(memory.nbytes, lambda: self.proxy.add_pinned_memory(memory, first=first), undo)

    @method()
    def add_remote_memory(self, address: Uint64, nbytes: Nbytes, keys: Keys, first: MemoryId | None = None) -> MemoryId:
        """Registers memory that remote transports access by address and keys. Returns the first of the memory's ids."""
        self._require_free(first, nbytes)
        return self._register(nbytes, lambda: self.proxy.add_remote_memory(address, nbytes, keys, first=first))

    def _require_free(self, first: int | None, nbytes: int) -> None:
        if first is None:
            return
        ids = range(first, first + windows_of(nbytes))
        used = any(other < ids.stop and first < other + windows_of(size) for other, size in self._sizes.items())
        if used or ids.stop > MAX_MEMORIES:
            raise ProtocolError(f"first: the ids from {first} to {ids.stop - 1} are not free")

    def _register(self, nbytes: int, add: Callable[[], int], undo: contextlib.ExitStack | None = None) -> int:
        with self.proxy.paused(REST_SECONDS):  # a worker may read the new entry at any time
            first = add()
        self._sizes[first] = nbytes
        if undo is not None:
            self.memories.keep("memory", first, undo.pop_all().close)
        return first

    @method(releases=True)
    def remove_memory(self, first: MemoryId) -> None:
        """Frees the ids of the memory whose first id is `first`."""
        if first not in self._sizes:
            raise ProtocolError(f"first: no memory of this client begins at id {first}")
        with self.proxy.paused(REST_SECONDS):
            self.proxy.remove_memory(first, self._sizes[first])
        del self._sizes[first]
        self.memories.retire("memory", first)

    @method(releases=True)  # a lost daemon maps nothing
    def set_mapped(self, process: bytes, bases: list[Uint64], mapped: bool) -> None:
        """Unmaps a process's blocks in this process, or maps them again (`BaseRuntime.set_mapped`). Memory ids of the
        blocks stay valid, but no transfer may use the ids while the blocks are unmapped.
        """
        self._runtime.set_mapped(process, bases, mapped)

    # -- connections and channels ---

    @method()
    def connect_copy(self, peer: Rank | None, transport: str = "copy") -> Connection:
        return self._connect(self.proxy.connect_copy(peer=peer, transport=transport))

    @method()
    def open_connection(self, peer: Rank) -> Connection:
        return self._connect(self._opened.open_connection(peer))

    def _connect(self, connection: Connection) -> Connection:
        self._connections.append(connection)
        return connection

    def _connection(self, number: int) -> Connection:
        if number >= len(self._connections):
            raise ProtocolError(f"connection: this client has no connection {number}")
        return self._connections[number]

    @method()
    def reserve_channel(self, connection: Uint64, channel: ChannelId | None = None) -> tuple[ChannelId, RingNumber]:
        """Reserves a channel id for a connection. Returns the id (`channel`, or any id), and the number of the ring for
        its triggers.
        """
        found = self._connection(connection)
        channel = self.proxy.reserve_channel(found, self._unused(channel))
        self._channels[channel] = found
        return channel, self.proxy.ring_of(channel)

    @method()
    def reserve_elsewhere(self, channel: ChannelId | None = None) -> ChannelId:
        """Reserves a channel id for a channel that the client's own process serves."""
        channel = self.proxy.reserve_elsewhere(self._unused(channel))
        self._channels[channel] = None
        return channel

    def _unused(self, channel: int | None) -> int | None:
        if channel in self._channels:
            raise ProtocolError(f"channel: {channel} is in use")
        return channel

    def _require_channel(self, channel: int, connection: int) -> Connection:
        found = self._connection(connection)
        if self._channels.get(channel) is not found:
            raise ProtocolError(f"channel: connection {connection} has no channel {channel}")
        return found

    @method()
    def set_channel(
        self,
        channel: ChannelId,
        connection: Uint64,
        word: bytes = b"",
        address: Uint64 = 0,
        signals: Signals = (0, 0),
    ) -> None:
        """Puts a channel in use. The channel's signals are counted in an 8-byte word of the peer. `word` is the word's
        handle if the connection is within the host; `address` is the word's address if the connection is remote.
        `signals` is the channel's entry in the result of `Session.suspend`.
        """
        found = self._require_channel(channel, connection)
        if find_transport(found.transport).is_remote:
            _require_semaphore("address", address, _SEMAPHORE_BYTES)
            with self.proxy.paused(REST_SECONDS):
                self.proxy.set_channel(channel, found, address)
            return
        with contextlib.ExitStack() as undo:
            memory = self.memories.map_pinned(word, undo)
            _require_semaphore("word", memory.host_ptr, memory.nbytes)
            with self.proxy.paused(REST_SECONDS):
                self.proxy.set_channel(channel, found, memory.host_ptr, signals=signals)
            self.memories.keep("word", channel, undo.pop_all().close)

    @method(releases=True)
    def free_channels(self, channels: list[ChannelId], connection: Uint64) -> None:
        for channel in channels:
            found = self._require_channel(channel, connection)
            with self.proxy.paused(REST_SECONDS):
                self.proxy.free_channels([channel], found)
            del self._channels[channel]
            self.memories.retire("word", channel)

    # -- schedules ---

    @method()
    def add_schedule(self, schedule: Schedule, number: ScheduleNumber | None = None) -> ScheduleNumber:
        """Adds a schedule, which the client's streams may then start. Each run looks up the ids anew. Returns the
        schedule's number: `number`, or any number.
        """
        if number in self._schedules:
            raise ProtocolError(f"number: {number} is in use")
        number = self.proxy.add_schedule(schedule, number)
        self._schedules.add(number)
        return number

    @method(releases=True)
    def remove_schedule(self, number: ScheduleNumber) -> None:
        if number not in self._schedules:
            raise ProtocolError(f"number: this client has no schedule {number}")
        with self.proxy.paused(REST_SECONDS):  # a stream may start the schedule at any time
            self.proxy.remove_schedule(number)
        self._schedules.remove(number)

    # -- remote links ---

    @method()
    def open_remote(
        self,
        rdma: Options,
        fabric: Options,
        signals: tuple[SegmentOffset, SegmentOffset],
        near: tuple[Annotated[str, Meta(pattern=_PCI_ADDRESS)] | None, Annotated[int, Meta(ge=0, le=2**16)] | None],
        local_rank: Rank,
        core_share: Annotated[int, Meta(ge=1, le=2**16)],
    ) -> None:
        """Prepares remote links for this client. `rdma` and `fabric` have the fields of `RdmaOptions` and
        `FabricOptions`. See `ProxyService.open_remote` for the other arguments.
        """
        if self._remote is not None:
            raise ProtocolError("open_remote: a network device is open already")
        options = TransportOptions(_from_fields(RdmaOptions, rdma), _from_fields(FabricOptions, fabric))
        self._remote = self.proxy.open_remote(
            options, range(*signals), near=Place(*near), local_rank=local_rank, core_share=core_share
        )

    @property
    def _opened(self) -> ServiceRemote:
        if self._remote is None:
            raise ProtocolError("no network device is open; expected open_remote first")
        return self._remote

    @method()
    def unsupported_reason(self, transport: str) -> str:
        return self._opened.unsupported_reason(transport)

    @method()
    def make_endpoint(self, peer: Rank, transport: str) -> EndpointInfo:
        return self._opened.make_endpoint(peer, transport)

    @method(timeouts=1)
    def connect_endpoint(self, peer: Rank, theirs: EndpointInfo, timeout: Seconds) -> None:
        self._opened.connect_endpoint(peer, theirs, timeout, self._has_left)

    @method(opens=True)
    def expose(self, handle: bytes, nbytes: PositiveNbytes, transport: str) -> ExposedMemory:
        """Lets peers on other hosts access the client's memory. The result's `owner` is the argument for `withdraw`."""
        remote = self._opened
        with contextlib.ExitStack() as undo:
            memory = self.memories.map(handle, nbytes, undo)
            # The handle is empty so that the registration is not cached: after the unmap, other memory may get the same
            # address.
            return self._expose(remote.expose(memory.ptr, nbytes, transport, b""), undo)

    @method(opens=True)
    def expose_pinned(self, handle: bytes, transport: str) -> ExposedMemory:
        remote = self._opened
        with contextlib.ExitStack() as undo:
            memory = self.memories.map_pinned(handle, undo)
            return self._expose(remote.expose_pinned(memory, transport), undo)

    def _expose(self, exposed: ExposedMemory, undo: contextlib.ExitStack) -> ExposedMemory:
        number, self._next_exposed = self._next_exposed, self._next_exposed + 1
        self._exposed[number] = exposed
        if not remote_functions(exposed.transport).stages:
            undo.callback(self._opened.withdraw, exposed)
        self.memories.keep("exposed", number, undo.pop_all().close)
        return replace(exposed, owner=number)

    @method(releases=True)
    def withdraw(self, number: Uint64) -> None:
        exposed = self._exposed.pop(number, None)
        if exposed is None:
            raise ProtocolError(f"number: this client has no exposed memory {number}")
        if remote_functions(exposed.transport).stages:
            self._opened.withdraw(exposed)  # after this call, the engine refuses peers' data
        self.memories.retire("exposed", number)

    # -- the workers ---

    @method()
    def start(self) -> None:
        """Lets the workers drain the rings. After `Session.suspend`, the client first makes its objects anew, under
        their former numbers, because kernels may already have pushed triggers that name these numbers.
        """
        if self._started:
            raise ProtocolError("start: the proxy is started already")
        self._started = True
        self.proxy.start()

    def signals(self) -> dict[int, Signals]:
        """Returns the signals of all channels that have connections. The rings must be drained."""
        return {channel: self.proxy.signals(channel) for channel, over in self._channels.items() if over is not None}

    @method(timeouts=1, needs_turns=True)
    def drain(self, timeout: Seconds) -> bool:
        """See `ProxyService.drain`. Also returns if the client disconnects."""
        return self.proxy.drain(timeout, self._has_left)

    # -- the end ---

    def free(self) -> None:
        """Unmaps and closes all objects that the service used. The service's workers must have ended."""
        with contextlib.ExitStack() as steps:  # closes the objects in reverse order, even if one close raises
            steps.callback(self._segment.close)
            steps.callback(self.memories.close)
            if self._remote is not None:
                steps.callback(self._remote.close)
            steps.callback(self.memories.unmap_retired)


def _require_semaphore(argument: str, address: int, nbytes: int) -> None:
    if nbytes != _SEMAPHORE_BYTES or address == 0 or address % _SEMAPHORE_BYTES:
        raise ArgumentError(argument, "a semaphore is a word of 8 bytes, aligned to 8")


def _from_fields(kind: type[T], given: Mapping[str, object]) -> T:
    expected = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if given.keys() != set(expected):
        raise ProtocolError(f"{kind.__name__} has the fields {', '.join(given)}; expected {', '.join(expected)}")
    return kind(**given)
