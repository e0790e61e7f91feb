"""The runtime of a GPU, over any vendor's `Driver`: memory, streams, kernels and the engine's calls.

It knows no vendor: what differs between them is in cuda.py and hip.py. Every method may be called from any thread; it
makes the device current for the call and puts back what was current before, as other libraries of the process do with
theirs.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from proxyccl.device._native import ffi
from proxyccl.device.compile_cache import (
    INCLUDE_DIR,
    compiled_image,
    image_is_there,
    shipped_options,
    shipped_source,
)
from proxyccl.device.driver import Driver
from proxyccl.device.errors import (
    ArgumentError,
    CompileError,
    DriverError,
    ResourceError,
    RuntimeUnavailableError,
)
from proxyccl.device.in_flight import InFlight
from proxyccl.device.kernel import Kernel, Module, kernel_names
from proxyccl.device.owned import Owned, OwnedStream
from proxyccl.device.runtime import EngineFunctions, LaunchDefaults, LaunchTarget, StreamLike, foreign_stream_handle
from proxyccl.device.shared_memory import SharedMemory

_PROCESS = os.urandom(16)
"""Tells this process's handles from others': process numbers are used again."""


class DeviceContext:
    """A device's context, made current for calls.

    What frees a thing holds this and not the runtime object, which would never go otherwise.
    """

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device current within a block, in which a graph capture of another library forbids nothing."""
        before = self._driver.current()
        if before != self._context:
            self._driver.make_current(self._context)
        mode = self._driver.relax_capture()
        try:
            yield
        finally:
            self._driver.relax_capture(mode)
            if before not in (None, self._context):
                self._driver.make_current(before)

    def call(self, call: Callable[..., Any], *args: Any) -> Any:
        """call(*args) with the device current."""
        with self.current():
            return call(*args)


class GpuMemory:
    """Device memory, allocated here or another's mapped here.

    A driver that frees waits for the device's kernels. So memory without a reference left is freed when its runtime
    next waits for its device or needs room, and not where the garbage is collected: that may be the thread of a rank
    for which those kernels wait.
    """

    def __init__(self, ptr: int, nbytes: int, unused: deque[Callable[[], None]], release: Callable[[], None]) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._release = release
        # Not at exit: the driver takes everything with it, and communicators are closed later than that.
        self._finalizer = weakref.finalize(self, unused.append, release)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether it was freed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Frees or unmaps it. Waits for the work that may use it."""
        if self._finalizer.detach() is not None:
            self._release()


class GpuAllocation(GpuMemory):
    """Device memory that was allocated here."""

    def __init__(
        self,
        ptr: int,
        nbytes: int,
        unused: deque[Callable[[], None]],
        release: Callable[[], None],
        in_flight: InFlight,
    ) -> None:
        super().__init__(ptr, nbytes, unused, release)
        self._in_flight = in_flight

    def close(self) -> None:
        """Frees it when what this thread launched is done."""
        if not self.closed:
            self._in_flight.wait()
        super().close()


class GpuPinnedMemory(GpuMemory):
    """Shared memory of the host that the device reaches too. `ptr` is the device's address."""

    def __init__(
        self, ptr: int, shared: SharedMemory, unused: deque[Callable[[], None]], release: Callable[[], None]
    ) -> None:
        super().__init__(ptr, shared.nbytes, unused, release)
        self.shared = shared

    @property
    def host_ptr(self) -> int:
        """Address for the CPU."""
        return self.shared.ptr

    @property
    def handle(self) -> bytes:
        """By which other processes map it with `GpuRuntime.open_pinned`."""
        return self.shared.handle

    def export(self, host_ptr: int, nbytes: int) -> bytes:
        """The same for a part of it."""
        return self.shared.export(host_ptr, nbytes)

    @property
    def descriptor(self) -> int:
        """The file that it is."""
        return self.shared.descriptor


class GpuStream(OwnedStream):
    """A queue of device work that is independent of the legacy default stream."""

    def __init__(self, runtime: GpuRuntime) -> None:
        self._runtime, self._driver = runtime, runtime.driver
        with runtime.current():
            self.handle = self._driver.create_stream()
        super().__init__(runtime.context.call, self._driver.destroy_stream, self.handle)

    def synchronize(self) -> None:
        """Waits until all that was queued is done."""
        self._require_open()
        with self._runtime.current():
            self._driver.stream_synchronize(self.handle)

    def query(self) -> bool:
        """Whether all that was queued is done."""
        self._require_open()
        with self._runtime.current():
            return self._driver.stream_query(self.handle)

    def wait_event(self, event: GpuEvent) -> None:
        """Later work on this stream runs after the event's last record."""
        self._require_open()
        with self._runtime.current():
            self._driver.stream_wait_event(self.handle, event.handle)


class GpuEvent(Owned):
    """A point in a stream."""

    def __init__(self, runtime: GpuRuntime) -> None:
        self._runtime, self._driver = runtime, runtime.driver
        with runtime.current():
            self.handle = self._driver.create_event()
        super().__init__(runtime.context.call, self._driver.destroy_event, self.handle)

    def record(self, stream: StreamLike = None) -> None:
        """Marks the stream's current end."""
        with self._runtime.current():
            self._driver.record_event(self.handle, self._runtime.stream_handle(stream))

    def query(self) -> bool:
        """Whether the marked point was reached."""
        with self._runtime.current():
            return self._driver.event_query(self.handle)

    def synchronize(self) -> None:
        """Waits for the marked point."""
        with self._runtime.current():
            self._driver.event_synchronize(self.handle)

    def elapsed(self, start: Any) -> float:
        """Milliseconds from `start` to this event; both were reached."""
        with self._runtime.current():
            return self._driver.event_elapsed(start.handle, self.handle)


class _Handle:
    """What another process, or another device's runtime of this one, needs to reach device memory."""

    _LAYOUT = struct.Struct("<8s16sqQQQQ64s")
    _MAGIC = b"PXCCLgpu"
    SIZE = _LAYOUT.size

    @classmethod
    def pack(cls, device: int, base: int, allocation: int, offset: int, nbytes: int, raw: bytes) -> bytes:
        return cls._LAYOUT.pack(cls._MAGIC, _PROCESS, device, base, allocation, offset, nbytes, raw)

    @classmethod
    def unpack(cls, handle: bytes) -> tuple[bool, int, int, int, int, int, bytes]:
        """(whether it is this process's, device, base, allocation, offset, nbytes, the driver's handle)."""
        if len(handle) != cls.SIZE:
            raise ArgumentError("handle", f"{len(handle)} bytes, where a handle of device memory has {cls.SIZE}")
        magic, process, device, base, allocation, offset, nbytes, raw = cls._LAYOUT.unpack(handle)
        if magic != cls._MAGIC:
            raise ArgumentError("handle", "these bytes are no handle of device memory")
        return process == _PROCESS, device, base, allocation, offset, nbytes, raw


class _Shared:
    """Things that a driver does once for a process and counts the users of: pinned ranges, imported allocations."""

    @dataclass
    class _Entry:
        users: int = 0
        value: int | None = None
        lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is made or undone

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never while a driver is waited for: others' things have nothing to do with it
        self._entries: dict[Any, _Shared._Entry] = {}

    def acquire(self, key: Any, make: Callable[[], int]) -> int:
        """The value for a key, made by the first user."""
        with self._lock:
            entry = self._entries.setdefault(key, self._Entry())
            entry.users += 1
        with entry.lock:
            try:
                if entry.value is None:
                    entry.value = make()
            except BaseException:
                self._leave(key, entry)
                raise
            return entry.value

    def release(self, key: Any, undo: Callable[[int], None]) -> None:
        """Ends one use; the last one undoes it."""
        with self._lock:
            entry = self._entries[key]
        with entry.lock:
            if entry.users > 1:
                self._leave(key, entry)
                return
            value, entry.value = entry.value, None
            assert value is not None
            try:
                undo(value)
            finally:
                self._leave(key, entry)

    def _leave(self, key: Any, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if not entry.users:
                del self._entries[key]


class GpuRuntime:
    """One GPU of this process. See `proxyccl.device.runtime.Runtime` for the methods.

    Args:
        driver: the vendor's.
        device: number among the devices that this process may use.

    Raises:
        RuntimeUnavailableError: there is no device.
        ArgumentError: there is no device of that number.
    """

    _pinned: ClassVar[_Shared] = _Shared()
    _imported: ClassVar[_Shared] = _Shared()
    # By runtime and device: a runtime object may be gone before its memory is.
    _unused_on: ClassVar[dict[tuple[str, int], deque[Callable[[], None]]]] = {}

    def __init__(self, driver: Driver, device: int = 0) -> None:
        count = driver.device_count()
        if count == 0:
            raise RuntimeUnavailableError(f"{driver.runtime}: this process sees no device")
        if not isinstance(device, int) or not 0 <= device < count:
            devices = f"{driver.runtime} devices, 0 to {count - 1}"
            raise ArgumentError("device", f"{device!r} is none of the {count} {devices}")
        self.driver = driver
        self.name = driver.runtime
        self.device = device
        self.info = driver.device(device)
        self.device_id = self.info.device_id
        self.in_flight = InFlight(self)
        processors = self.info.multiprocessors  # a block on each at the most: blocks wait for one another
        self.launch_defaults = LaunchDefaults(
            threads=512,
            blocks=min(64, processors),
            copy_blocks=min(32, processors),
            bytes_per_block=16 * 1024,
            exchange_bytes=8 * 1024 * 1024,
            packet_threads=128,
            packet_blocks=min(64, processors),
        )
        self._context = driver.context(device)
        self.context: DeviceContext = DeviceContext(driver, self._context)
        self._unused = self._unused_on.setdefault((self.name, device), deque())
        self._lock = threading.Lock()
        self._modules: dict[str, int] = {}
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._copies = GpuStream(self)
        self._launch_target = LaunchTarget(driver.launch_address(), driver.current_address(), self._context)

    def __repr__(self) -> str:
        return f"GpuRuntime({self.name}, device={self.device})"

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device current within a block, in which a graph capture of another library forbids nothing."""
        return self.context.current()

    def activate(self, *, for_proxy: bool = False) -> None:
        """Makes the device current on the calling thread."""
        self.driver.make_current(self._context)
        if for_proxy:
            # The engine asks for events whenever it likes. A capture on another thread must not be broken by that.
            self.driver.relax_capture()

    def describe(self) -> str:
        """One line on the device and its driver."""
        memory = self.info.memory_bytes / 2**30
        return (
            f"{self.info.name}, {self.info.architecture}, {self.info.multiprocessors} multiprocessors, "
            f"{memory:.0f} GiB, {self.driver.versions()}"
        )

    # -- memory ---

    def allocate(self, nbytes: int) -> GpuMemory:
        """Zeroed device memory."""
        if nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes}")
        with self.current():
            full = ResourceError(
                f"can't allocate {nbytes} bytes on {self.name} device {self.device}, "
                f"{self.info.name} of {self.info.memory_bytes} bytes"
            )
            if nbytes > self.info.memory_bytes:
                raise full
            try:
                ptr = self._allocate(nbytes)
            except DriverError as error:
                raise full if error.status == self.driver.out_of_memory else error from None
            release = functools.partial(self.context.call, self.driver.free, ptr)
            memory = GpuAllocation(ptr, nbytes, self._unused, release, self.in_flight)
        self.fill(ptr, 0, nbytes)
        return memory

    def _allocate(self, nbytes: int) -> int:
        try:
            return self.driver.allocate(nbytes)
        except DriverError as error:
            if error.status != self.driver.out_of_memory or not self._unused:
                raise
            self.in_flight.wait()
            self._free_unused()
            return self.driver.allocate(nbytes)

    def _free_unused(self) -> None:
        with contextlib.suppress(IndexError):  # several threads may be at it
            while True:
                self._unused.popleft()()

    def allocate_pinned(self, nbytes: int) -> GpuPinnedMemory:
        """Zeroed shared memory of the host, pinned."""
        return self._pin(SharedMemory.allocate(nbytes))

    def _pin(self, shared: SharedMemory) -> GpuPinnedMemory:
        # Pinned once a process, whole and for all devices; ranks that are threads see the same address.
        start, nbytes = shared.mapped_range
        key = (self.name, start)

        def pin() -> int:
            self.driver.register_host(start, nbytes)
            return start

        with self.current():
            self._pinned.acquire(key, pin)
            ptr = self.driver.host_device_pointer(start) + shared.ptr - start
        pinned, context, unregister = self._pinned, self.context, self.driver.unregister_host

        def unpin() -> None:
            context.call(pinned.release, key, unregister)
            shared.close()  # not before: its addresses would be given to other memory, still pinned

        return GpuPinnedMemory(ptr, shared, self._unused, unpin)

    def export(self, ptr: int, nbytes: int) -> bytes:
        """A handle to device memory, whoever allocated it."""
        with self.current():
            try:
                base, size = self.driver.address_range(ptr, nbytes)
                allocation = self.driver.allocation_id(base)
                raw = self.driver.export_memory(base, size)
            except DriverError as error:
                raise ArgumentError(
                    "array",
                    f"this memory can't be shared between processes ({error}); allocate with Communicator.empty() "
                    "what peers shall reach",
                ) from None
        if ptr + nbytes > base + size:
            raise ArgumentError("array", f"{nbytes} bytes at {ptr:#x} leave their allocation")
        return _Handle.pack(self.device, base, allocation, ptr - base, nbytes, raw)

    def open(self, handle: bytes) -> GpuMemory:
        """Maps what a process of this machine exported, or reaches what another thread of this one did."""
        own, device, base, allocation, offset, nbytes, raw = _Handle.unpack(handle)
        if own:
            size = self._check_own(device, base, allocation, offset + nbytes)
        with self.current():
            if own:
                if device != self.device:
                    self.driver.enable_peer_access(self.driver.context(device))
                    self.driver.grant_access(base, size, self.device)
                return GpuMemory(base + offset, nbytes, self._unused, lambda: None)
            key = (self._context, handle[: -len(raw)], raw)
            try:
                mapped = self._imported.acquire(key, lambda: self.driver.import_memory(raw))
            except (DriverError, OSError) as error:
                raise ArgumentError("handle", f"the memory that it names can't be mapped: {error}") from None
        release = functools.partial(self.context.call, self._imported.release, key, self.driver.release_memory)
        memory = GpuMemory(mapped + offset, nbytes, self._unused, release)
        if not self._holds(mapped, offset + nbytes):
            memory.close()
            raise ArgumentError("handle", f"{nbytes} bytes at {offset} leave the allocation that it names")
        return memory

    def _holds(self, mapped: int, nbytes: int) -> bool:
        """Whether so much of what another process exported is mapped, as far as the driver says."""
        with self.current():
            try:
                base, size = self.driver.address_range(mapped, nbytes)
            except DriverError:  # not every driver knows an allocation that is another's
                return True
        return mapped + nbytes <= base + size

    def _check_own(self, device: int, base: int, allocation: int, end: int) -> int:
        """The size of this process's own memory that a handle names. One that is damaged, or whose memory is gone, is
        refused.
        """
        if not 0 <= device < self.driver.device_count():
            raise ArgumentError("handle", f"it names device {device}, and there is none of that number")
        with DeviceContext(self.driver, self.driver.context(device)).current():
            try:
                start, size = self.driver.address_range(base, end)
                found = self.driver.allocation_id(base)
            except DriverError:
                raise ArgumentError("handle", "this process has freed the memory that it names") from None
        if (start, found) != (base, allocation):
            raise ArgumentError("handle", "this process has freed the memory that it names")
        if end > size:
            raise ArgumentError("handle", f"it names {end} bytes of an allocation of {size}")
        return size

    def open_pinned(self, handle: bytes) -> GpuPinnedMemory:
        """Maps another process's pinned memory and pins it here."""
        return self._pin(SharedMemory.open(handle))

    def adopt_pinned(self, descriptor: int, nbytes: int) -> GpuPinnedMemory:
        """The same by its descriptor."""
        return self._pin(SharedMemory.adopt(descriptor, nbytes))

    def numa_node(self) -> int | None:
        """What sysfs says of the device."""
        path = Path("/sys/bus/pci/devices") / self.info.pci_address / "numa_node"
        number = int(path.read_text()) if path.exists() else -1
        return number if number >= 0 else None

    def dmabuf(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        """A descriptor of the pages that the memory lies in."""
        offset = ptr % mmap.PAGESIZE
        pages = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.current():
            try:
                return self.driver.dmabuf(ptr - offset, pages), offset
            except (DriverError, RuntimeUnavailableError):
                return None

    def can_access_peer(self, device_id: str) -> bool:
        """Whether kernels here can touch the other device's memory.

        A device that this process does not see is taken for one that they can: drivers map its memory all the same.
        """
        if not device_id.startswith(f"{self.name}:"):
            return False
        if device_id == self.device_id:
            return True
        for peer in range(self.driver.device_count()):
            if self.driver.device(peer).device_id == device_id:
                return self.driver.can_access_peer(self.device, peer)
        return True

    def copy(self, dst: int, src: int, nbytes: int, stream: StreamLike = None) -> None:
        """Copies between any two addresses; without a stream it returns when it is done, ordered behind nothing."""
        with self.current():
            if stream is not None:
                self.driver.copy(dst, src, nbytes, self.stream_handle(stream))
                return
            self.driver.copy(dst, src, nbytes, self._copies.handle)
            self.driver.stream_synchronize(self._copies.handle)

    def fill(self, dst: int, value: int, nbytes: int, stream: StreamLike = None) -> None:
        """Sets bytes; without a stream it returns when it is done, ordered behind nothing."""
        with self.current():
            if stream is not None:
                self.driver.fill(dst, value, nbytes, self.stream_handle(stream))
                return
            self.driver.fill(dst, value, nbytes, self._copies.handle)
            self.driver.stream_synchronize(self._copies.handle)

    # -- streams ---

    def create_stream(self, *, for_proxy: bool = False) -> GpuStream:
        """A stream."""
        return GpuStream(self)

    def create_event(self) -> GpuEvent:
        """An event."""
        return GpuEvent(self)

    def stream_handle(self, stream: StreamLike) -> int:
        """The handle of a stream of any library, or the calling thread's default stream for None.

        The thread's own default stream is ordered with the legacy default stream, where other libraries work unless
        told otherwise, but not with other threads', so ranks that are threads don't wait for each other's kernels.
        """
        if stream is None:
            return self.driver.thread_stream
        if isinstance(stream, GpuStream):
            stream._require_open()
            return stream.handle
        return foreign_stream_handle(stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether what is queued on the stream goes into a graph."""
        with self.current():
            return self.driver.is_capturing(stream)

    def order_streams(self, first: int, then: int) -> None:
        """Makes later work of `then` wait for what is queued on `first`.

        A stream that is being captured into a graph can't be ordered with one that is not; the graph's own launches
        are the caller's to order.
        """
        with self.current():
            capturing = self.driver.is_capturing(then)
            if capturing != self.driver.is_capturing(first):
                return
            event = self.create_event()
            self.driver.record_event(event.handle, first)
            self.driver.stream_wait_event(then, event.handle)

    def synchronize(self) -> None:
        """Waits for all work of the device's context, other libraries' in this process included."""
        done = self.in_flight.take()
        with self.current():
            self.driver.synchronize()
        del done
        self._free_unused()

    # -- kernels ---

    def compile(self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = ()) -> Module:
        """Compiles kernels for this device's architecture."""
        names = kernel_names(source)
        if not names:
            raise ArgumentError("source", 'no kernel in it: a kernel is an extern "C" __global__ void function')
        exports = "".join(f"PROXYCCL_EXPORT_KERNEL({name})\n" for name in names)
        text = f'#include "proxyccl/kernel.h"\n#line 1 "kernel source"\n{source}\n{exports}'
        compiler, extra = self.driver.compiler, (*(f"-I{directory}" for directory in include_dirs), *options)
        full = (*compiler.options(self.info.architecture), f"-I{INCLUDE_DIR}", *extra)

        def image() -> bytes:
            if extra:  # headers that are not ours may come in, and they may change: nothing tells which
                return compiler.compile(text, full)
            return compiled_image(compiler, text, full).read_bytes()

        module = self._load(text, full, image)
        return Module({name: self._kernel(module, name) for name in names})

    def shipped(
        self,
        file: str,
        kernel: str,
        dtype: str | None = None,
        op: str | None = None,
        *,
        compiled_only: bool = False,
    ) -> Kernel:
        """A shipped kernel, compiled for this device's architecture when first used on this machine, or before."""
        name = "_".join(filter(None, (kernel, dtype, op)))
        key = (file, name)
        with self._lock:
            known = self._kernels.get(key)
        if known is not None:
            return known
        source, compiler = shipped_source(file, kernel, dtype, op), self.driver.compiler
        options = shipped_options(compiler, self.info.architecture)
        if compiled_only and not image_is_there(compiler, source, options):
            raise CompileError(
                f"kernel {name} was not compiled for {self.info.architecture} beforehand; run: proxyccl compile"
            )
        module = self._load(source, options, lambda: compiled_image(compiler, source, options).read_bytes())
        made = self._kernel(module, name)
        with self._lock:
            return self._kernels.setdefault(key, made)

    def _load(self, source: str, options: tuple[str, ...], image: Callable[[], bytes]) -> int:
        key = "\0".join((source, *options))
        with self._lock:
            if key not in self._modules:
                made = image()
                self.in_flight.wait()
                with self.current():
                    self._modules[key] = self.driver.load_module(made)
            return self._modules[key]

    def _kernel(self, module: int, name: str) -> Kernel:
        with self.current():
            function = self.driver.module_function(module, name)
            address, nbytes = self.driver.module_global(module, f"proxyccl_parameters_{name}")
        table = ffi.new("uint32_t[]", nbytes // 4)
        self.copy(int(ffi.cast("uintptr_t", table)), address, nbytes)
        parameters = [(table[1 + i] >> 2, table[1 + i] & 3) for i in range(table[0])]
        return Kernel(self, name, ffi.cast("void *", function), parameters)

    def launch_target(self) -> LaunchTarget:
        """The driver's launch call."""
        return self._launch_target

    def check(self, status: int, call: str) -> None:
        """Raises DriverError unless status is 0."""
        if status:
            raise DriverError(call, status, self.driver.error_text(status))

    def engine_functions(self) -> EngineFunctions:
        """Addresses of the calls that the engine makes."""
        return self.driver.engine_functions()

    def pointer_device(self, ptr: int) -> int | None:
        """The device whose memory an address lies in, or None."""
        with self.current():
            return self.driver.pointer_device(ptr)
