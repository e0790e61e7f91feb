"""Defines a transport's record of functions in Python; transport.h defines the engine's struct.

A transport has a file in this package, a file in the engine, and an entry in the tables of transports of Python and of
the engine. Other modules use a transport's record and never compare transports' names.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.device.ffi_types import fill, set_functions
from proxyccl.device.runtime import Event, Memory, Runtime, Stream
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo, EndpointWire
from proxyccl.proxy.registrations import Registration, RemoteDevice
from proxyccl.proxy.remote_options import RemoteSetup, TransportOptions
from proxyccl.proxy.transports.rails import Mail, Rail, WatchedRail, watched_rails

ffi, lib = _engine.ffi, _engine.lib

MAIL_BYTES = ffi.sizeof("ProxycclRailsMail")
_CUT = 128 << 10
"""Puts and gets of at least this many bytes are divided between the rails."""


class EngineRuntime:
    """A runtime, the addresses of the driver functions that the engine calls, and device memory that connections share.

    Attributes:
        functions: the addresses of the driver's functions.
        table: the same addresses as a ProxycclRuntimeTable.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.functions = functions = runtime.calls
        self.table = ffi.new("ProxycclRuntimeTable *")
        set_functions(
            ffi, self.table, functions, "copy", "write64", "write32", "event_record", "event_query", "copy_many"
        )
        self._shorts: Memory | None = None
        self._lock = threading.Lock()

    def shorts(self) -> int:
        """Returns the device address of a table of all 16-bit values in ascending order. The first call makes the
        table.
        """
        with self._lock:
            if self._shorts is None:
                import numpy as np  # imported here, because `proxyccl info` and `top` need no numpy

                table = np.arange(1 << 16, dtype=np.uint16)
                memory = self.runtime.allocate(table.nbytes)
                self.runtime.copy(memory.ptr, table.ctypes.data, table.nbytes)
                self._shorts = memory
            return self._shorts.ptr

    def close(self) -> None:
        """Frees the table that `shorts` made. No connection may still use the table."""
        with self._lock:
            if self._shorts is not None:
                self._shorts.close()
                self._shorts = None


class EngineConnection(Struct, frozen=True):
    """A new connection of the engine, and the objects that it uses."""

    pointer: Any  # a ProxycclConnection
    # The streams and events of the connection's copies, to be closed in this order after the connection is destroyed.
    owned: tuple[Stream | Event, ...] = ()
    # Pairs (number, wire), where a wire is a ProxycclConnection that a separate thread may poll. One thread polls all
    # connections' wires with the same number.
    wires: tuple[tuple[int, Any], ...] = ()
    ends: int = 0  # the number of this rank's endpoints for wires; wire numbers are below `ends`
    rails: int = 0  # the number of the connection's rails; 0 for a connection without rails
    watched: tuple[WatchedRail, ...] = ()  # the rails that can be connected again after a failure


def create(engine: EngineRuntime, transport: str, native_options: Any, *parts: Any, needs: str = "") -> Any:
    """Makes and returns a ProxycclConnection. Objects that the options refer to must outlive the connection.

    Args:
        engine: the runtime whose driver issues the connection's copies.
        parts: structs to which `native_options` points; a refused option may be in one of them.
        needs: the build requirements of the transport, and how to install them.

    Raises:
        ArgumentError: the transport refuses an option; the error names the option.
        ResourceError: out of memory.
        RuntimeUnavailableError: the engine was built without the transport.
    """
    refused = ffi.new("char **")
    pointer = lib.proxyccl_connection_create(transport.encode(), native_options, engine.table, refused)
    if pointer:
        return pointer
    if refused[0]:
        name = ffi.string(refused[0]).decode()
        value = next(getattr(each, name) for each in (native_options, *parts) if hasattr(each, name))
        raise ArgumentError(name, f"{value!r} is out of range for the transport {transport}")
    if ffi.errno == errno.ENOSYS:
        raise RuntimeUnavailableError(
            f"this build of ProxyCCL lacks the transport {transport}; build it where {needs} are installed"
        )
    raise ResourceError("out of memory for a connection")


class RailsOptions(Struct, frozen=True):
    """The options of a connection over several rails.

    Attributes:
        native: a ProxycclRailsOptions.
        options: the ProxycclVerbsOptions or ProxycclFabricOptions of each rail.
        rails: the rails, which the service watches; () if no rail can be connected again.
    """

    native: Any
    options: tuple[Any, ...]
    rails: tuple[Rail, ...] = ()

    @classmethod
    def of(
        cls,
        options: Sequence[Any],
        speeds: Sequence[int],
        rails: Sequence[Rail] = (),
        mails: tuple[Mail, Mail] | None = None,
        **fields: int,
    ) -> RailsOptions:
        """Makes options. `mails` are this rank's and the peer's memory for reports of failed rails; None if a failed
        rail ends the connection. `fields` are other fields of ProxycclRailsOptions.
        """
        native = fill(ffi.new("ProxycclRailsOptions *"), **{"count": len(options), "cut": _CUT, **fields})
        for i, (each, speed) in enumerate(zip(options, speeds, strict=True)):
            native.options[i], native.speeds[i] = each, speed
        if mails is not None:
            own, peer = mails
            native.mail, native.peer_mail = own.address, peer.address
            for i in range(len(options)):
                native.mail_keys[i], native.peer_mail_keys[i] = own.keys[i], peer.keys[i]
        return cls(native, tuple(options), tuple(rails))


def connect(engine: EngineRuntime, transport: str, options: Any, needs: str) -> EngineConnection:
    """Makes a connection of a transport, or over several rails if `options` are RailsOptions. The other arguments and
    the errors are those of `create`.
    """
    if isinstance(options, RailsOptions):
        pointer = create(engine, "rails", options.native, *options.options, needs=needs)
        watched = watched_rails([(pointer, options.rails, options.options)])
        return EngineConnection(pointer, rails=len(options.options), watched=watched)
    return EngineConnection(create(engine, transport, options, needs=needs))


class TransportEndpoint(Protocol):
    """This rank's endpoint of a connection to one peer."""

    info: EndpointInfo  # a description of this endpoint, which the rank sends to the peer

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        """Connects to the peer's endpoint, as `ServiceRemote.connect_endpoint` describes. Returns the options with
        which `Transport.connect` makes a connection; the endpoint must outlive the connection.
        """
        ...

    def close(self) -> None:
        """Frees the endpoint. No connection may still use the endpoint."""
        ...


class Wire(Struct, frozen=True):
    """This rank's end of a link over one adapter: of a connection that is not staged, or between two staging areas."""

    address: bytes  # this end's address, which the peer uses to connect
    number: int  # for staged data, index of this rank's endpoint that the wire uses
    # Connects this end to the peer's end, as `TransportEndpoint.connect` does, with the key of the peer's control
    # segment or staging area. Returns the options of the engine's connection.
    connect: Callable[[EndpointInfo, float, Callable[[], bool]], Any]
    close: Callable[[], None]  # frees this end
    rail: Rail | None = None  # this end as a rail that can be connected again; None if a failure ends the connection
    speed: int = 0  # the rate of the adapter's port; 0 if not known


class DirectEndpoint:
    """A `TransportEndpoint` for data that is not staged: a wire over each of the rank's adapters, and the memory in
    which the peer reports a failed adapter.

    Args:
        device: the network device.
        wires: the wires, which this object closes.
        limit_ns, over_fabric: as in ProxycclRailsOptions.

    Raises:
        ResourceError: the system or the device is out of memory or descriptors.
        RuntimeUnavailableError: the device can't register the runtime's pinned memory.
    """

    def __init__(self, device: RemoteDevice, wires: Iterable[Wire], *, limit_ns: int, over_fabric: int = 0) -> None:
        self._device, self._fields = device, {"limit_ns": limit_ns, "over_fabric": over_fabric}
        segment = device.setup.segment
        registration = device.registrations.register(segment.host_ptr, segment.nbytes)
        self._mail: Registration | None = None
        self._wires: list[Wire] = []
        with contextlib.ExitStack() as undo:
            for wire in wires:
                self._wires.append(wire)
                undo.callback(wire.close)
            area, mail_keys = 0, (0,) * len(self._wires)
            if len(self._wires) > 1 and all(wire.rail is not None for wire in self._wires):
                mail = device.setup.runtime.allocate_pinned(MAIL_BYTES)
                undo.callback(mail.close)
                self._mail = device.registrations.register(mail.host_ptr, mail.nbytes)
                undo.callback(device.registrations.release, self._mail)
                area, mail_keys = self._mail.address, self._mail.keys
            self._close = undo.pop_all().close
        links = zip(self._wires, registration.keys, mail_keys, strict=True)
        first, *more = [EndpointWire(wire.address, key, area, mail_key) for wire, key, mail_key in links]
        self.info = EndpointInfo(
            first.endpoint, registration.address, first.rkey, area, mail_rkey=first.mail_rkey, more=tuple(more)
        )

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        """Implements `TransportEndpoint.connect`. The two ranks use the smaller of their numbers of wires."""
        if theirs.ring_bytes:
            raise ArgumentError("peer", "its end of the connection is staged, but this end is not")
        both = list(zip(self._wires, theirs.wires(), strict=False))
        options = [wire.connect(end, timeout, given_up) for wire, end in both]
        if len(options) == 1:
            return options[0]
        speeds = [wire.speed for wire, _ in both]
        rails = [wire.rail for wire, _ in both if wire.rail is not None]
        mails = None
        if self._mail is not None and theirs.mail_rkey:
            mails = Mail(self._mail.ptr, self._mail.local_keys), Mail(theirs.area, [end.mail_rkey for _, end in both])
        home = self._device.next_home(len(options))
        speeds = speeds if all(speeds) else [1] * len(speeds)
        return RailsOptions.of(options, speeds, rails, mails, home=home, **self._fields)

    def close(self) -> None:
        """Frees the wires. No connection may still use them."""
        self._close()


class RemoteFunctions(Struct, frozen=True):
    """A remote transport's functions."""

    # Returns the requirements of the transport that this machine lacks, in words; "" if it lacks none.
    missing: Callable[[], str]
    # Opens the rank's network device for the transport. Transports with the same `open` share the device. Raises the
    # exceptions of the first call of `ServiceRemote`.
    open: Callable[[RemoteSetup, TransportOptions], RemoteDevice]
    make_endpoint: Callable[[Any], TransportEndpoint]  # makes an endpoint on the device that `open` returned
    refusal: str  # error text for the case that memory of rank `{rank}` could not be exposed because of `{reason}`
    # Whether data is staged through pinned memory, so that the ranks' memory need not be registered.
    stages: bool = False
    rehearses: bool = True  # whether this transport is the default between nodes that one host simulates (rehearses)


class Transport(Struct, frozen=True):
    """A transport, which moves the data of connections."""

    name: str  # the transport's name, for users and for the engine
    # Makes a connection of the engine from the transport's options.
    connect: Callable[[EngineRuntime, Any], EngineConnection]
    # Returns a status of the transport in words; "" for a status that comes from the GPU's driver.
    status_text: Callable[[int], str] = lambda _: ""
    statuses: range = range(0)  # the statuses that no other transport returns
    remote: RemoteFunctions | None = None  # the functions of a remote transport; None for a transport within a host

    @property
    def is_remote(self) -> bool:
        """Whether the transport reaches peers on other hosts, through endpoints and exposed memory."""
        return self.remote is not None
