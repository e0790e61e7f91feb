"""A rank's proxy in the node daemon: an object with the methods of a `ProxyService`, which send requests to the daemon.

Rings, counters and memories belong to this process, which sends the daemon their descriptors and handles. A
`ProxyService` in this process does the work that the daemon can't do: Python handlers, and copies from memory that no
other process can map.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.device._native import lib as native
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, ProxyLostError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.device.sleepers import Sleepers
from proxyccl.proxy.daemon.connection import DaemonConnection
from proxyccl.proxy.daemon.hello import DaemonAddress
from proxyccl.proxy.daemon.session import Session
from proxyccl.proxy.daemon.session_service import ServiceOptions, SessionService
from proxyccl.proxy.interface import Connection, ExposedMemory, HandleProvider, Handler, Keys, ProxyFailure, Signals
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.placement import Place
from proxyccl.proxy.remote_options import TransportOptions
from proxyccl.proxy.ring import Fifo, require_ring_size
from proxyccl.proxy.schedule import Schedule, ScheduleWait
from proxyccl.proxy.service import ProxyService, require_callable
from proxyccl.proxy.service_remote import ServiceRemote
from proxyccl.proxy.shared_words import ProxyWords, SharedWords, TurnWatch
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.transports.table import find_transport
from proxyccl.proxy.workers import require_rings

P = ParamSpec("P")
R = TypeVar("R")


def _asks(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    def ask(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = client._daemon.ask(function, *args, **kwargs)
        return result

    return ask


class _Made(Struct, eq=False):
    """An object that the daemon has made for a client."""

    make: Callable[[], object]  # makes the object in another daemon, under its number
    # Registers the object, which is memory for copies, also with the service in this process.
    repeat: Callable[[ProxyService], object] | None = None
    # Whether the memory could not be mapped after `resume`, because its owner had freed or suspended it.
    unmapped: bool = False


class DaemonRemote:
    """A rank's remote links in the daemon. See `ServiceRemote` for the methods."""

    def __init__(self, daemon: DaemonConnection) -> None:
        self._daemon = daemon

    unsupported_reason = _asks(SessionService.unsupported_reason)
    make_endpoint = _asks(SessionService.make_endpoint)
    connect_endpoint = _asks(SessionService.connect_endpoint)
    open_connection = _asks(SessionService.open_connection)

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> ExposedMemory:
        if not handle:
            raise ArgumentError("memory", "the node daemon reaches memory only by a handle, and this memory has none")
        return self._daemon.ask(SessionService.expose, handle, nbytes, transport)

    def expose_pinned(self, memory: PinnedMemory, transport: str) -> ExposedMemory:
        return self._daemon.ask(SessionService.expose_pinned, memory.handle, transport)

    def withdraw(self, memory: ExposedMemory) -> None:
        self._daemon.ask(SessionService.withdraw, memory.owner)

    def close(self) -> None:
        """Does nothing, because the daemon frees remote links when it frees the proxy."""


class DaemonClient(ProxyWords):
    """A rank's proxy in a daemon. See `ProxyService` for the methods, and for the arguments that are not listed. Raises
    ArgumentError if there are fewer rings than threads, or the daemon can't access the device, and
    RuntimeUnavailableError if there is no daemon, or the daemon does not accept this process.

    Args:
        runtime: the runtime of the rank's kernels.
        shared: pinned memory that begins with the ProxycclControl whose abort word ends the workers.
        threads: number of workers. Each worker has its own thread of the daemon if the daemon has enough threads.
        idle: the idle policy of the proxy's threads, in the daemon and in this process; with None, the daemon chooses
            the policy for its threads, and this process uses `IdlePolicy()`.
        on_failure: called when an error ends a worker and when the daemon is lost, in a thread that this object
            started.
        timeout: returns the seconds that the daemon may take for an answer.
        address: the daemon's address; None for the node daemon at the default socket.
        takes_private: whether a service in this process copies from memory that the daemon can't map, or refuses it.
    """

    def __init__(
        self,
        runtime: Runtime,
        shared: PinnedMemory,
        *,
        shared_offset: int,
        semaphores_offset: int,
        fifos: int = 1,
        threads: int = 1,
        fifo_size: int = 8192,
        ring_per_connection: bool = False,
        idle: IdlePolicy | None = None,
        on_failure: Callable[[ProxyFailure], None],
        name: str = "proxyccl",
        description: Description | None = None,
        timeout: Callable[[], float] = lambda: 30.0,
        address: DaemonAddress | None = None,
        takes_private: bool = False,
    ) -> None:
        fifos, threads = require_rings(fifos, threads)
        fifo_size = require_ring_size(fifo_size)
        self._runtime = runtime
        self._segment = shared
        self.words = SharedWords(shared, shared_offset)
        self._threads = threads
        self.sleepers = Sleepers()  # the proxy's threads, which kernel launches wake
        self._turns = self._watch_turns()
        self._on_failure, self._not_resumed = on_failure, ""
        self._own_options: dict[str, Any] = {
            "fifos": fifos,
            "threads": threads,
            "fifo_size": fifo_size,
            "ring_per_connection": ring_per_connection,
            "idle": idle,
            "on_failure": on_failure,
            "description": description,
            "name": name,
            "sleepers": self.sleepers,
        }
        self._own: ProxyService | None = None  # serves memory and channels under ids that the daemon assigned
        self._own_words: PinnedMemory | None = None
        self._own_channels: set[int] = set()
        self._spare_channels: list[int] = []  # ids that the daemon reserved for this process and that no channel uses
        self._takes_private = takes_private
        self._ring_of: dict[int, int] = {}
        self._lock = threading.RLock()
        self._connecting = threading.RLock()  # held while the connection to the daemon changes
        self._observed: ObservedSegment | None = None
        self._awake: list[SharedMemory] = []  # the words that wake the daemon's threads
        self._made: dict[tuple[str, int], _Made] = {}  # by kind and number, in the order of their making
        self._signals: dict[int, Signals] = {}  # by channel, while this client is suspended
        self._closed = False
        self.fifos = [Fifo(runtime, fifo_size) for _ in range(fifos)]
        self._connect = functools.partial(DaemonConnection, timeout, name, on_failure, self._watch_turns, address)
        self._options = ServiceOptions(
            runtime.name,
            runtime.device_id,
            fifo_size,
            threads,
            shared_offset,
            description,
            semaphores_offset,
            ring_per_connection,
            idle.times if idle is not None else None,
        )
        try:
            self._open()
        except ProxyCCLError:
            self._free()
            raise

    def _open(self) -> None:
        """Connects to the daemon, and makes this client's objects there."""
        self._daemon = self._connect()
        try:
            descriptors = [self._segment.descriptor, *(fifo.pinned.descriptor for fifo in self.fifos)]
            observed, asleep = self._daemon.ask(Session.open, descriptors, self._options)
            self._observed = _open_observed(observed, self._threads)
            self._awake = _open_words(asleep)
            for word in self._awake:
                self.sleepers.add(word)
            for made in list(self._made.values()):
                made.unmapped = False
                made.make()
            self._daemon.ask(SessionService.start)
        except BaseException:
            self._daemon.hang_up()
            raise

    def _ask(self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._connecting:  # waits for `resume`
            daemon = self._daemon
        try:
            return daemon.ask(function, *args, **kwargs)
        except ClosedError:
            if self._not_resumed:
                raise ProxyLostError(self._not_resumed, operation=function.__name__) from None
            raise

    def _make(self, kind: str, make: Callable[[int | None], int]) -> int:
        """Makes an object in the daemon. `make` makes the object with the given number, or with any number, and returns
        the number.
        """
        with self._connecting:
            number = make(None)
            self._made[kind, number] = _Made(functools.partial(make, number))
            return number

    def _release(self, kind: str, number: int, function: Callable[[Any, int], None]) -> None:
        """Frees an object in the daemon by a method that takes the object's number."""
        with self._connecting:  # the object might else be made anew after its release
            self._ask(function, number)
            self._made.pop((kind, number), None)

    def suspend(self, timeout: float) -> None:
        """Makes the daemon free all of this client's objects, and disconnects, until `resume`. A job's own daemon ends
        if it has no other clients. Kernels and streams must not use the proxy meanwhile.

        Raises:
            ProxyLostError: the daemon is lost.
            ResourceError: outstanding work did not end within `timeout` seconds.
        """
        with self._connecting:
            self._signals = self._daemon.ask(Session.suspend, timeout)
            self._observed = None  # not closed, because a running report may still read it
            self._daemon.hang_up()
            self.sleepers.remove(self._awake)

    def resume(self, begun: threading.Event) -> None:
        """Connects to the daemon again, and makes this client's objects there, under their former numbers. Kernels and
        streams may use the proxy meanwhile; their triggers wait in the rings. If this fails, the daemon counts as lost.

        Args:
            begun: set as soon as other threads' calls of methods wait until this call returns.
        """
        with self._connecting:
            begun.set()
            if self._closed:
                return
            try:
                self._open()
                self._signals = {}
            except Exception as error:  # whatever it is, the group must not wait for this proxy
                self._not_resumed = f"the proxy did not start again: {type(error).__name__}: {error}"
                failure = ProxyFailure(native.PROXYCCL_ERROR_PROXY_LOST, None, None, 0, self._not_resumed)
                self._on_failure(failure)

    @property
    def daemon(self) -> int:
        """The daemon's process id."""
        return self._daemon.daemon

    @property
    def daemon_started(self) -> int | None:
        return self._daemon.daemon_started

    def request_report(self, cause: str) -> None:
        """See `DaemonConnection.request_report`."""
        self._daemon.request_report(cause)

    def stopped(self) -> str:
        return self._daemon.stopped()

    def __repr__(self) -> str:
        return f"<DaemonClient of process {self.daemon} at {self._daemon.address}, {len(self.fifos)} rings>"

    def _watch_turns(self) -> TurnWatch:
        return TurnWatch(self.words.schedule_words, self._threads)

    def _words_of(self, channel: int) -> SharedWords:
        own = self._own if channel in self._own_channels else None
        return self.words if own is None else own.words

    def fifo_for(self, channel: int) -> Fifo:
        if self._own is not None and channel in self._own_channels:
            return self._own.fifo_for(channel)
        return self.fifos[self._ring_of[channel]]

    @property
    def rings(self) -> list[Fifo]:
        return [*self.fifos, *(self._own.rings if self._own is not None else ())]

    @property
    def handling(self) -> dict[int, float]:
        return self._own.handling if self._own is not None else {}

    def outstanding(self, channel: int) -> int | None:
        self._require_open()
        if self._own is not None and channel in self._own_channels:
            return self._own.outstanding(channel)
        return None if self._observed is None else self._observed.outstanding(channel)

    def schedule_waits(self) -> list[ScheduleWait]:
        self._require_open()
        return [] if self._observed is None else self._observed.schedule_waits()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the proxy service is closed")

    def check_turns(self, timeout: float) -> None:
        """Treats the daemon as lost if a stream awaits a schedule and a worker has not polled for `timeout` seconds."""
        if self._daemon.is_open and self._turns.look_for_streams() > timeout:
            self._daemon.give_up(f"has run none of the proxy for {timeout:g} s while a stream waited")

    # -- methods of the daemon ---

    def set_mapped(self, process: bytes, bases: list[int], mapped: bool) -> None:
        """See `SessionService.set_mapped`. Also maps memory that was still suspended when this client resumed. Does
        nothing if the daemon is lost.
        """
        self._ask(SessionService.set_mapped, process, bases, mapped)
        if not mapped:
            return
        with self._connecting:
            for (_, number), made in list(self._made.items()):
                if made.unmapped:
                    self._ask(SessionService.remove_memory, number)
                    made.unmapped = False
                    made.make()

    def add_schedule(self, schedule: Schedule) -> int:
        return self._make("schedule", lambda number: self._ask(SessionService.add_schedule, schedule, number))

    def remove_schedule(self, number: int) -> None:
        self._release("schedule", number, SessionService.remove_schedule)

    def add_memory(self, base: int, nbytes: int, keys: Keys = (), *, handle: HandleProvider | None = None) -> int:
        """Makes the daemon register memory. Raises ArgumentError for private memory, unless `takes_private` was set."""
        if handle is None:
            raise ArgumentError("memory", "the node daemon reaches memory only by a handle")
        add = functools.partial(self._ask, SessionService.add_remote_memory, base, nbytes, keys)
        try:
            name = handle() if nbytes else b""
            add = functools.partial(self._ask, SessionService.add_memory, name, nbytes, keys)
        except ArgumentError:  # private memory, from and to which the daemon refuses copies
            if not self._takes_private:
                raise
        first = self._register(base, nbytes, keys, add)
        self._repeat(first, lambda own: own.add_memory(base, nbytes, first=first))
        return first

    def add_remote_memory(self, address: int, nbytes: int, keys: Keys) -> int:
        add = functools.partial(self._ask, SessionService.add_remote_memory, address, nbytes, keys)
        return self._register(address, nbytes, keys, add)

    def add_pinned_memory(self, memory: PinnedMemory) -> int:
        add = functools.partial(self._ask, SessionService.add_pinned_memory, memory.handle)
        first = self._register(memory.ptr, memory.nbytes, (), add)
        self._repeat(first, lambda own: own.add_pinned_memory(memory, first=first))
        return first

    def _register(self, base: int, nbytes: int, keys: Keys, add: Callable[[int | None], int]) -> int:
        """Makes the daemon register memory. `add` registers the memory with the given first id, or with any."""

        def make(first: int | None) -> int:
            try:
                return add(first)
            except ArgumentError:
                if first is None:
                    raise
            # The memory's owner has freed the memory, or has suspended it and not resumed it yet. The ids stay reserved
            # until `remove_memory`, and the daemon refuses copies from and to this memory.
            self._made["memory", first].unmapped = True
            return self._ask(SessionService.add_remote_memory, base, nbytes, keys, first)

        return self._make("memory", make)

    def _repeat(self, first: int, add: Callable[[ProxyService], int]) -> None:
        """Also registers memory of the daemon's service with this process's service, as soon as this service exists."""
        with self._lock:
            self._made["memory", first].repeat = add
            if self._own is not None:
                add(self._own)

    def remove_memory(self, first: int, nbytes: int) -> None:
        with self._lock:
            made = self._made.get(("memory", first))
            if made is not None and made.repeat is not None:
                made.repeat = None
                if self._own is not None:
                    self._own.remove_memory(first, nbytes)
        self._release("memory", first, SessionService.remove_memory)

    def connect_copy(self, *, peer: int | None = None, transport: str = "copy", private: bool = False) -> Connection:
        """Returns a connection whose transfers are copies within the host. If `private`, a service in this process
        makes the copies, otherwise the daemon makes the copies.
        """
        if private and self._takes_private:
            return replace(self._own_service().connect_copy(peer=peer, transport=transport), private=True)
        make = functools.partial(self._ask, SessionService.connect_copy, peer, transport)
        with self._connecting:
            connection = make()
            self._made["connection", connection.number] = _Made(make)  # none is removed, so the numbers are in order
            return connection

    def _own_service(self) -> ProxyService:
        with self._lock:
            if self._own is None:
                self._own_words = self._runtime.allocate_pinned(ProxyService.shared_bytes())
                self._own = ProxyService(self._runtime, self._segment.host_ptr, self._own_words, **self._own_options)
                for made in list(self._made.values()):
                    if made.repeat is not None:
                        made.repeat(self._own)
            return self._own

    def _reserve_own(self) -> int:
        with self._lock:
            if self._spare_channels:
                return self._spare_channels.pop()
        return self._make("channel", lambda channel: self._ask(SessionService.reserve_elsewhere, channel))

    def open_remote(
        self, options: TransportOptions, signals: range, *, near: Place, local_rank: int, core_share: int
    ) -> DaemonRemote:
        self._ask(
            SessionService.open_remote,
            asdict(options.rdma),
            asdict(options.fabric),
            (signals.start, signals.stop),
            near,
            local_rank,
            core_share,
        )
        return DaemonRemote(self._daemon)

    def reserve_channel(self, connection: Connection) -> int:
        if connection.private:
            channel = self._own_service().reserve_channel(connection, self._reserve_own())
            self._own_channels.add(channel)
            return channel
        return self._make("channel", lambda channel: self._reserve(connection.number, channel))

    def _reserve(self, connection: int, channel: int | None) -> int:
        channel, ring = self._ask(SessionService.reserve_channel, connection, channel)
        if ring >= len(self.fifos):
            raise ProxyLostError(
                f"the node daemon named ring {ring}; expected one of {len(self.fifos)}", operation="channel"
            )
        self._ring_of[channel] = ring
        return channel

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: HandleProvider | None = None
    ) -> None:
        """Puts a channel in use. `handle`, or between hosts `remote_semaphore`, names the peer's count of signals."""
        if connection.private:
            self._own_service().set_channel(channel, connection, remote_semaphore)
            return
        word = b""
        if not find_transport(connection.transport).is_remote:
            if handle is None:
                raise ArgumentError("handle", "the node daemon copies to a semaphore only by a handle")
            word, remote_semaphore = handle(), 0

        def make() -> None:
            place, signals = (channel, connection.number, word, remote_semaphore), self._signals.get(channel, (0, 0))
            self._ask(SessionService.set_channel, *place, signals)

        with self._connecting:
            make()
            self._made["use of channel", channel] = _Made(make)

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        freed = list(channels)
        if not connection.private:
            with self._connecting:
                self._ask(SessionService.free_channels, freed, connection.number)
                for channel in freed:
                    for kind in ("use of channel", "channel"):
                        self._made.pop((kind, channel), None)
            return
        self._own_service().free_channels(freed, connection)
        with self._lock:
            self._own_channels.difference_update(freed)
            self._spare_channels += freed

    def add_handler(self, handler: Handler) -> int:
        """Makes a channel whose triggers go to a function in this process, through this process's rings and threads."""
        require_callable(handler)
        channel = self._reserve_own()
        self._own_service().add_handler(handler, channel)
        self._own_channels.add(channel)
        return channel

    def drain(self, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """See `ProxyService.drain`. Also returns after an abort or the loss of the daemon."""
        with self._connecting:  # waits for `resume`
            if not self._daemon.is_open or given_up():
                return False
        if self._own is not None and not self._own.drain(timeout, given_up):
            return False
        try:
            return self._ask(SessionService.drain, timeout)
        except ProxyLostError:
            return False

    def close(self, timeout: float = 30.0) -> bool:
        """Drains the rings, and makes the daemon free all of this client's objects. If a handler or a worker does not
        end in time, returns False and keeps the memory that the handler or worker uses.
        """
        with self._lock:
            own_ended = self._own is None or self._own.close(timeout)
            if own_ended and self._own_words is not None:
                self._own_words.close()
            with self._connecting:  # waits for `resume`
                if self._closed:
                    return own_ended
                self._closed = True
            try:
                ended = self._daemon.is_closed or self._daemon.close_service(timeout)
            finally:
                self._free()
            return ended and own_ended

    def _free(self) -> None:
        if self._observed is not None:
            self._observed.close()
        for fifo in self.fifos:
            fifo.close()


Proxy: TypeAlias = ProxyService | DaemonClient
"""A communicator's proxy: a service in the rank's process, or a client of a daemon."""
RemoteContext: TypeAlias = ServiceRemote | DaemonRemote


def _open_words(handles: list[bytes]) -> list[SharedMemory]:
    words = []
    try:
        for handle in handles:
            words.append(SharedMemory.open(handle))
    except ArgumentError as error:  # without these words, launches can't wake the daemon's threads
        logging.getLogger("proxyccl").warning("launches cannot wake the node daemon's threads: %s", error)
    return words


def _open_observed(handle: bytes, workers: int) -> ObservedSegment | None:
    try:
        return ObservedSegment(workers, handle.hex())
    except ArgumentError as error:  # only reports need this memory, so the error is only logged
        logging.getLogger("proxyccl").warning("reports cannot show the node daemon's outstanding work: %s", error)
        return None
