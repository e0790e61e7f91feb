"""The proxy service: rings, the workers that drain the rings, and tables of the ids that triggers name.

A service runs in a rank's process with its own threads, or in the node daemon on shared threads. This module does not
know about collectives.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, ResourceError
from proxyccl.device.process import forks
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.device.sleepers import Sleepers
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import Connection, HandleProvider, Handler, ProxyFailure, Signals, issue_warning
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description, Publication
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.placement import Place
from proxyccl.proxy.remote_options import RemoteSetup, TransportOptions
from proxyccl.proxy.ring import Fifo, Ring
from proxyccl.proxy.schedule import Schedule, ScheduleWait
from proxyccl.proxy.service_remote import ServiceRemote
from proxyccl.proxy.shared_words import ProxyWords, SharedWords, TurnWatch
from proxyccl.proxy.tables import ChannelTable, MemoryTable, ScheduleTable
from proxyccl.proxy.thread import IdlePolicy, ProxyThread, created
from proxyccl.proxy.transports.rails import RailWatch, WatchedConnection
from proxyccl.proxy.transports.table import find_copying_transport, find_transport
from proxyccl.proxy.transports.transport import EngineConnection, EngineRuntime
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES, Operation, Trigger
from proxyccl.proxy.workers import OwnThreads, WireWorkers, Worker, Workers, require_rings

ffi, lib = _engine.ffi, _engine.lib


def require_callable(handler: object) -> None:
    """Raises ArgumentError unless `handler` is callable."""
    if not callable(handler):
        raise ArgumentError("handler", f"must be callable, not {type(handler).__name__}")


class ProxyService(ProxyWords):
    """Drains rings, and issues the operations of the rings' triggers. A communicator has a `ProxyService` in its
    process, or a `DaemonClient` with the same methods. Callers pass both an address (in the caller's process) and a
    handle of memory: a `ProxyService` uses the address, and the daemon opens the handle.

    Args:
        runtime: the runtime whose driver issues the service's copies.
        control: address of the ProxycclControl, whose abort word stops the workers.
        shared: zeroed pinned memory that contains the `SharedWords`, which have `shared_bytes()` bytes, and the words
            that peers on other hosts signal.
        shared_offset: offset of the `SharedWords` in `shared`, in bytes.
        semaphores_offset: offset in `shared` of the words that peers signal, by channel id; None for a service without
            schedules.
        fifos: number of rings.
        threads: number of workers, each with its own thread. Rings are assigned to workers round-robin.
        fifo_size: slots in each ring.
        idle: the idle policy that the service requires; None for `IdlePolicy()` or, with `shared_threads`, the policy
            of these threads. A shared thread uses the most aggressive policy of its services.
        cores: cores that the threads may run on; None for any core.
        shared_threads: one thread for each worker, shared with other services; empty to create threads.
        rings: existing rings, which `close` closes; empty to create rings.
        ring_per_connection: whether all channels of a connection share a ring. If True, connections are assigned to
            rings round-robin; if False, channels are.
        on_failure: called in a worker's thread when an error ends the worker.
        on_warning: called with a text in a thread of the service to warn the program; must not wait.
        description: the service's description for observers; None to hide the service from observers.
        name: the prefix of the threads' names.
        sleepers: the `Sleepers` to which the threads are added; None to create a `Sleepers`.
        started: whether to call `start`.

    Attributes:
        sleepers: the service's threads, which kernel launches wake.
        publication: the service's publication for observers; None without a description.
        handling: the running handlers: for each handler's channel, the time.monotonic() at which the handler began.

    Raises:
        ArgumentError: there are fewer rings than threads, a ring size is not a power of two, or a core does not exist.
    """

    def __init__(
        self,
        runtime: Runtime,
        control: int,
        shared: PinnedMemory,
        *,
        shared_offset: int = 0,
        semaphores_offset: int | None = None,
        fifos: int = 1,
        threads: int = 1,
        fifo_size: int = 8192,
        idle: IdlePolicy | None = None,
        cores: Collection[int] | None = None,
        shared_threads: Sequence[ProxyThread] = (),
        rings: Sequence[Ring] = (),
        ring_per_connection: bool = False,
        on_failure: Callable[[ProxyFailure], None] | None = None,
        on_warning: Callable[[str], None] = issue_warning,
        description: Description | None = None,
        name: str = "proxyccl",
        sleepers: Sleepers | None = None,
        started: bool = True,
    ) -> None:
        threads, fifos = len(shared_threads) or threads, len(rings) or fifos
        fifos, threads = require_rings(fifos, threads)
        self.runtime = runtime
        self._engine = EngineRuntime(runtime)
        self.words = SharedWords(shared, shared_offset)
        self._on_failure = on_failure
        self._on_warning = on_warning
        self._handlers: dict[int, Handler] = {}  # by channel
        self.handling: dict[int, float] = {}
        self._connections: list[Connection] = []
        self.engine_connections: list[EngineConnection] = []  # by number
        self._closed = self._freed = False
        self._process = forks.here()
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            self.fifos: list[Fifo] = []
            for _ in range(0 if rings else fifos):
                self.fifos.append(Fifo(runtime, fifo_size))
                undo.callback(self.fifos[-1].close)
            self._rings: Sequence[Ring] = rings or self.fifos
            made = lib.proxyccl_service_create(ffi.cast("ProxycclControl *", control), self.words.table)
            self._service = created(made, "a proxy service")
            undo.callback(lib.proxyccl_service_destroy, self._service)
            self._observed = ObservedSegment(threads)
            undo.callback(self._observed.close)
            own = OwnThreads(threads, idle or IdlePolicy(), cores, name)
            self._workers = Workers(self._engine, self._service, self._observed, shared_threads or own, idle)
            undo.callback(self._workers.discard)
            self._workers.add_rings(self._rings)
            self._memories = MemoryTable(self._service, self.words)
            semaphores = None if semaphores_offset is None else shared.host_ptr + semaphores_offset
            self._schedules = ScheduleTable(self._service, self.words, semaphores)
            self._turns, self._turns_missed = TurnWatch(self.words.schedule_words, threads), False
            self._channels = ChannelTable(
                self._service,
                self.words,
                self._observed,
                rings=len(self._rings),
                workers=threads,
                ring_per_connection=ring_per_connection,
            )
            self.publication = self._describe(description) if description else None
            self._published = publications.try_publish(self.publication) if self.publication else None
            undo.pop_all()  # no later step can fail
        self._wires: WireWorkers | None = None
        self._rails: RailWatch | None = None
        self._control, self._cores, self._name = control, cores, name
        self.sleepers = sleepers or Sleepers()
        for word in self._workers.asleep:
            self.sleepers.add(word)
        if started:
            self.start()

    def start(self) -> None:
        """Lets the workers drain the rings. Call this method once."""
        self._workers.start(self._worker_event, self._thread_lost)

    def _describe(self, description: Description) -> Publication:
        return Publication.of_this_process(
            description,
            self.runtime.name,
            workers=len(self._workers),
            observed=self.observed_handle.hex(),
            counters=self.words.counters_handle.hex(),
            rings=tuple(
                publications.RingPlace(ring.pinned.handle.hex(), i % len(self._workers), ring.size_log2)
                for i, ring in enumerate(self._rings)
            ),
        )

    @staticmethod
    def shared_bytes() -> int:
        """Returns the size of a service's shared memory, in bytes."""
        return SharedWords.BYTES

    def __repr__(self) -> str:
        rings, threads, channels = len(self._rings), len(self._workers), len(self._channels)
        return f"<ProxyService with {rings} rings, {threads} threads, {channels} channels>"

    def add_memory(
        self,
        base: int,
        nbytes: int,
        keys: Sequence[int] = (),
        *,
        handle: HandleProvider | None = None,
        first: int | None = None,
    ) -> int:
        """Registers memory under a free id, or under several consecutive ids if the memory is longer than 4 GiB.

        Args:
            base: the memory's address in the caller's process.
            nbytes: the memory's size.
            keys: the memory's keys in this rank's requests on remote transports, by network adapter; () if the memory
                has no keys.
            handle: returns the handle with which another process opens the memory; a `ProxyService` does not call this
                function.
            first: the first of the ids, which must be free; None to choose free ids.

        Returns:
            The first of the memory's ids.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ResourceError: no ids are left.
        """
        with self._open():
            return self._memories.add(base, nbytes, keys, first=first)

    def add_pinned_memory(self, memory: PinnedMemory, *, first: int | None = None) -> int:
        """Registers pinned memory: this rank's own memory, or a peer's memory that this process has opened.

        If the source and the destination of a put are both registered by this method, and the put has at most
        `PROXYCCL_CPU_COPY_BYTES` bytes (copy_transport.h), the CPU makes the copy, in less time than a copy engine
        would take. Remote links cannot use the returned id.

        Args:
            memory: the memory, which must stay open until `remove_memory`.
            first: see `add_memory`.

        Returns:
            The first of the memory's ids.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ClosedError: the memory is closed.
            ResourceError: no ids are left.
        """
        if memory.closed:
            raise ClosedError("the memory is closed")
        with self._open():
            return self._memories.add(memory.ptr, memory.nbytes, host=memory.host_ptr, first=first)

    def add_remote_memory(self, address: int, nbytes: int, keys: Sequence[int], *, first: int | None = None) -> int:
        """Registers this rank's or a peer's memory for remote transports, by the memory's address and keys.

        The engine refuses triggers of channels that copy within the host and name this memory. Returns the first id:
        `first`, or any id.

        Raises:
            ResourceError: no ids are left.
        """
        with self._open():
            return self._memories.add(address, nbytes, keys, remote_only=True, first=first)

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Frees a memory's ids. Triggers must no longer name these ids."""
        with self._lock:
            if not self._closed and self._process.is_here:
                self._memories.remove(first, nbytes)

    def connect_copy(self, *, peer: int | None = None, transport: str = "copy", private: bool = False) -> Connection:
        """Returns a new connection that copies within the host.

        Args:
            peer: the rank at the other end, for errors.
            transport: name of a transport that copies within a host.
            private: whether the connection's channels copy from memory that only the caller's process can access; a
                `ProxyService` ignores this argument.

        Raises:
            ArgumentError: the transport is remote, or does not exist.
            ResourceError: the worker has no room for another connection.
        """
        return self.connect(find_copying_transport(transport).name, None, peer=peer)

    def connect(self, transport: str, options: Any, *, peer: int | None = None) -> Connection:
        """Returns a new connection over any transport.

        Objects that the options name, such as a queue pair, must outlive the service. For a remote transport, register
        memories with their keys (`add_remote_memory`), and name a peer's memory (also in `set_channel`) by the address
        that the peer's device uses.

        Args:
            transport: the transport's name.
            options: the transport's own options: a C struct or `StagedOptions`; None for a transport within a host.
            peer: the rank at the other end, for errors.

        Raises:
            ArgumentError: an option is out of range (the error names it), or there is no such transport.
            RuntimeUnavailableError: this build lacks the transport.
            ResourceError: the worker has no room for another connection.
        """
        return self._add_connection(transport, find_transport(transport).connect(self._engine, options), peer)

    def open_remote(
        self,
        options: TransportOptions,
        signals: range,
        *,
        near: Place,
        local_rank: int,
        core_share: int,
    ) -> ServiceRemote:
        """Returns the object that opens the rank's remote links. Call this method once, and close the result after
        closing the proxy.

        Args:
            options: the network device to use, and the device's settings.
            signals: byte range, in the control segment, of the words that peers' proxies may signal.
            near: the place that the device should be near.
            local_rank: the rank's number on its host.
            core_share: cores that the rank's threads may keep busy.

        Raises:
            ArgumentError: `signals` is not within the control segment.
        """
        setup = RemoteSetup(self.runtime, self.words.memory, signals, near, local_rank, core_share, self._on_warning)
        return ServiceRemote(self.connect, setup, options)

    def _add_connection(self, transport: str, made: EngineConnection, peer: int | None) -> Connection:
        try:
            with self._open():
                if made.wires and self._wires is None:
                    table, told, lost = self.words.table, self._worker_event, self._thread_lost
                    place = self._cores, self._name
                    self._wires = WireWorkers(self._engine, self._control, table, made.ends, *place, told, lost)
                worker = len(self._connections) % len(self._workers)
                connection = Connection(len(self._connections), worker, peer, transport)
                number = connection.number // len(self._workers)
                if number == lib.PROXYCCL_MAX_CONNECTIONS:
                    raise ResourceError(f"a proxy thread serves at most {number} connections")
                self._observed.add_connection(worker, number, peer, transport)
                if self._wires is not None:
                    self._wires.add(made.wires)
                lib.proxyccl_worker_add_connection(self._workers[worker].pointer, made.pointer)  # has room
                stats = self._observed.worker(worker).connections[number]
                adapters = {each.rail.adapter for each in made.watched}
                stats.rails = stats.rails_up = len(adapters) or made.rails
                if made.watched:
                    status_text = find_transport(transport).status_text
                    self._rails = self._rails or RailWatch(status_text, self._on_warning, self._name)
                    self._rails.add(WatchedConnection(made.watched, stats, peer))
                self._connections.append(connection)
                self.engine_connections.append(made)
        except ProxyCCLError:
            lib.proxyccl_connection_destroy(made.pointer)
            for resource in made.owned:
                resource.close()
            raise
        return connection

    def reserve_channel(self, connection: Connection, channel: int | None = None) -> int:
        """Reserves a channel id for a connection. The engine refuses triggers on the channel until `set_channel`.

        Args:
            connection: the connection.
            channel: the id to reserve, which must be free; None for any id.

        Raises:
            ResourceError: all 1024 channel ids are in use.
        """
        with self._open():
            return self._channels.reserve(connection.worker, channel, connection=connection.number)

    def set_channel(
        self,
        channel: int,
        connection: Connection,
        remote_semaphore: int,
        *,
        handle: HandleProvider | None = None,
        signals: Signals = (0, 0),
    ) -> None:
        """Puts a reserved channel in use.

        Args:
            channel: the channel's id.
            connection: the connection that the channel was reserved for.
            remote_semaphore: address of the peer's word that counts the channel's signals, in the form that the
                transport uses.
            handle: returns the handle with which another process opens this word; a `ProxyService` does not call this
                function.
            signals: the result of `signals` in the service from which this service takes over the channel.
        """
        with self._open():
            pointer = self.engine_connections[connection.number].pointer
            self._channels.set_connection(channel, connection, pointer, remote_semaphore, signals)

    def signals(self, channel: int) -> Signals:
        """Returns the counts of a channel's two words (ProxycclSignals), with which another service can take over the
        channel. The rings must be drained.
        """
        with self._open():
            return self._channels.signals(channel)

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Frees channel ids of a connection. All triggers of these channels must be drained, and peers must no longer
        signal on the channels.
        """
        with self._lock:
            if not self._closed and self._process.is_here:
                self._channels.free(channels)

    def add_schedule(self, schedule: Schedule, number: int | None = None) -> int:
        """Adds a schedule, which streams may then start. The schedule's channels must have connections of this proxy.
        Returns the schedule's number, which is at least 1: `number`, which must be free, or any number.

        Raises:
            ArgumentError: an id is out of range, or a send names no destination.
            ResourceError: no numbers are left.
        """
        with self._open():
            return self._schedules.add(schedule, number)

    def remove_schedule(self, number: int) -> None:
        """Frees a schedule, which streams must no longer start. Raises ResourceError if the schedule is running."""
        with self._lock:
            if not self._closed and self._process.is_here:
                self._schedules.remove(number)

    def check_turns(self, timeout: float) -> None:
        """Fails the proxy if a stream has waited `timeout` seconds for a schedule and a worker has not polled its
        rings.

        Without this check, the stream would wait forever. A worker does not poll while its process is stopped, a driver
        call does not return, or a Python handler runs. A worker that waits for a peer keeps polling, and has its own
        time-out.

        Args:
            timeout: the longest wait, in seconds. One thread calls this method every few milliseconds.
        """
        if self._turns.look_for_streams() <= timeout or self._turns_missed:
            return
        self._turns_missed = True
        began = self.handling
        slowest = min(began, key=began.__getitem__, default=None)
        what = "a call of the driver does not return"
        if slowest is not None:
            what = f"it has run for {time.monotonic() - began[slowest]:.1f} s"
        reason = f"{what}, and a stream has waited for {timeout:g} s"
        self._fail(ProxyFailure(native.PROXYCCL_ERROR_PROXY_LOST, slowest, None, errno.ETIMEDOUT, reason))

    def stopped(self) -> str:
        """Returns an explanation if a signal has stopped the proxy's process, else "". A `ProxyService` returns "",
        because it runs in the caller's process.
        """
        return ""

    def add_handler(self, handler: Handler, channel: int | None = None) -> int:
        """Makes a channel whose triggers, of any operation, are passed to a Python function in the worker's thread.

        Later triggers of the ring wait until the handler returns. If the handler raises, a HandlerError ends the
        communicator.

        Args:
            handler: called with each trigger.
            channel: the id to reserve, which must be free; None for any id.

        Returns:
            The channel id.

        Raises:
            ArgumentError: the handler can't be called.
            ResourceError: all 1024 channel ids are in use.
        """
        require_callable(handler)
        with self._open():
            channel, worker = self._channels.reserve_for_handler(channel)
            self._handlers[channel] = handler
            self._channels.set_handler(channel, worker)
        return channel

    def reserve_elsewhere(self, channel: int | None = None) -> int:
        """Reserves a channel id (`channel`, which must be free, or any id) for a service in a client's process. The
        daemon calls this method, so that the daemon's service and the client's service use different ids.
        """
        with self._open():
            return self._channels.reserve(0, channel)

    def fifo_for(self, channel: int) -> Fifo:
        """Returns the ring to which a channel's triggers are pushed."""
        return self.fifos[self._channels.ring_of(channel)]

    def ring_of(self, channel: int) -> int:
        """Returns the number of the ring to which a channel's triggers are pushed."""
        return self._channels.ring_of(channel)

    def outstanding(self, channel: int) -> int | None:
        """Returns, for a channel's connection, the number of triggers and of schedules' sends that are not known to be
        complete. Returns None for a handler's channel, or if this process can't read the number.
        """
        with self._open():
            return self._observed.outstanding(channel)

    def schedule_waits(self) -> list[ScheduleWait]:
        """Returns the waits of schedules that make no progress, or that a failure has stopped; an empty list if this
        process can't read the waits.
        """
        with self._open():
            return self._observed.schedule_waits()

    @property
    def ended(self) -> list[bool]:
        """For each worker, whether it has ended."""
        return self._workers.ended

    @property
    def observed_handle(self) -> bytes:
        """The handle with which other processes open this service's `ObservedSegment`."""
        return self._observed.memory.handle

    @property
    def asleep_handles(self) -> list[bytes]:
        """The handles with which other processes open the words that wake this service's threads."""
        return [word.handle for word in self._workers.asleep]

    @property
    def rings(self) -> list[Fifo]:
        """The rings to which kernels of this process push triggers."""
        return self.fifos

    def _worker_event(self, worker: Worker, reason: int, info: Any) -> None:
        """Calls a handler or reports a failure, in the worker's thread, when the engine returns for the worker."""
        if reason == lib.PROXYCCL_EXIT_HANDLER:
            self._handle(worker, info)
        elif reason == lib.PROXYCCL_EXIT_ERROR:
            self._fail(self._failure(info))

    def _thread_lost(self, error: BaseException) -> None:
        reason = f"its proxy's thread has failed: {type(error).__name__}: {error}"
        self._fail(ProxyFailure(native.PROXYCCL_ERROR_LOCAL, None, None, 0, reason, error))

    def _handle(self, worker: Worker, info: Any) -> None:
        channel, words = info.channel, (info.trigger.word0, info.trigger.word1)
        error: BaseException | None = None
        self.handling[channel] = time.monotonic()
        try:
            self._handlers[channel](Trigger.decode(*words))
        except BaseException as raised:  # also catches SystemExit, which would end this thread and therefore the proxy
            error = raised
        finally:
            del self.handling[channel]
        if error is None:
            lib.proxyccl_worker_handled(worker.pointer)
            return
        self.words.table[channel].errors += 1
        reason = f"{type(error).__name__}: {error}"
        self._fail(ProxyFailure(native.PROXYCCL_ERROR_HANDLER, channel, words, 0, reason, error))
        lib.proxyccl_worker_abandon(worker.pointer)

    def _failure(self, info: _engine.ProxycclExitInfoPointer) -> ProxyFailure:
        of_trigger = info.channel < MAX_CHANNELS
        connection = self._connection_at(info.connection)
        reason = ffi.string(info.reason).decode() if info.reason else ""
        if connection is not None and info.code == native.PROXYCCL_ERROR_TRANSPORT:
            transport = find_transport(connection.transport)
            message = ffi.string(lib.proxyccl_connection_error_text(info.connection)).decode(errors="replace")
            meaning = filter(None, (transport.status_text(info.status), message))
            reason = ": ".join((reason, *meaning))
        words, offset = None, 0
        if of_trigger:
            words = info.trigger.word0, info.trigger.word1
            trigger = Trigger.decode(*words)
            offset = trigger.src_offset if info.of_source else trigger.dst_offset
            if info.code == native.PROXYCCL_ERROR_BAD_TRIGGER and trigger.operation & Operation.DATA:
                source = "a value"
                if trigger.value is None:
                    source = self._place(trigger.src_memory, trigger.src_offset)
                destination = self._place(trigger.dst_memory, trigger.dst_offset)
                reason += f" (source: {source}; destination: {destination})"
        return ProxyFailure(
            code=info.code,
            channel=info.channel if of_trigger else None,
            words=words,
            status=info.status,
            reason=reason,
            peer=connection.peer if connection is not None else None,
            schedule=info.schedule,
            wait=info.wait,
            offset=offset,
        )

    def _place(self, memory: int, offset: int) -> str:
        nbytes = self.words.memory_limits[memory] if memory < MAX_MEMORIES else 0
        return f"memory id {memory}{f' of {nbytes} bytes' if nbytes else ''}, offset {offset}"

    def _connection_at(self, pointer: _engine.ProxycclConnectionPointer) -> Connection | None:
        with self._lock:
            pairs = zip(self._connections, self.engine_connections, strict=True)
            return next((connection for connection, made in pairs if made.pointer == pointer), None)

    def _fail(self, failure: ProxyFailure) -> None:
        if self._on_failure is not None:
            self._on_failure(failure)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """A context manager that holds the lock, so that `close` does not free memory that the tables use. Raises
        ClosedError if the service is closed.
        """
        with self._lock:
            self._process.require("the proxy service")
            if self._closed:
                raise ClosedError("the proxy service is closed")
            yield

    def paused(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        """A context manager that pauses the workers. No paused worker reads rings or tables, so the caller may change
        table entries that triggers name.

        Raises:
            ResourceError: a worker did not pause in time.
        """
        return self._workers.paused(timeout)

    def drain(self, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all triggers in the rings have been executed and no transfer is outstanding. The workers keep
        running.

        Args:
            timeout: in seconds.
            given_up: a function that is polled during the wait; the wait ends when it returns True.

        Returns:
            False if the wait ended before the rings were drained.
        """
        self._process.require("the proxy service")
        with self._lock:
            if self._closed:
                return False
            asked = self._workers.ask_to_drain()
        return self._workers.await_drained(asked, timeout, given_up)

    def close(self, timeout: float = 30.0, *, drained: bool = True) -> bool:
        """Stops the workers and frees all memory and connections of the service.

        Args:
            timeout: seconds to wait for each worker.
            drained: whether the workers first empty their rings and complete outstanding work.

        Returns:
            False if a worker did not end in time; then the service keeps its memory, and another call of `close` waits
            again.
        """
        if not self._process.is_here:  # this process is a forked child, and the workers belong to the parent
            return True
        with self._lock:
            if self._freed:
                return True
            first, self._closed = not self._closed, True
        if first:
            if self._published is not None:
                publications.withdraw(self._published)
            self._workers.stop(drained=drained)
        ended = self._workers.await_ended(timeout)
        with self._lock:
            if ended and self._wires is not None and self._wires.close(timeout):
                self._wires = None
            if ended and self._rails is not None and self._rails.close(timeout):
                self._rails = None
            if self._freed or not ended or self._wires is not None or self._rails is not None:
                return self._freed
            self._freed = True
        for made in self.engine_connections:
            lib.proxyccl_connection_destroy(made.pointer)
            for resource in made.owned:
                with contextlib.suppress(ProxyCCLError):
                    resource.synchronize()  # waits for copies, because the caller may free their memory next
                with contextlib.suppress(ProxyCCLError):
                    resource.close()
        lib.proxyccl_service_destroy(self._service)
        self._engine.close()
        self._observed.close()
        for ring in self._rings:
            ring.close()
        return True
