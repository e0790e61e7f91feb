"""The host runtime's methods: memory, streams, copies, kernels, and the engine's calls."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arguments.texts import require_text, require_texts
from proxyccl.device.base_runtime import (
    Allocation,
    Allocations,
    DriverCalls,
    Event,
    LaunchDefaults,
    Memory,
    StreamEvents,
    StreamLike,
    foreign_stream_handle,
)
from proxyccl.device.build.ahead_of_time import Shipped
from proxyccl.device.build.compile_cache import shipped_source
from proxyccl.device.build.kernel_names import NO_KERNEL, in_plain_text, kernel_names
from proxyccl.device.errors import ArgumentError, CompileError, KernelError, ResourceError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.host.shipped_libraries import group_of, shipped_library
from proxyccl.device.host.status import check_status
from proxyccl.device.host.streams import HostEvent, HostStream
from proxyccl.device.in_flight import InFlight
from proxyccl.device.kernel import Kernel, Module, parameters_of
from proxyccl.device.memory.shared_memory import SharedMemory, export_descriptor
from proxyccl.device.process import forks
from proxyccl.device.process.cpu import cpu_name, describe_cpu
from proxyccl.device.runtime import Runtime

if TYPE_CHECKING:
    from proxyccl.device._native import Uint64Pointer, VoidPointer  # defined only in the type stub


def _address(name: str) -> int:
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))


_CALLS = (
    *("copy", "set", "write64", "write32", "event_record", "event_query", "launch", "allocate", "free"),
    *("pointer_attribute", "add_helper", "remove_helper"),
)
"""The fields of `DriverCalls` that have the names of the host runtime's functions, without their prefix."""


class HostRuntime(Runtime):
    """The CPU as a device.

    Args:
        device: the device's number. All devices are this machine's CPU.
        async_copies: whether a separate thread per peer makes the proxy's copies, like a copy engine. By default the
            proxy's thread makes the copies, which is faster with few cores.
        cxxflags: options for the C++ compiler, for example for a sanitizer. With options, shipped kernels are compiled
            at run time.
        blocks: maximum number of a collective's blocks, the same on all ranks; more than a rank's cores are slower.
    """

    name = "host"
    thread_stream = None
    legacy_stream = None
    orders_rdma_writes = True  # network adapters write host memory in order
    calls = DriverCalls(
        **{name: _address(f"proxyccl_host_{name}") for name in _CALLS},
        batch=_address("proxyccl_host_stream_operations"),
        wait_event=_address("proxyccl_host_stream_wait_event"),
        synchronize=_address("proxyccl_host_stream_synchronize"),
        buffer_id=lib.PROXYCCL_HOST_BUFFER_ID,
    )
    _allocations: ClassVar[weakref.WeakValueDictionary[int, SharedMemory]] = weakref.WeakValueDictionary()
    _allocations_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, device: int = 0, *, async_copies: bool = False, cxxflags: tuple[str, ...] = (), blocks: int = 1
    ) -> None:
        device = as_integer(device, "device", "expected an integer from 0 on", 0)
        most = lib.PROXYCCL_HOST_MAX_RESIDENT_BLOCKS
        blocks = as_integer(blocks, "blocks", f"expected an integer from 1 to {most}", 1, most)
        self.device = device
        self.device_id = f"host:{device}"
        self.in_flight = InFlight(self)
        self.launch_defaults = LaunchDefaults(
            threads=4,
            blocks=blocks,
            efficient_blocks=1,
            copy_blocks=blocks,
            small_threads=4,
            small_blocks=blocks,
            small_bytes=32 * 1024,
            awaits_data=False,
            bytes_per_block=32 * 1024,
            data_bytes=1024 * 1024,
            result_bytes=1024 * 1024,
            flow_bytes=2 * 1024 * 1024,
            meeting_bytes=16 * 1024,
            offered_bytes=16 * 1024,
            proxied_kernel_bytes=128 * 1024,
            pinned_kernel_bytes=0,
            packet_threads=64,
            packet_blocks=blocks,
            pair_packet_blocks=blocks,
            packet_move_bytes=0,
            line_bytes=0,
            line_blocks=blocks,
            line_move_bytes=0,
            row_blocks=1,
            pinned_bytes=0,
            staged_pinned_bytes=0,
            own_box_bytes=0,
            one_crossing_bytes=64 * 1024,
        )
        self._async_copies = async_copies
        self._cxxflags = (*os.environ.get("PROXYCCL_CXXFLAGS", "").split(), *cxxflags)
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[HostStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()  # guards `_streams`, because ranks that are threads may share a runtime
        self._default_stream: HostStream | None = None  # created at first use, because a stream starts a thread
        self._modules: dict[int, dict[str, VoidPointer]] = {}  # by control block address
        self._shipped: dict[Shipped, Kernel] = {}

    def __repr__(self) -> str:
        return f"HostRuntime(device={self.device})"

    @property
    def device_name(self) -> str:
        return cpu_name()

    def describe(self) -> str:
        return describe_cpu()

    def allocate(self, nbytes: int) -> SharedMemory:
        """Allocates zeroed shared memory."""
        memory = SharedMemory.allocate(nbytes)
        with self._allocations_lock:
            self._allocations[memory.ptr] = memory
        return memory

    def expect_reuse(self, ptr: int, nbytes: int) -> None:
        """Moves shared memory to huge pages. Does nothing for memory that this runtime has not mapped."""
        lib.proxyccl_host_memory_use_huge_pages(ptr, nbytes)

    def allocate_pinned(self, nbytes: int) -> SharedMemory:
        """Allocates zeroed shared memory, like `allocate`."""
        return self.allocate(nbytes)

    def suspend(self, blocks: Sequence[Memory]) -> None:
        """Frees the pages of shared memory. All processes' mappings stay valid, and read zeros from then on."""
        for block in blocks:
            status = lib.proxyccl_host_memory_discard(ffi.cast("void *", block.ptr), block.nbytes)
            if status:
                raise ResourceError(f"can't free the pages of shared memory: {os.strerror(status)}")

    def export(self, ptr: int, nbytes: int) -> bytes:
        with self._allocations_lock:
            whole = self._allocations.get(ptr)
            candidates = [whole] if whole is not None else list(self._allocations.values())
        for memory in candidates:
            if not memory.closed and memory.contains(ptr, nbytes):
                return memory.export(ptr, nbytes)
        base, size, descriptor = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("int *")
        if not lib.proxyccl_host_allocation(ptr, base, size, descriptor) and ptr + nbytes <= base[0] + size[0]:
            return export_descriptor(descriptor[0], ptr - base[0], nbytes)
        raise ArgumentError(
            "array", "this memory is private to its process; allocate memory for peers with Communicator.empty()"
        )

    def open(self, handle: bytes) -> SharedMemory:
        return SharedMemory.open(handle)

    def open_pinned(self, handle: bytes) -> SharedMemory:
        return self.open(handle)

    def adopt_pinned(self, descriptor: int, nbytes: int) -> SharedMemory:
        return SharedMemory.adopt(descriptor, nbytes)

    def can_access_peer(self, device_id: str) -> bool:
        """Returns whether the other device is a host device of this machine."""
        return device_id.startswith("host:")

    def adds_at_peer(self, device_id: str) -> bool:
        return self.can_access_peer(device_id)

    def memory_left(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGESIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def whole_allocation(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """Returns the allocation, made by `calls.allocate`, that contains a range; None if there is none."""
        base, size, descriptor = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("int *")
        if lib.proxyccl_host_allocation(ptr, base, size, descriptor) or ptr + nbytes > base[0] + size[0]:
            return None
        return base[0], size[0]

    def allocations(self, ptr: int, nbytes: int) -> Allocations:
        """Returns the shared memory in which a range begins; an empty tuple for private memory."""
        number = ffi.new("uint64_t *")
        if lib.proxyccl_host_pointer_attribute(number, lib.PROXYCCL_HOST_BUFFER_ID, ptr):
            return ()
        return (Allocation(ptr, number[0]),)

    def free_later(self, ptr: int) -> None:
        """Frees memory immediately, because peers' mappings stay valid."""
        check_status(lib.proxyccl_host_free(ptr), "free")

    def create_stream(self, *, for_proxy: bool = False, in_caller: bool = False) -> HostStream:
        """Creates a stream. With `for_proxy`, the calling thread makes the copies unless `async_copies` is set."""
        kind: int = lib.PROXYCCL_HOST_QUEUED
        if in_caller:
            kind = lib.PROXYCCL_HOST_IN_CALLER
        elif for_proxy and not self._async_copies:
            kind = lib.PROXYCCL_HOST_INLINE
        stream = HostStream(kind)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def _all_streams(self) -> list[HostStream]:
        with self._streams_lock:
            return list(self._streams)

    def create_event(self, *, times: bool = True) -> HostEvent:
        return HostEvent(self.stream_handle)

    def stream_handle(self, stream: StreamLike) -> int:
        """Returns the handle of a `HostStream`, or of the default stream for None."""
        return self._stream_of(stream).handle

    def _stream_of(self, stream: StreamLike) -> HostStream:
        found: HostStream | None
        if stream is None:
            found = self._default_stream or self._open_default_stream()
        elif isinstance(stream, HostStream):
            found = stream
        else:
            handle = foreign_stream_handle(stream)
            # A closed stream is skipped, because an open stream may have the same handle.
            found = next((own for own in self._all_streams() if own.handle == handle and not own.closed), None)
            if found is None:
                expected = "a stream of the host runtime (runtime.create_stream() makes one)"
                raise ArgumentError("stream", f"expected {expected}, not {stream!r}")
        found._require_open()  # raises in a fork's child, which lacks the stream's thread
        return found

    def _open_default_stream(self) -> HostStream:
        with self._lock:
            if self._default_stream is None:
                self._default_stream = self.create_stream()
            return self._default_stream

    def stream_events(self) -> StreamEvents:
        """Returns the host runtime's calls, and functions that create and destroy events."""
        events: dict[int, HostEvent] = {}

        def take() -> int:
            event = self.create_event()
            events[event.handle] = event
            return event.handle

        return StreamEvents(int(ffi.cast("uintptr_t", _ORDER)), take, lambda handle: events.pop(handle).close())

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of `then` wait for work queued on `first`; a closed `first` has no queued work."""
        if any(stream.handle == first and not stream.closed for stream in self._all_streams()):
            event = self.create_event()
            event.record(first)
            self.wait_event(then, event)

    def wait_event(self, stream: int, event: Event) -> None:
        status = lib.proxyccl_host_stream_wait_event(ffi.cast("void *", stream), ffi.cast("void *", event.handle), 0)
        check_status(status, "stream wait event")

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        if stream is None:
            lib.proxyccl_memmove(ffi.cast("void *", dst), ffi.cast("void *", src), nbytes)
        else:
            to, source, handle = (ffi.cast("void *", each) for each in (dst, src, self.stream_handle(stream)))
            check_status(lib.proxyccl_host_copy(to, source, nbytes, handle), "copy")

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        if stream is None:
            ctypes.memset(dst, value, nbytes)
        else:
            handle = ffi.cast("void *", self.stream_handle(stream))
            check_status(lib.proxyccl_host_set(ffi.cast("void *", dst), value, nbytes, handle), "fill")

    def synchronize(self) -> None:
        failed: KernelError | None = None
        with self.in_flight.ending():
            for stream in self._all_streams():  # ranks that are threads share the streams
                try:
                    stream.finish()
                except KernelError as error:  # raised below, when all streams have finished
                    failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # breaks the reference cycle of error, traceback and frame

    def synchronize_stream(self, stream: StreamLike) -> None:
        self._stream_of(stream).synchronize()

    def compile(
        self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = (), control: int = 0
    ) -> Module:
        require_text(source, "source")
        from proxyccl.device.host.compiler import load_source, preprocessed

        include_dirs = require_texts(include_dirs, "include_dirs")
        options = (*self._cxxflags, *require_texts(options, "options"))
        names = kernel_names(source if in_plain_text(source, options) else preprocessed(source, options, include_dirs))
        if not names:
            raise ArgumentError("source", NO_KERNEL)
        module = load_source(source, names, options, include_dirs, lambda path: self._load(path, control))
        return Module({name: self._kernel(module, name) for name in names})

    def release_control(self, control: int) -> None:
        """Releases the modules of a control block, except those whose kernels are still referenced."""
        with self._lock:
            modules = self._modules.pop(control, {})
        for module in modules.values():
            _default_control(module)[0] = 0

    def _load_shipped(self, name: str, kernel: Shipped, compiled_only: bool) -> Kernel:
        """Loads a kernel from the installation's libraries or else from the cache, or compiles the kernel."""
        file, _, dtype, _ = kernel
        library = shipped_library(group_of(file, dtype))
        if library is None or self._cxxflags:
            from proxyccl.device.host.compiler import load_shipped

            source = shipped_source(*kernel)
            module = load_shipped(source, name, self._cxxflags, self._load, compiled_only=compiled_only)
        else:
            try:
                module = self._load(library)
            except OSError as error:
                raise CompileError(f"{error}; reinstall proxyccl") from None
        return self._kernel(module, name)

    def check(self, status: int, call: str) -> None:
        check_status(status, call)

    def pointer_device(self, ptr: int) -> int:
        """Returns this device's number for every address."""
        return self.device

    def _load(self, path: Path, control: int = 0) -> VoidPointer:
        with self._lock:
            modules = self._modules.setdefault(control, {})
            if str(path) not in modules:
                out = ffi.new("void **")
                if lib.proxyccl_host_module_load(out, str(path).encode()):
                    reason = ffi.string(lib.proxyccl_host_module_error()).decode()
                    raise OSError(f"can't load {path.name}: {reason}")
                module = ffi.gc(out[0], lib.proxyccl_host_module_unload)
                _default_control(module)[0] = control
                modules[str(path)] = module
            return modules[str(path)]

    def _kernel(self, module: VoidPointer, name: str) -> Kernel:
        out = ffi.new("void **")
        if lib.proxyccl_host_module_function(out, module, name.encode()):
            raise ArgumentError("kernel", f"no kernel {name!r} in the module")
        table = lib.proxyccl_host_function_parameters(out[0])
        return Kernel(self, name, out[0], parameters_of(table), module)


forks.hold_while_forking(HostRuntime._allocations_lock)
_ORDER = ffi.new("ProxycclStreamOrder *")
set_functions(ffi, _ORDER, HostRuntime.calls, record="event_record", wait="wait_event", query="event_query")


def _default_control(module: VoidPointer) -> Uint64Pointer:
    return ffi.cast("uint64_t *", lib.proxyccl_host_module_variable(module, b"proxyccl_default_control"))
