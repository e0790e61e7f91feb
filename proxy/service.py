"""The proxy service: rings, the workers that drain them, and the tables that triggers refer to.

It runs inside a rank, with threads of its own, or in a daemon beside others, on threads that they share. It knows no
ranks and no collectives.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.errors import (
    ArgumentError,
    ClosedError,
    ProxyCCLError,
    ResourceError,
    RuntimeUnavailableError,
)
from proxyccl.device.runtime import Event, PinnedMemory, Runtime, Stream
from proxyccl.proxy import _engine
from proxyccl.proxy.fifo import Fifo, Ring
from proxyccl.proxy.interface import (
    ChannelCounters,
    Connection,
    Handle,
    Handler,
    ProxyFailure,
    StagedOptions,
    VerbsOptions,
)
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description, Publication
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.thread import IdlePolicy, ProxyThread
from proxyccl.proxy.transport_status import status_text
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES, WINDOW_BYTES, Trigger
from proxyccl.proxy.verbs.context import VerbsContext
from proxyccl.proxy.verbs.options import RdmaOptions

ffi, lib = _engine.ffi, _engine.lib

COUNTERS_BYTES: int = ffi.sizeof("ProxycclCounters") * MAX_CHANNELS
FLUSHED_BYTES = 8 * MAX_CHANNELS
EXTENTS_BYTES = 8 * MAX_MEMORIES
MAX_RINGS: int = lib.PROXYCCL_MAX_RINGS
_DRAIN_LOOK = 0.0002
_UNUSED_THREAD_SECONDS = 10.0


class SharedWords:
    """What a service keeps in shared memory: counters and flush words of its channels, extents of its memories.

    Args:
        memory: pinned; it has `BYTES` behind `offset`.
        offset: of the first.
    """

    BYTES = COUNTERS_BYTES + FLUSHED_BYTES + EXTENTS_BYTES

    def __init__(self, memory: PinnedMemory, offset: int) -> None:
        self.memory = memory
        self._offset = offset
        self._flushed_offset = offset + COUNTERS_BYTES
        self._extents_offset = self._flushed_offset + FLUSHED_BYTES
        self.table = ffi.cast("ProxycclCounters *", memory.host_ptr + offset)
        self.extents = ffi.cast("uint64_t *", memory.host_ptr + self._extents_offset)

    @property
    def counters_handle(self) -> bytes:
        """By which other processes open the counters."""
        return self.memory.export(self.memory.host_ptr + self._offset, COUNTERS_BYTES)

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        return self.memory.ptr + self._flushed_offset + 8 * channel

    def flushed_host(self, channel: int) -> Any:
        """The CPU's pointer to the same word."""
        return ffi.cast("uint64_t *", self.memory.host_ptr + self._flushed_offset + 8 * channel)

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last flush that is complete on a channel."""
        return int(self.flushed_host(channel)[0])

    @property
    def extents_pointer(self) -> int:
        """The device's address of the table that says for each memory id how many bytes follow it."""
        return self.memory.ptr + self._extents_offset

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        if not 0 <= channel < MAX_CHANNELS:
            raise ArgumentError("channel", f"must be from 0 to {MAX_CHANNELS - 1}, not {channel}")
        if self.memory.closed:
            raise ClosedError("the proxy service is closed")
        c = self.table[channel]
        return ChannelCounters(c.triggers, c.puts, c.bytes, c.signals, c.flushes)

    def clear_counters(self, channel: int) -> None:
        """For the next channel of that id. No worker uses it."""
        self.table[channel] = ffi.new("ProxycclCounters *")[0]


def _fill(native_options: Any, options: VerbsOptions | StagedOptions, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(options, name)
        try:
            setattr(native_options, name, value)
        except (OverflowError, TypeError) as error:
            raise ArgumentError(name, f"must be a number that fits its field, not {value!r}") from error


def _fill_verbs(native_options: Any, options: VerbsOptions) -> None:
    native_options.signal = lib.PROXYCCL_VERBS_FETCH_ADD if options.fetch_add else lib.PROXYCCL_VERBS_WRITE
    _fill(
        native_options,
        options,
        ("qp", "send_depth", "cq_depth", "max_message", "signal_rkey", "scratch", "scratch_lkey"),
    )


def _require(refused: Any, *options: VerbsOptions | StagedOptions) -> None:
    if refused:
        name = ffi.string(refused).decode()
        value = next(getattr(o, name) for o in options if hasattr(o, name))
        raise ArgumentError(name, f"can't be {value!r}")


def _require_verbs(pointer: Any) -> None:
    if not pointer and ffi.errno == errno.ENOSYS:
        raise RuntimeUnavailableError(
            "RDMA: this build of ProxyCCL has no transport for it; build it where libibverbs' headers are "
            "(Debian, Ubuntu: apt install libibverbs-dev; Fedora: dnf install rdma-core-devel)"
        )


def require_rings(fifos: int, threads: int) -> None:
    """Raises ArgumentError for numbers of rings and of threads that don't go together."""
    if not isinstance(threads, int) or threads < 1:
        raise ArgumentError("proxy_threads", f"must be a positive integer, not {threads!r}")
    if not isinstance(fifos, int) or not threads <= fifos <= MAX_RINGS:
        raise ArgumentError("fifos", f"must be an integer from proxy_threads ({threads}) to {MAX_RINGS}, not {fifos!r}")


@dataclass(frozen=True)
class _Worker:
    pointer: Any
    stats: Any  # what it shows of itself
    thread: ProxyThread
    ended: threading.Event = field(default_factory=threading.Event)  # its thread has let go of it for good


def _leave_crowded_cores(workers: int) -> None:
    """Lets the calling worker thread run on any core that the system grants.

    Only where its process is bound to no more cores than it has workers, as some launchers bind each rank to one. The
    program spins there while it waits for its GPU, and a worker that had to share the core would get it once a time
    slice: each trigger would cost milliseconds.
    """
    if len(os.sched_getaffinity(0)) <= workers:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class ProxyService:
    """Drains rings and issues what their triggers ask for.

    Attributes:
        publication: how observers open what it shows; None without a description.

    Args:
        runtime: whose copies it issues.
        control: address of the ProxycclControl whose abort word ends the workers.
        shared: pinned memory that holds `shared_bytes()` for counters, flush words and the extents of memories, zeroed;
            peers' words are signalled in it too, where RDMA is used.
        shared_offset: of those bytes in it.
        fifos: number of rings.
        threads: number of workers, each with a thread of its own; rings are dealt out to them in turn.
        fifo_size: slots in each ring.
        idle: what the threads do when there is nothing to do.
        cores: that the threads may run on; None for any.
        shared_threads: threads that others use too, for a worker each, in place of own ones.
        rings: that others made, in place of own ones; `close` closes them too.
        on_failure: called in the worker's thread when it ends on an error; nobody else is told.
        description: by which observers know it; without one they don't find it.

    Raises:
        ArgumentError: fewer rings than threads, a size that is none, or cores that there are not.
    """

    def __init__(
        self,
        runtime: Runtime,
        control: int,
        shared: PinnedMemory,
        *,
        shared_offset: int = 0,
        fifos: int = 1,
        threads: int = 1,
        fifo_size: int = 8192,
        idle: IdlePolicy | None = None,
        cores: Collection[int] | None = None,
        shared_threads: Sequence[ProxyThread] = (),
        rings: Sequence[Ring] = (),
        on_failure: Callable[[ProxyFailure], None] | None = None,
        description: Description | None = None,
        name: str = "proxyccl",
    ) -> None:
        threads, fifos = len(shared_threads) or threads, len(rings) or fifos
        require_rings(fifos, threads)
        self.runtime = runtime
        self._shared = SharedWords(shared, shared_offset)
        self._on_failure = on_failure
        self._memory_used = [False] * MAX_MEMORIES
        self._ring_of: dict[int, int] = {}  # by channel
        self._next_channel = 0
        self._free_channels: list[list[int]] = [[] for _ in range(threads)]  # by worker
        self._handlers: dict[int, Handler] = {}
        self.handling: dict[int, float] = {}  # channel of each handler that runs: time.monotonic() when it began
        self._connections: list[Connection] = []
        self._closed = self._freed = False
        self._lock = threading.Lock()
        self._table = ffi.new("ProxycclRuntimeTable *")
        functions = runtime.engine_functions()
        lib.proxyccl_runtime_table_fill(
            self._table, functions.copy, functions.write64, functions.event_record, functions.event_query
        )
        with contextlib.ExitStack() as undo:
            self.fifos: list[Fifo] = []
            for _ in range(0 if rings else fifos):
                self.fifos.append(Fifo(runtime, fifo_size))
                undo.callback(self.fifos[-1].close)
            self._rings: Sequence[Ring] = rings or self.fifos
            self._service = lib.proxyccl_service_create(ffi.cast("ProxycclControl *", control), self._shared.table)
            undo.callback(lib.proxyccl_service_destroy, self._service)
            own_thread = functools.partial(self._begin_own_thread, threads if cores is None else 0)
            self._owned_threads: list[ProxyThread] = []
            for i in range(0 if shared_threads else threads):
                self._owned_threads.append(ProxyThread(f"{name}-proxy-{i}", idle or IdlePolicy(), cores, own_thread))
                undo.callback(self._owned_threads[-1].close, _UNUSED_THREAD_SECONDS)
            self._observed = ObservedSegment(threads)
            undo.callback(self._observed.close)
            self._workers: list[_Worker] = []
            for i, thread in enumerate(shared_threads or self._owned_threads):
                stats = self._observed.worker(i)
                pointer = lib.proxyccl_worker_create(self._service, stats)
                self._workers.append(_Worker(pointer, stats, thread))
                undo.callback(lib.proxyccl_worker_destroy, pointer)
            if shared_threads:
                context = runtime.launch_target().context
                for worker in self._workers:
                    lib.proxyccl_worker_enter_context(worker.pointer, functions.make_current, context)
            for i, ring in enumerate(self._rings):
                lib.proxyccl_worker_add_ring(
                    self._workers[i % threads].pointer,
                    ffi.cast("ProxycclTrigger *", ring.slots_host),
                    ffi.cast("uint64_t *", ring.tail_host),
                    ring.size_log2,
                )
            self.publication = self._describe(description) if description else None
            self._published = publications.try_publish(self.publication) if self.publication else None
            undo.pop_all()  # nothing fails from here on: threads run what the workers use
        for worker in self._workers:
            worker.thread.add(worker.pointer, functools.partial(self._hear, worker))

    def _describe(self, description: Description) -> Publication:
        return Publication.of_this_process(
            description,
            self.runtime.name,
            workers=len(self._workers),
            observed=self.observed_handle.hex(),
            counters=self._shared.counters_handle.hex(),
            rings=tuple(
                publications.RingPlace(ring.pinned.handle.hex(), i % len(self._workers), ring.size_log2)
                for i, ring in enumerate(self._rings)
            ),
        )

    def _begin_own_thread(self, unbound_threads: int) -> None:
        self.runtime.activate(for_proxy=True)
        _leave_crowded_cores(unbound_threads)

    @staticmethod
    def shared_bytes() -> int:
        """Bytes of shared memory that a service needs."""
        return SharedWords.BYTES

    def __repr__(self) -> str:
        rings, threads, channels = len(self._rings), len(self._workers), len(self._ring_of)
        return f"<ProxyService with {rings} rings, {threads} threads, {channels} channels>"

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        return self._shared.flushed_pointer(channel)

    @property
    def extents_pointer(self) -> int:
        """The device's address of the table that says for each memory id how many bytes follow it."""
        return self._shared.extents_pointer

    def add_memory(self, base: int, nbytes: int, key: int = 0, *, handle: Handle | None = None) -> int:
        """Registers memory under a free id, or under consecutive ones if it is longer than 4 GiB. Returns the first.

        `handle` is not needed in the process whose address `base` is.

        Raises:
            ResourceError: no ids left: a ring's trigger can name 512.
        """
        return self._add_memory(base, nbytes, key, keyed=False)

    def add_keyed_memory(self, address: int, nbytes: int, key: int) -> int:
        """Registers memory that RDMA knows by an address and a key. Returns the first id. Errors as of `add_memory`."""
        return self._add_memory(address, nbytes, key, keyed=True)

    def _add_memory(self, base: int, nbytes: int, key: int, *, keyed: bool) -> int:
        windows = max(1, -(-nbytes // WINDOW_BYTES))
        with self._lock:
            self._require_open()
            first = self._find_ids(windows)
            for i in range(windows):
                self._memory_used[first + i] = True
                offset = i * WINDOW_BYTES
                self._shared.extents[first + i] = nbytes - offset
                start = ffi.cast("char *", base + offset)
                lib.proxyccl_service_set_memory(self._service, first + i, start, nbytes - offset, key, keyed)
        return first

    def _find_ids(self, windows: int) -> int:
        run = 0
        for i, used in enumerate(self._memory_used):
            run = 0 if used else run + 1
            if run == windows:
                return i - windows + 1
        raise ResourceError(
            f"no {windows} consecutive memory ids are free of {MAX_MEMORIES}: "
            f"{sum(self._memory_used)} are in use; close memories that are not needed any more"
        )

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Gives ids back. No trigger may name them any more."""
        with self._lock:
            if self._closed:
                return
            for i in range(max(1, -(-nbytes // WINDOW_BYTES))):
                self._shared.extents[first + i] = 0
                lib.proxyccl_service_set_memory(self._service, first + i, ffi.NULL, 0, 0, False)
                self._memory_used[first + i] = False

    def connect_copy(self, *, peer: int | None = None) -> Connection:
        """A connection that copies within the node, in a stream of its own.

        Args:
            peer: the rank that it leads to, for failures to name.

        Raises:
            ResourceError: no connections are left.
        """
        stream, event = self.runtime.create_stream(for_proxy=True), self.runtime.create_event()
        pointer = lib.proxyccl_copy_connection(
            self._table, ffi.cast("void *", stream.handle), ffi.cast("void *", event.handle)
        )
        return self._connect(pointer, peer, (stream, event))

    def connect_verbs(self, options: VerbsOptions, *, peer: int | None = None) -> Connection:
        """A connection that writes to a peer's memory over a queue pair.

        The queue pair, and what it was made from, must live until the service is closed. Memories that such a
        connection's triggers name have keys: an own one its local key, a peer's its remote key, and with it the
        address that the peer knows it by. The same goes for the word given to `set_channel`.

        Args:
            options: the queue pair and how to use it.
            peer: the rank that it leads to, for failures to name.

        Raises:
            ArgumentError: an option can't be; the error names it.
            RuntimeUnavailableError: this build has no such transport.
            ResourceError: no connections are left.
        """
        native_options = ffi.new("ProxycclVerbsOptions *")
        _fill_verbs(native_options, options)
        _require(lib.proxyccl_verbs_refused(native_options), options)
        pointer = lib.proxyccl_verbs_connection(native_options)
        _require_verbs(pointer)
        return self._connect(pointer, peer, ())

    def connect_staged(self, options: StagedOptions, *, peer: int | None = None) -> Connection:
        """A connection that moves data through pinned memory on both sides, by copies and over a queue pair.

        What the options name must live until the service is closed. An own memory that such a connection's triggers
        name has its address for this rank's copies; a peer's has the address that the peer's copies know it by, and
        the peer's number of the landing as its key. The peer's service must have such a connection to here, which does
        the other half of the work.

        Args:
            options: the queue pair and the memory.
            peer: the rank that it leads to, for failures to name.

        Raises:
            ArgumentError: an option can't be; the error names it.
            RuntimeUnavailableError: this build has no verbs transport.
            ResourceError: no connections are left.
        """
        native_options = ffi.new("ProxycclStagedOptions *")
        _fill_verbs(native_options.wire, options.wire)
        _fill(
            native_options,
            options,
            ("area", "device_area", "area_lkey", "peer_area", "ring_bytes", "chunk_bytes", "signals", "signals_bytes"),
        )
        native_options.landings = ffi.cast("ProxycclLanding *", options.landings)
        _require(lib.proxyccl_staged_refused(native_options), options, options.wire)
        streams = [self.runtime.create_stream(for_proxy=True) for _ in range(2)]
        events = [self.runtime.create_event() for _ in range(2)]
        pointer = lib.proxyccl_staged_connection(
            native_options,
            self._table,
            [ffi.cast("void *", stream.handle) for stream in streams],
            [ffi.cast("void *", event.handle) for event in events],
        )
        _require_verbs(pointer)
        return self._connect(pointer, peer, (*streams, *events))

    def open_rdma(
        self, options: RdmaOptions, signals: range, *, near: int | None = None, local_rank: int = 0
    ) -> VerbsContext:
        """Opens an RDMA device. Arguments and errors as of `Proxy.open_rdma`."""
        segment = self._shared.memory
        return VerbsContext(self, self.runtime, segment, options, signals, near=near, local_rank=local_rank)

    def _connect(self, pointer: Any, peer: int | None, owned: tuple[Stream | Event, ...]) -> Connection:
        if not pointer:
            raise ResourceError("out of memory for a connection")
        try:
            with self._lock:
                self._require_open()
                worker = len(self._connections) % len(self._workers)
                transport = str(ffi.string(lib.proxyccl_connection_transport(pointer)).decode())
                connection = Connection(len(self._connections), worker, peer, transport, pointer, owned)
                number = connection.number // len(self._workers)
                if number < lib.PROXYCCL_MAX_CONNECTIONS:
                    self._observed.add_connection(worker, number, peer, transport)
                if lib.proxyccl_worker_add_connection(self._workers[worker].pointer, pointer):
                    raise ResourceError(f"a proxy thread serves at most {lib.PROXYCCL_MAX_CONNECTIONS} connections")
                self._connections.append(connection)
        except ProxyCCLError:
            lib.proxyccl_connection_destroy(pointer)
            raise
        return connection

    def reserve_channel(self, connection: Connection) -> int:
        """A channel id for a connection's ring. Triggers on it are refused until `set_channel`.

        Raises:
            ResourceError: all 1024 channel ids are in use.
        """
        with self._lock:
            return self._take_channel(connection.worker)

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: Handle | None = None
    ) -> None:
        """Puts a channel in use.

        `remote_semaphore` is the address, as the transport reaches it, of the word that its signals count up. `handle`
        is not needed in the process whose address it is.
        """
        with self._lock:
            self._require_open()
            lib.proxyccl_service_set_channel(
                self._service,
                channel,
                connection.pointer,
                ffi.cast("uint64_t *", remote_semaphore),
                self._shared.flushed_host(channel),
            )
            self._show_channel(channel, connection.worker, connection.number // len(self._workers))

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Gives a connection's channel ids back. What was pushed on them must have been drained, and nobody may use
        them any more, nor signal their words.
        """
        with self._lock:
            if self._closed:
                return
            for channel in channels:
                lib.proxyccl_service_set_channel(self._service, channel, ffi.NULL, ffi.NULL, ffi.NULL)
                self._observed.remove_channel(channel)
                self._shared.clear_counters(channel)
                self._free_channels[connection.worker].append(channel)

    def add_handler(self, handler: Handler, channel: int | None = None) -> int:
        """A channel whose triggers, of any operation, are passed to a Python function in the worker's thread.

        The ring's later triggers wait until it returns. If it raises, the communicator ends with a HandlerError.

        Args:
            handler: called with each trigger.
            channel: an id that another service has given away (`reserve_handler`); None for one of this service's.

        Raises:
            ArgumentError: the handler can't be called.
            ResourceError: all 1024 channel ids are in use.
        """
        if not callable(handler):
            raise ArgumentError("handler", f"must be callable, not {type(handler).__name__}")
        with self._lock:
            self._require_open()
            worker = len(self._handlers) % len(self._workers)
            if channel is None:
                channel = self._take_channel(worker)
            else:
                self._ring_of[channel] = self._deal_ring(worker, len(self._handlers))
            self._handlers[channel] = handler
            lib.proxyccl_service_set_handler(self._service, channel, self._shared.flushed_host(channel))
            self._show_channel(channel, worker, None)
        return channel

    def reserve_handler(self) -> int:
        """A channel id for a handler of another service, that of a process which this one serves."""
        with self._lock:
            return self._take_channel(0)

    def _show_channel(self, channel: int, worker: int, connection: int | None) -> None:
        self._observed.place_channel(channel, worker, self._ring_of[channel], connection)

    def _take_channel(self, worker: int) -> int:
        self._require_open()
        if self._free_channels[worker]:
            return self._free_channels[worker].pop()
        channel = self._next_channel
        if channel == MAX_CHANNELS:
            raise ResourceError(f"all {MAX_CHANNELS} channel ids are in use")
        self._next_channel += 1
        self._ring_of[channel] = self._deal_ring(worker, channel // len(self._workers))
        return channel

    def _deal_ring(self, worker: int, turn: int) -> int:
        rings = range(worker, len(self._rings), len(self._workers))
        return rings[turn % len(rings)]

    def fifo_for(self, channel: int) -> Fifo:
        """The ring that a channel's triggers go through."""
        return self.fifos[self._ring_of[channel]]

    def ring_of(self, channel: int) -> int:
        """Its number."""
        return self._ring_of[channel]

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        return self._shared.counters(channel)

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last flush that is complete on a channel."""
        return self._shared.flushed(channel)

    def outstanding(self, channel: int) -> int | None:
        """Triggers of a channel's connection that are issued and not known to be complete; None for a handler."""
        return self._observed.outstanding(channel)

    @property
    def ended(self) -> list[bool]:
        """For each worker whether its thread has let go of it for good."""
        return [worker.ended.is_set() for worker in self._workers]

    @property
    def observed_handle(self) -> bytes:
        """By which other processes open its `ObservedSegment`."""
        return self._observed.memory.handle

    @property
    def rings(self) -> list[Fifo]:
        """The rings of this process's own kernels."""
        return self.fifos

    def _hear(self, worker: _Worker, reason: int, info: Any) -> None:
        """Called in the worker's thread when it has something to tell."""
        try:
            if reason == lib.PROXYCCL_EXIT_HANDLER:
                self._handle(worker, info)
            elif reason == lib.PROXYCCL_EXIT_ERROR:
                self._fail(self._failure(info))
        finally:
            if reason != lib.PROXYCCL_EXIT_HANDLER:
                worker.stats.started_ns = 0
                worker.ended.set()

    def _handle(self, worker: _Worker, info: Any) -> None:
        trigger = Trigger.decode(info.trigger.word0, info.trigger.word1)
        self.handling[info.channel] = time.monotonic()
        try:
            self._handlers[info.channel](trigger)
        except Exception as error:
            code, reason = native.PROXYCCL_ERROR_HANDLER, f"{type(error).__name__}: {error}"
            self._shared.table[info.channel].errors += 1
            self._fail(ProxyFailure(code, info.channel, trigger, 0, reason, error))
            lib.proxyccl_worker_abandon(worker.pointer)
        else:
            lib.proxyccl_worker_handled(worker.pointer)
        finally:
            del self.handling[info.channel]

    def _failure(self, info: Any) -> ProxyFailure:
        of_trigger = info.channel < MAX_CHANNELS
        connection = self._connection_at(info.connection)
        reason = ffi.string(info.reason).decode() if info.reason else ""
        if connection is not None and info.code == native.PROXYCCL_ERROR_TRANSPORT:
            meaning = status_text(connection.transport, info.status)
            reason = f"{reason}: {meaning}" if meaning else reason
        return ProxyFailure(
            code=info.code,
            channel=info.channel if of_trigger else None,
            trigger=Trigger.decode(info.trigger.word0, info.trigger.word1) if of_trigger else None,
            status=info.status,
            reason=reason,
            peer=connection.peer if connection is not None else None,
        )

    def _connection_at(self, pointer: Any) -> Connection | None:
        with self._lock:
            return next((connection for connection in self._connections if connection.pointer == pointer), None)

    def _fail(self, failure: ProxyFailure) -> None:
        if self._on_failure is not None:
            self._on_failure(failure)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the proxy service is closed")

    @contextlib.contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """No worker looks at rings or tables within the block, so that entries can be changed which triggers may name.

        Raises:
            ResourceError: they did not come to rest in time.
        """
        deadline = time.monotonic() + timeout
        asked = [lib.proxyccl_worker_pause(worker.pointer) for worker in self._workers]
        try:
            for worker, number in zip(self._workers, asked, strict=True):
                while lib.proxyccl_worker_paused(worker.pointer) != number and not worker.ended.is_set():
                    if time.monotonic() >= deadline:
                        raise ResourceError(f"a proxy thread did not come to rest within {timeout:g} s")
                    time.sleep(_DRAIN_LOOK)
            yield
        finally:
            for worker in self._workers:
                lib.proxyccl_worker_resume(worker.pointer)

    def drain(self, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until what the rings held is done and nothing is outstanding. The workers go on.

        Args:
            timeout: in seconds.
            given_up: asked meanwhile; once it is true nobody need wait.

        Returns:
            False if that did not come to be.
        """
        with self._lock:
            if self._closed:
                return False
            asked = [lib.proxyccl_worker_drain(worker.pointer) for worker in self._workers]
        deadline = time.monotonic() + timeout
        for worker, number in zip(self._workers, asked, strict=True):
            while lib.proxyccl_worker_drained(worker.pointer) != number:
                if worker.ended.is_set() or given_up() or time.monotonic() >= deadline:
                    return False
                time.sleep(_DRAIN_LOOK)
        return True

    def close(self, timeout: float = 30.0, *, drained: bool = True) -> bool:
        """Ends the workers and frees everything.

        Args:
            timeout: in seconds, for each worker.
            drained: empty the rings first, and wait until nothing is outstanding.

        Returns:
            False if a worker did not end in time. What it uses is then kept, and another call waits for it again.
        """
        with self._lock:
            if self._freed:
                return True
            first, self._closed = not self._closed, True
        if first:
            if self._published is not None:
                publications.withdraw(self._published)
            for worker in self._workers:
                (lib.proxyccl_worker_stop if drained else lib.proxyccl_worker_abandon)(worker.pointer)
        ended = [worker.ended.wait(0 if worker.thread.is_current else timeout) for worker in self._workers]
        # One that was asked in vain is not waited for a second time.
        closed = [thread.close(timeout if ended[i] else 0) for i, thread in enumerate(self._owned_threads)]
        with self._lock:
            if self._freed or not all(ended) or not all(closed):
                return self._freed
            self._freed = True
        for connection in self._connections:
            lib.proxyccl_connection_destroy(connection.pointer)
            for resource in connection.owned:
                with contextlib.suppress(ProxyCCLError):
                    resource.synchronize()  # the memory that its copies use may go next
                with contextlib.suppress(ProxyCCLError):
                    resource.close()
        for worker in self._workers:
            lib.proxyccl_worker_destroy(worker.pointer)
        lib.proxyccl_service_destroy(self._service)
        self._observed.close()
        for ring in self._rings:
            ring.close()
        return True
