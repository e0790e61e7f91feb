"""Makes connections of the engine from the options that a transport's C header defines. It does not know about
transports."""

from __future__ import annotations

import errno
import threading
from typing import Any

from msgspec import Struct

from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.runtime import Event, Memory, Runtime, Stream
from proxyccl.proxy import _engine

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
                import numpy as np  # imported here, because `proxyccl info` and `top` do without numpy

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
        ends: one more than the highest wire number of any connection.
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
        native_options: the transport's options struct.
        parts: further structs to which `native_options` points.
        needs: the build requirements of the transport, and how to install them.

    Raises:
        ArgumentError: the transport refuses an option; the error names the option.
        ResourceError: out of memory.
        RuntimeUnavailableError: the engine was built without the transport.
    """
    refused = lib.proxyccl_transport_refused(transport.encode(), native_options)
    if refused:
        name = ffi.string(refused).decode()
        value = next(getattr(each, name) for each in (native_options, *parts) if hasattr(each, name))
        raise ArgumentError(name, f"{value!r} is out of range for the transport {transport}")
    pointer = lib.proxyccl_connection_create(transport.encode(), native_options, engine.table)
    if pointer:
        return pointer
    if ffi.errno == errno.ENOSYS:
        raise RuntimeUnavailableError(
            f"this build of ProxyCCL lacks the transport {transport}; build it where {needs} are installed"
        )
    raise ResourceError("out of memory for a connection")
