"""The base class of the vendors' drivers, and the protocol of their run-time compilers.

HIP mirrors CUDA's driver API, so `Driver.call` takes CUDA's name of a call without the prefix "cu". Calls that differ
between the vendors in more than the name are abstract methods. Pointers, streams, events, modules and functions are
integers. Every call acts on the calling thread's current context, and raises DriverError if the driver reports a
failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from msgspec import Struct

from proxyccl.device.base_runtime import DriverCalls
from proxyccl.device.errors import DriverError

LOST_CONTEXT = {
    214: "memory had an error that could not be corrected",
    220: "NVLink had an error that could not be corrected",
    700: "a kernel accessed an illegal address",
    702: "a kernel ran longer than the system allows",
    710: "a kernel's assertion failed",
    714: "a kernel's stack was corrupted",
    715: "a kernel executed an illegal instruction",
    716: "a kernel accessed a misaligned address",
    717: "a kernel accessed an address space that its instruction does not reach",
    718: "a kernel's program counter left its program",
    719: "a kernel failed",
}
"""The statuses of errors that end the process's context, and their descriptions.

All later calls into such a context fail too. Other processes' contexts are not affected.
"""

# Statuses, flags and modes have the same numbers in CUDA and in HIP.
_OUT_OF_MEMORY, _ALREADY_MAPPED, _NOT_READY, _PEER_ACCESS_ALREADY_ENABLED = 2, 208, 600, 704
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING = 1, 2
REGISTER_PORTABLE_AND_MAPPED = 1 | 2
CAPTURE_MODE_RELAXED = 2
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


class DeviceInfo(Struct, frozen=True):
    """A driver's description of a device."""

    name: str  # the vendor's name of the device's model
    device_id: str  # identifies the physical device, by the same text in every process of the machine
    architecture: str  # the architecture's name in compiler options, such as "sm_90" or "gfx942"
    multiprocessors: int  # the number of SMs or compute units
    memory_bytes: int  # size of the device's memory
    pci_address: str  # the PCI address in the form of sysfs: "0000:3b:00.0"
    orders_rdma_writes: bool  # see `BaseRuntime.orders_rdma_writes`


class Compiler(Protocol):
    """A vendor's run-time compiler. A compiler needs neither a device nor a driver."""

    runtime: str  # the runtime for which this compiler compiles: "cuda" or "hip"

    def version(self) -> str:
        """Returns the compiler's name and version."""

    def options(self, architecture: str) -> tuple[str, ...]:
        """Returns the options that all sources of this library need on an architecture."""

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """Compiles a source to a loadable image. Raises CompileError with the compiler's messages."""


class Blocks(Protocol):
    """Memory of `Driver.allocate_block` that can be suspended: its physical memory is freed, and its addresses stay
    reserved.
    """

    def word(self, ptr: int) -> Any:
        """Returns a C pointer to the word that holds the number of the block that contains an address, and 0 once the
        block is freed; None for other memory.
        """

    def suspend(self, bases: Iterable[int]) -> None:
        """Frees the physical memory of the blocks at `bases`, which no work may still use and no process may map."""

    def resume(self, bases: Sequence[int]) -> None:
        """Allocates physical memory for suspended blocks. If it raises DriverError, the blocks stay suspended."""

    def set_mapped(self, process: bytes, bases: Collection[int], mapped: bool) -> None:
        """Implements `BaseRuntime.set_mapped`. Raises DriverError, or OSError if `process` sends no descriptors."""


class Driver(ABC):
    """A vendor's driver. The object holds no state of a device, and a process needs only one.

    Attributes:
        runtime: the runtime's name: "cuda" or "hip".
        compiler: the compiler of the images that this driver loads.
        already_mapped: the status of an import if this process still maps freed memory that had the same address in the
            exporting process.
        out_of_memory: the status of an allocation that does not fit.
        blocks: suspends and resumes memory of `allocate_block`; None if the driver can't.
        thread_stream: the handle that means the calling thread's own default stream.
        legacy_stream: the handle of the legacy default stream, which all threads share.
    """

    runtime: ClassVar[str]
    compiler: Compiler
    blocks: Blocks | None = None
    already_mapped, out_of_memory = _ALREADY_MAPPED, _OUT_OF_MEMORY
    thread_stream, legacy_stream = 2, 0  # CU_STREAM_PER_THREAD, hipStreamPerThread

    _PREFIX: ClassVar[str]
    _OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """The vendor's names of calls that CUDA names differently, by CUDA's names. Both are without prefixes."""

    # -- the binding ---

    @abstractmethod
    def _status_of(self, name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
        """Calls a function of the Python binding. Returns its status and results."""

    @abstractmethod
    def _address_of(self, name: str) -> int:
        """Returns the address of a driver function, for callers in C."""

    @abstractmethod
    def error_text(self, status: int) -> str:
        """Returns the driver's name and description of a status."""

    def _name(self, call: str) -> str:
        return self._PREFIX + self._OTHER_NAMES.get(call, call)

    def call(self, call: str, *args: Any, allowed: Any = (), of: str = "") -> Any:
        """Makes a call, and returns its results. Raises DriverError for a status that is not allowed.

        Args:
            call: CUDA's name of the call, without its prefix.
            args: the arguments of the call.
            allowed: the statuses that are not errors, other than 0.
            of: the name of the kernel or variable, for the error's text.
        """
        name = self._name(call)
        status, results = self._status_of(name, *args)
        if status and status not in allowed:
            raise DriverError(f"{name}({of})" if of else name, status, self.error_text(status))
        return results[0] if len(results) == 1 else results

    def release(self, call: str, *args: Any) -> None:
        """Makes a call that frees a resource. A lost context is not an error, because the resource was lost with the
        context.
        """
        self.call(call, *args, allowed=LOST_CONTEXT)

    def is_done(self, call: str, handle: int) -> bool:
        """Returns whether the work of a stream or event is done. `call` is the driver's query, such as "EventQuery"."""
        name = self._name(call)
        status, _ = self._status_of(name, handle)
        if status not in (0, _NOT_READY):
            raise DriverError(name, status, self.error_text(status))
        return status == 0

    def address(self, call: str) -> int:
        """Returns the address of a driver function, given CUDA's name without prefix."""
        return self._address_of(self._name(call))

    # -- the process ---

    @abstractmethod
    def versions(self) -> str:
        """Returns a text with the versions of the driver, its Python binding and the compiler."""

    @property
    def loads_lazily(self) -> bool:
        """Implements `BaseRuntime.loads_lazily`."""
        return False

    @property
    def queue_limit(self) -> str | None:
        """Implements `BaseRuntime.queue_limit`."""
        return None

    # -- devices and contexts ---

    @abstractmethod
    def device_count(self) -> int:
        """Returns the number of devices that this process may use."""

    @abstractmethod
    def device(self, ordinal: int) -> DeviceInfo:
        """Returns the description of device number `ordinal`."""

    @abstractmethod
    def context(self, ordinal: int) -> int:
        """Returns the device's primary context, which the vendor's runtime and other libraries share."""

    @abstractmethod
    def current(self) -> int | None:
        """Returns the calling thread's current context, or None."""

    def make_current(self, context: int) -> None:
        """Makes a context the calling thread's current one."""
        self.call("CtxSetCurrent", context)

    def current_device(self) -> int:
        """Returns the number of the calling thread's current device; 0, as in vendors' runtimes, if none is current."""
        return 0 if self.current() is None else int(self.call("CtxGetDevice"))

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether kernels of device `ordinal` can access memory of device `peer`."""
        return bool(self.call("DeviceCanAccessPeer", ordinal, peer))

    @abstractmethod
    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        """Whether the link from device `ordinal` to device `peer` supports atomic adds."""

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current context access the memory of a peer's context. Does nothing if access is already enabled."""
        self.call("CtxEnablePeerAccess", peer_context, 0, allowed=(_PEER_ACCESS_ALREADY_ENABLED,))

    # -- memory ---

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocates device memory; its contents are undefined."""

    @abstractmethod
    def allocate_block(self, nbytes: int) -> int:
        """Allocates device memory that processes of other PID namespaces can also map.

        Raises RuntimeUnavailableError if the driver can't share memory between namespaces.
        """

    def free(self, ptr: int) -> None:
        """Frees memory from `allocate` or `allocate_block`, after waiting for the device."""
        self.release("MemFree", ptr)

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Returns base and size of the allocation, or of the adjacent allocations, that contain a range. If the range
        extends past the allocations, the returned range ends before it.
        """
        base, size = self.call("MemGetAddressRange", ptr)
        return int(base), int(size)

    def free_stacks(self) -> None:
        """Frees the memory that the current context reserves for the stacks of kernels' threads, where the driver can.
        The driver reserves memory again if a kernel needs it.
        """
        return

    @abstractmethod
    def pointer_device(self, ptr: int) -> int | None:
        """Returns the device that owns memory; None if no device does."""

    @abstractmethod
    def allocation_id(self, ptr: int) -> int:
        """Returns the driver's number of the allocation that contains an address. The driver never reuses a number."""

    @abstractmethod
    def export_memory(self, base: int, size: int) -> bytes:
        """Returns a handle, of at most 64 bytes, by which other processes map a range that `address_range` returned.

        Some drivers keep the memory allocated until `end_export`, even if its owner frees it.
        """

    @abstractmethod
    def end_export(self, handle: bytes) -> None:
        """Invalidates a handle from `export_memory`."""

    @abstractmethod
    def import_memory(self, handle: bytes) -> int:
        """Maps memory that another process exported, and returns its address. Raises OSError if the exporting process
        sends no descriptors for the memory.
        """

    def release_memory(self, base: int) -> None:
        """Unmaps memory that `import_memory` mapped."""
        self.release("IpcCloseMemHandle", base)

    @abstractmethod
    def dmabuf(self, base: int, nbytes: int) -> int:
        """Returns the file descriptor, which the caller closes, of a DMA-BUF of whole pages of device memory."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy between any two addresses."""
        self.call("MemcpyAsync", dst, src, nbytes, stream)

    # -- streams and events ---

    def create_stream(self, *, first: bool = False) -> int:
        """Creates a stream that does not wait for the legacy default stream.

        Args:
            first: whether the stream gets the highest priority, so that blocks of its kernels are scheduled first.
        """
        priority = self.call("CtxGetStreamPriorityRange")[1] if first else 0
        return int(self.call("StreamCreateWithPriority", _STREAM_NON_BLOCKING, priority))

    @abstractmethod
    def relax_capture(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        """Sets the calling thread's capture mode, and returns the previous mode. The default, relaxed mode allows calls
        that another thread's capture would forbid.
        """

    def create_event(self, *, times: bool = True) -> int:
        """Creates an event. Without `times` the event records no time, which is faster."""
        return int(self.call("EventCreate", 0 if times else _EVENT_DISABLE_TIMING))

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads an image into the current context."""
        return int(self.call("ModuleLoadData", image))

    def module_function(self, module: int, name: str) -> int:
        """Returns the handle of a kernel of a module."""
        return int(self.call("ModuleGetFunction", module, name.encode(), of=name))

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """Returns address and bytes of a module's variable."""
        address, nbytes = self.call("ModuleGetGlobal", module, name.encode(), of=name)
        return int(address), int(nbytes)

    @abstractmethod
    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Allows launches of a kernel with up to `nbytes` of dynamic shared memory."""

    @abstractmethod
    def _own_calls(self) -> dict[str, int]:
        """Returns the fields of `DriverCalls` that differ between the vendors."""

    def calls(self) -> DriverCalls:
        """Returns the addresses of the driver's calls, without `context`, which the runtime sets."""
        return DriverCalls(
            set=self.address("MemsetD8Async"),
            write64=self.address("StreamWriteValue64"),
            write32=self.address("StreamWriteValue32"),
            event_record=self.address("EventRecord"),
            event_query=self.address("EventQuery"),
            wait_event=self.address("StreamWaitEvent"),
            launch=self.address("LaunchKernel"),
            current=self.address("CtxGetCurrent"),
            make_current=self.address("CtxSetCurrent"),
            exchange_capture_mode=self.address("ThreadExchangeStreamCaptureMode"),
            relaxed=CAPTURE_MODE_RELAXED,
            free=self.address("MemFree"),
            pointer_attribute=self.address("PointerGetAttribute"),
            buffer_id=_BUFFER_ID,
            **self._own_calls(),
        )
