"""A transport, as Python sees it: one record of functions. The engine's side is transport.h.

A transport is one file in this package, one file in the engine, and a line in each of the two tables. Other modules use
the transport's record and never compare its name.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.runtime import Event, Memory, Runtime, Stream
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.registrations import RemoteDevice
from proxyccl.proxy.remote_options import RemoteSetup, TransportOptions

ffi, lib = _engine.ffi, _engine.lib


class EngineRuntime:
    """A runtime, the addresses of the functions that the engine calls, and device memory that connections share.

    Attributes:
        runtime: the runtime.
        functions: the functions' addresses.
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
        """The device's address of a table of all 16-bit values, in order."""
        with self._lock:
            if self._shorts is None:
                import numpy as np  # imported here: `proxyccl info` and `top` need no numpy

                table = np.arange(1 << 16, dtype=np.uint16)
                memory = self.runtime.allocate(table.nbytes)
                self.runtime.copy(memory.ptr, table.ctypes.data, table.nbytes)
                self._shorts = memory
            return self._shorts.ptr

    def close(self) -> None:
        """Frees the device memory. Connections must no longer use it."""
        with self._lock:
            if self._shorts is not None:
                self._shorts.close()
                self._shorts = None


class EngineConnection(Struct, frozen=True):
    """A connection of the engine that no worker serves yet.

    Attributes:
        pointer: a ProxycclConnection.
        owned: the objects that the connection copies with, to close in this order after the connection.
        wires: the connection's parts that other threads may poll, as connections. One thread polls the wires with the
            same number of all connections.
        ends: the number of endpoints for wires: one more than the highest wire number of any connection.
    """

    pointer: Any
    owned: tuple[Stream | Event, ...] = ()
    wires: tuple[tuple[int, Any], ...] = ()
    ends: int = 0


def create(engine: EngineRuntime, transport: str, native_options: Any, *parts: Any, needs: str = "") -> Any:
    """Makes a ProxycclConnection. Objects that the options name must outlive the connection.

    Args:
        engine: the runtime whose driver issues the connection's copies.
        transport: the transport's name.
        native_options: the transport's options struct, which may point to `parts`.
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


class TransportEndpoint(Protocol):
    """This rank's endpoint of a connection to one peer.

    Attributes:
        info: the rank's message to the peer about this endpoint.
    """

    info: EndpointInfo

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        """Connects to the peer's endpoint, as `ServiceRemote.connect_endpoint` describes. Returns the options for
        `Transport.connect`. The endpoint must outlive that connection.
        """
        ...

    def close(self) -> None:
        """Frees the endpoint, which connections must no longer use."""
        ...


def require_unstaged(theirs: EndpointInfo) -> None:
    """Raises ArgumentError if a peer stages data."""
    if theirs.ring_bytes:
        raise ArgumentError("peer", "its end of the connection is staged, but this end is not")


class RemoteFunctions(Struct, frozen=True):
    """A remote transport's functions.

    Attributes:
        missing: returns the requirements that this machine lacks for the transport, in words; empty if none.
        open: opens the device. Transports with the same `open` share one device of a rank. Raises as the first call of
            `ServiceRemote` does.
        make_endpoint: makes an endpoint on the device.
        refusal: error text for memory of `{rank}` that could not be exposed because of `{reason}`.
        stages: whether data is staged through pinned memory. Otherwise the device registers the memory of both sides.
        rehearses: whether nodes that are rehearsed on one host use this transport by default.
    """

    missing: Callable[[], str]
    open: Callable[[RemoteSetup, TransportOptions], RemoteDevice]
    make_endpoint: Callable[[Any], TransportEndpoint]
    refusal: str
    stages: bool = False
    rehearses: bool = True


class Transport(Struct, frozen=True):
    """A transport, which moves the data of connections.

    Attributes:
        name: the transport's name, for users and for the engine.
        connect: makes an engine's connection from the transport's options.
        status_text: returns a connection's status in words; "" for a status of the driver.
        statuses: the statuses that no other transport returns.
        error_text: returns details, beyond the status, of the error that ended a connection.
        remote: the functions of a remote transport; None for a transport within a host.
    """

    name: str
    connect: Callable[[EngineRuntime, Any], EngineConnection]
    status_text: Callable[[int], str] = lambda _: ""
    statuses: range = range(0)
    remote: RemoteFunctions | None = None
    error_text: Callable[[Any], str] = lambda _: ""

    @property
    def is_remote(self) -> bool:
        """Whether the transport reaches peers on other hosts, through endpoints and exposed memory."""
        return self.remote is not None
