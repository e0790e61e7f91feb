"""Allocates, pins and shares memory of a GPU, through any vendor's `Driver`."""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.base_runtime import Allocation, Allocations, Memory
from proxyccl.device.driver import REGISTER_PORTABLE_AND_MAPPED, Blocks, Driver
from proxyccl.device.errors import (
    AlreadyMappedError,
    ArgumentError,
    DriverError,
    ResourceError,
    RuntimeUnavailableError,
)
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.gpu.unused_memory import UnusedMemory, is_held
from proxyccl.device.in_flight import InFlight
from proxyccl.device.memory.handle_kinds import DEVICE_MEMORY, NOT_PASSED, passes_namespaces, sharing_of
from proxyccl.device.memory.lease_cache import LeaseCache
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.owned import Owned
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view
from proxyccl.device.runtime import Runtime

_MOST_KEPT_BYTES, _MOST_KEPT_PINS = 1 << 30, 4096
"""Maximum bytes and pieces of unused memory that stay pinned. The oldest excess memory is unpinned, even if this waits
for kernels.
"""


class GpuMemory(Owned):
    """Device memory that this process allocated, or mapped from another process.

    Freeing waits for the device's kernels, and these may wait for the rank whose thread runs garbage collection. So
    memory without references is not freed by garbage collection, but when its runtime next waits for the device or runs
    out of memory.
    """

    def __init__(
        self, ptr: int, nbytes: int, later: Callable[[Callable[[], None]], None], release: Callable[[], None]
    ) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._release = release
        super().__init__(later, release)

    def close(self) -> None:
        """Frees or unmaps the memory, after waiting for the device."""
        if self._finalizer.detach() is not None and self._process.is_here:
            self._release()


class GpuAllocation(GpuMemory):
    """Device memory that this process allocated."""

    def __init__(
        self,
        ptr: int,
        nbytes: int,
        unused: UnusedMemory,
        release: Callable[[], None],
        in_flight: InFlight,
    ) -> None:
        super().__init__(ptr, nbytes, functools.partial(unused.append_allocation, ptr), release)
        self._in_flight = in_flight

    def close(self) -> None:
        """Waits for this thread's launches, and frees the memory. If other devices' kernels may use the memory, it is
        freed later."""
        if self.closed:
            return
        if is_held():
            self._finalizer()
        else:
            self._in_flight.wait()
            super().close()


class GpuPinnedMemory(GpuMemory):
    """Shared host memory that the device can access. `ptr` is the address for the device."""

    def __init__(self, ptr: int, shared: SharedMemory, unused: UnusedMemory, release: Callable[[], None]) -> None:
        super().__init__(ptr, shared.nbytes, unused.append, release)
        self.shared, self.host_ptr, self.descriptor = shared, shared.ptr, shared.descriptor
        self.export = shared.export

    @property
    def handle(self) -> bytes:
        return self.shared.handle


class MemoryHandle:
    """The handle by which another process or another device maps device memory."""

    _LAYOUT = struct.Struct("<8s16sQqQQQQ64s")
    _MAGIC = DEVICE_MEMORY
    SIZE = _LAYOUT.size

    @classmethod
    def pack(cls, device: int, base: int, allocation: int, offset: int, nbytes: int, raw: bytes) -> bytes:
        """Returns a handle of the range of `nbytes` at `offset` in the allocation number `allocation` at address
        `base`."""
        return cls._LAYOUT.pack(
            cls._MAGIC, forks.here().token, proc_view(), device, base, allocation, offset, nbytes, raw
        )

    @classmethod
    def unpack(cls, handle: bytes) -> tuple[bool, int, int, int, int, int, bytes]:
        """Returns (whether this process made the handle, device, base, allocation, offset, nbytes, the driver's
        handle)."""
        if len(handle) != cls.SIZE:
            raise ArgumentError(
                "handle", f"expected a handle of device memory, {cls.SIZE} bytes, not {len(handle)} bytes"
            )
        magic, process, view, device, base, allocation, offset, nbytes, raw = cls._LAYOUT.unpack(handle)
        if magic != cls._MAGIC:
            raise ArgumentError("handle", "expected a handle of device memory: its first bytes are wrong")
        own = process == forks.here().token
        here = proc_view()
        if not own and view and here and view != here and not passes_namespaces(handle):
            raise ArgumentError("handle", f"{NOT_PASSED}: the owner is in another namespace")
        return own, device, base, allocation, offset, nbytes, raw

    @classmethod
    def process_of(cls, handle: bytes) -> bytes:
        """Returns the token of the process that made a handle."""
        token: bytes = cls._LAYOUT.unpack(handle)[1]
        return token


class _PinHolds:
    """Counts the holds on each device: while a device has a hold, its kernels may wait for this process.

    CUDA's call that unpins (`cuMemHostUnregister`) waits for the kernels of all devices of the process (seen with
    driver 580). If such a kernel waits for a launch of the calling thread, or for a proxy's copy, which waits for the
    driver, the result is a deadlock. So unused memory stays pinned while other devices have holds.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because garbage collection may free memory anywhere
        self._holds: Counter[tuple[str, int]] = Counter()

    def unchanged(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which other threads can't begin or end a hold."""
        return self._lock

    def begin(self, device: tuple[str, int]) -> None:
        with self._lock:
            self._holds[device] += 1

    def end(self, device: tuple[str, int]) -> None:
        with self._lock:
            self._holds[device] -= 1
            self._holds = +self._holds

    def elsewhere(self, device: tuple[str, int]) -> bool:
        with self._lock:
            return any(other != device for other in self._holds)


class _Pin(Struct, frozen=True):
    """A range of pinned host memory."""

    driver: Driver
    start: int
    nbytes: int
    addresses: object  # an object that keeps the address range from being reused; None if the memory's owner does this

    def unpin(self) -> None:
        """Unpins the memory, in the current context because the context that pinned the memory may be lost."""
        self.driver.release("MemHostUnregister", self.start)


class GpuMemoryRuntime(Runtime):
    """The part of a GPU's runtime that allocates, pins, exports and maps memory.

    Args:
        driver: the vendor's driver.
        device: the device's number, among the devices that this process may use.

    Raises:
        RuntimeUnavailableError: this process sees no device.
        ArgumentError: there is no device of that number.
    """

    _pin_holds: ClassVar[_PinHolds] = _PinHolds()
    _pinned: ClassVar[LeaseCache[Hashable, _Pin]] = LeaseCache(
        _Pin.unpin, keep=_MOST_KEPT_PINS, weigh=lambda pin: pin.nbytes, keep_weight=_MOST_KEPT_BYTES
    )
    # Mappings of other processes' memory: each has its address, and the driver's function that unmaps it.
    _imported: ClassVar[LeaseCache[Hashable, tuple[int, Callable[[int], None]]]] = LeaseCache(
        lambda mapping: mapping[1](mapping[0])
    )

    def __init__(self, driver: Driver, device: int) -> None:
        count = driver.device_count()
        if count == 0:
            raise RuntimeUnavailableError(f"{driver.runtime}: this process sees no device")
        number = find_integer(device)
        if number is None or not 0 <= number < count:
            devices = f"{driver.runtime} devices, 0 to {count - 1}"
            raise ArgumentError("device", f"{device!r} is not one of the {count} {devices}")
        self.driver, self.name, self.device = driver, driver.runtime, number
        self.info = driver.device(number)
        self.device_id = self.info.device_id
        self.in_flight = InFlight(self)
        self.context = DeviceContext(driver, number)
        self.calls = replace(driver.calls(), context=self.context.handle)
        # The device's memory without references, which is freed when a call next waits for the device.
        self.unused = UnusedMemory.on(driver.runtime, number)
        self._new = driver.allocate

    def current(self) -> contextlib.AbstractContextManager[None]:
        return self.context.current()

    def share_across_namespaces(self) -> None:
        """Makes `allocate` use the driver's virtual memory, whose blocks are shared by file descriptors."""
        self._new = self.driver.allocate_block

    def allocate(self, nbytes: int) -> GpuMemory:
        return self._take(nbytes, self._new)

    def allocate_block(self, nbytes: int) -> GpuMemory:
        return self._take(nbytes, self.driver.allocate_block)

    def _take(self, nbytes: int, new: Callable[[int], int]) -> GpuMemory:
        if nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes}")
        with self.current():
            if nbytes > self.info.memory_bytes:
                raise self._full(nbytes)
            try:
                ptr = self._allocate(nbytes, new)
            except DriverError as error:
                if error.status == self.driver.out_of_memory:
                    raise self._full(nbytes) from None
                raise
            release = functools.partial(self.context.call, self.driver.free, ptr)
            memory = GpuAllocation(ptr, nbytes, self.unused, release, self.in_flight)
        self.fill(ptr, 0, nbytes)
        return memory

    def _full(self, nbytes: int) -> ResourceError:
        return ResourceError(
            f"can't allocate {nbytes} bytes on {self.driver.runtime} device {self.device}, "
            f"{self.info.name} of {self.info.memory_bytes} bytes"
        )

    def _allocate(self, nbytes: int, new: Callable[[int], int]) -> int:
        try:
            return new(nbytes)
        except DriverError as error:
            if error.status != self.driver.out_of_memory or not self.unused:
                raise
            self.in_flight.wait()
            self.unused.free()
            return new(nbytes)

    @property
    def _blocks(self) -> Blocks:
        if self.driver.blocks is None:
            raise RuntimeUnavailableError(f"{self.name}: memory of this vendor's GPUs can't be suspended")
        return self.driver.blocks

    def suspend(self, blocks: Sequence[Memory]) -> None:
        self.context.call(self._blocks.suspend, [block.ptr for block in blocks])

    def resume(self, blocks: Sequence[Memory]) -> None:
        with self.current():
            try:
                self._blocks.resume([block.ptr for block in blocks])
            except DriverError as error:
                if error.status == self.driver.out_of_memory:
                    raise self._full(sum(block.nbytes for block in blocks)) from None
                raise
        for block in blocks:
            self.fill(block.ptr, 0, block.nbytes)

    def set_mapped(self, process: bytes, bases: Collection[int], mapped: bool) -> None:
        if bases:
            try:
                self.context.call(self._blocks.set_mapped, process, bases, mapped)
            except (DriverError, OSError) as error:
                raise ArgumentError("handle", f"suspended memory can't be mapped again: {error}") from None

    def keep_pins(self) -> Callable[[], None]:
        holds, here, pinned, context = self._pin_holds, (self.name, self.device), self._pinned, self.context
        holds.begin(here)

        def end() -> None:
            with holds.unchanged(), context.current():
                holds.end(here)
                if not holds.elsewhere(here):
                    pinned.discard_idle()

        return end

    def allocate_pinned(self, nbytes: int) -> GpuPinnedMemory:
        return self._pin_shared(SharedMemory.allocate(nbytes))

    def open_pinned(self, handle: bytes) -> GpuPinnedMemory:
        return self._pin_shared(SharedMemory.open(handle))

    def adopt_pinned(self, descriptor: int, nbytes: int) -> GpuPinnedMemory:
        return self._pin_shared(SharedMemory.adopt(descriptor, nbytes))

    def _pin_shared(self, shared: SharedMemory) -> GpuPinnedMemory:
        # A process pins the memory once, whole and for all devices, because ranks that are threads share its address.
        start, nbytes = shared.mapped_range
        key, addresses = (self.driver.runtime, start), shared.addresses()
        pinned, holds, here, context = self._pinned, self._pin_holds, (self.name, self.device), self.context
        with contextlib.ExitStack() as undo, context.current():
            undo.callback(shared.close)
            pinned.acquire(key, lambda: self._pin(start, nbytes, addresses))
            undo.callback(pinned.release, key, keep=False)
            ptr = int(self.driver.call("MemHostGetDevicePointer", start, 0)) + shared.ptr - start
            undo.pop_all()

        def release() -> None:
            shared.close()
            with holds.unchanged(), context.current():
                pinned.release(key, keep=holds.elsewhere(here))

        return GpuPinnedMemory(ptr, shared, self.unused, release)

    def _pin(self, start: int, nbytes: int, addresses: object) -> _Pin:
        self.driver.call("MemHostRegister", start, nbytes, REGISTER_PORTABLE_AND_MAPPED)
        return _Pin(self.driver, start, nbytes, addresses)

    def pin(self, ptr: int, nbytes: int) -> GpuMemory:
        key = (self.driver.runtime, ptr, nbytes)
        self.unused.unpin(ptr, nbytes)
        with self.current():
            try:
                self._pinned.acquire(key, lambda: self._pin(ptr, nbytes, None))
            except DriverError as error:
                raise ResourceError(f"{nbytes} bytes at {ptr:#x} can't be pinned: {error}") from None
        release = functools.partial(self.context.call, functools.partial(self._pinned.release, key, keep=False))
        return GpuMemory(ptr, nbytes, functools.partial(self.unused.append_pin, ptr, nbytes), release)

    def export(self, ptr: int, nbytes: int) -> bytes:
        with self.current():
            try:
                base, size = self.driver.address_range(ptr, nbytes)
                if ptr + nbytes > base + size:
                    raise ArgumentError("array", f"{nbytes} bytes at {ptr:#x} extend past their allocation")
                allocation = self.driver.allocation_id(base)
                raw = self.driver.export_memory(base, size)
            except DriverError as error:
                raise ArgumentError(
                    "array",
                    f"this memory can't be shared between processes ({error}); allocate memory for peers with "
                    "Communicator.empty()",
                ) from None
        return MemoryHandle.pack(self.device, base, allocation, ptr - base, nbytes, raw)

    def end_export(self, handle: bytes) -> None:
        self.driver.end_export(MemoryHandle.unpack(handle)[-1])

    def open(self, handle: bytes) -> GpuMemory:
        """Maps memory that this process or another process of this machine exported."""
        own, device, base, allocation, offset, nbytes, raw = MemoryHandle.unpack(handle)
        if own:
            self._check_own(device, base, allocation, offset + nbytes)
        with self.current():
            # Another device's mapped blocks are imported even if they are this process's: peer access does not include
            # them, and their owner may unmap them at any moment.
            if own and (device == self.device or sharing_of(handle) == "IPC"):
                if device != self.device:
                    self.driver.enable_peer_access(self.driver.context(device))
                return GpuMemory(base + offset, nbytes, self.unused.append, lambda: None)
            # Ranges of one allocation share one mapping, because some drivers refuse to map an allocation twice.
            key = (self.context.handle, MemoryHandle.process_of(handle), device, base, allocation, raw)
            try:
                mapped, _ = self._imported.acquire(
                    key, lambda: (self.driver.import_memory(raw), self.driver.release_memory)
                )
            except (DriverError, OSError) as error:
                meanwhile = isinstance(error, DriverError) and error.status == self.driver.already_mapped
                kind = AlreadyMappedError if meanwhile else ArgumentError
                raise kind("handle", f"the memory can't be mapped: {error}") from None
        release = functools.partial(self.context.call, self._imported.release, key)
        memory = GpuMemory(mapped + offset, nbytes, self.unused.append, release)
        if not self._holds(mapped, offset + nbytes):
            memory.close()
            raise ArgumentError("handle", f"{nbytes} bytes at offset {offset} extend past the allocation")
        return memory

    def _holds(self, mapped: int, nbytes: int) -> bool:
        """Whether a mapping of another process's memory has at least `nbytes`. Returns True if the driver can't
        tell."""
        with self.current():
            try:
                base, size = self.driver.address_range(mapped, nbytes)
            except DriverError:  # some drivers do not report the size of another process's allocation
                return True
        return mapped + nbytes <= base + size

    def _check_own(self, device: int, base: int, allocation: int, end: int) -> None:
        """Raises ArgumentError if a handle that this process made is damaged, or if its memory was freed."""
        if not 0 <= device < self.driver.device_count():
            raise ArgumentError("handle", f"names device {device}, which this process does not have")
        with DeviceContext(self.driver, device).current():
            try:
                start, size = self.driver.address_range(base, end)
                found = self.driver.allocation_id(base)
            except DriverError:
                raise ArgumentError("handle", "names memory that this process has freed") from None
        unused = UnusedMemory.on(self.driver.runtime, device)
        if (start, found) != (base, allocation) or unused.has_allocation(base):
            raise ArgumentError("handle", "names memory that this process has freed")
        if end > size:
            raise ArgumentError("handle", f"names {end} bytes of an allocation of {size} bytes")

    def whole_allocation(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        with self.current():
            try:
                base, size = self.driver.address_range(ptr, nbytes)
            except DriverError:
                return None
        return (base, size) if ptr + nbytes <= base + size else None

    def allocations(self, ptr: int, nbytes: int) -> Allocations:
        found, at = [], ptr
        with self.current():
            try:
                while at < ptr + nbytes:
                    base, size = self.driver.address_range(at)
                    word = self.driver.blocks.word(at) if self.driver.blocks else None
                    found.append(Allocation(at, self.driver.allocation_id(at), word))
                    at = base + size
            except DriverError:
                return ()
        return tuple(found)

    def dmabuf(self, ptr: int, nbytes: int) -> tuple[int, int] | None:
        offset = ptr % mmap.PAGESIZE
        pages = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.current():
            try:
                return self.driver.dmabuf(ptr - offset, pages), offset
            except (DriverError, RuntimeUnavailableError):
                return None

    def memory_left(self) -> tuple[int, int]:
        with self.current():
            free, total = self.driver.call("MemGetInfo")
        return int(free), int(total)

    def free_later(self, ptr: int) -> None:
        self.unused.append_allocation(ptr, functools.partial(self.context.call, self.driver.free, ptr))

    def pointer_device(self, ptr: int) -> int | None:
        with self.current():
            return self.driver.pointer_device(ptr)
