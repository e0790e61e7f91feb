"""A GPU vendor's driver and run-time compiler: the calls that `GpuRuntime` is made of.

CUDA's driver API and HIP's are twins, so a call is made by CUDA's name without its prefix. Methods exist for calls with
several callers, and for calls that differ between the vendors in more than the name; the vendors' classes implement the
latter. Pointers, streams, events, modules and functions are integers. Every call raises DriverError where the driver
reports a failure, and acts on the calling thread's current context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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

All later calls into that context also return an error status. Other processes' contexts are not affected. Source:
cuda.h, on CUresult ("the process ... must be terminated and relaunched").
"""

# Statuses, flags and modes have the same numbers in CUDA and in HIP.
_OUT_OF_MEMORY, _ALREADY_MAPPED, _NOT_READY, _PEER_ACCESS_ALREADY_ENABLED = 2, 208, 600, 704
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING = 1, 2
REGISTER_PORTABLE_AND_MAPPED = 1 | 2
CAPTURE_MODE_RELAXED = 2
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


class DeviceInfo(Struct, frozen=True):
    """A driver's description of a device.

    Attributes:
        name: the vendor's name for the device.
        device_id: the name of the physical device, the same in every process of the machine.
        architecture: the compiler's name of the architecture, such as "sm_90" or "gfx942".
        multiprocessors: the number of SMs or compute units.
        memory_bytes: size of the device's memory.
        pci_address: the PCI address in the form of sysfs: "0000:3b:00.0".
        orders_rdma_writes: whether kernels that see a word written by RDMA, in any memory, also see earlier RDMA writes
            to the device's memory.
    """

    name: str
    device_id: str
    architecture: str
    multiprocessors: int
    memory_bytes: int
    pci_address: str
    orders_rdma_writes: bool


class Compiler(Protocol):
    """A vendor's run-time compiler. It needs no device and no driver."""

    @property
    def runtime(self) -> str:
        """The runtime for which this compiler compiles: "cuda" or "hip"."""

    def version(self) -> str:
        """Returns the compiler's name and version."""

    def options(self, architecture: str) -> tuple[str, ...]:
        """Returns the options for all sources of this library, for a device's architecture."""

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """Compiles a source to a loadable image. Raises CompileError with the compiler's messages."""


class Driver(ABC):
    """A vendor's driver. A process has one such object, which holds no state of a device.

    Attributes:
        runtime: the runtime's name: "cuda" or "hip".
        compiler: the compiler of the images that this driver loads.
        already_mapped: the status of an import while this process still maps older memory that had the same address at
            its owner.
        out_of_memory: the status of an allocation that does not fit.
        thread_stream: the handle that means the calling thread's own default stream.
        legacy_stream: the handle of the default stream that all threads share, which is ordered with each thread's own.
    """

    runtime: ClassVar[str]
    compiler: Compiler
    already_mapped, out_of_memory = _ALREADY_MAPPED, _OUT_OF_MEMORY
    thread_stream, legacy_stream = 2, 0  # CU_STREAM_PER_THREAD, hipStreamPerThread

    _PREFIX: ClassVar[str]
    _OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """The vendor's names of calls, by CUDA's names, where the two differ. Names are without prefixes."""

    # -- the binding ---

    @abstractmethod
    def _status_of(self, name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
        """Makes the binding's call of this name. Returns its status and results."""

    @abstractmethod
    def _address_of(self, name: str) -> int:
        """Returns the address of the driver's call of this name."""

    @abstractmethod
    def error_text(self, status: int) -> str:
        """Returns the driver's own name and text for a status."""

    def _name(self, call: str) -> str:
        return self._PREFIX + self._OTHER_NAMES.get(call, call)

    def call(self, call: str, *args: Any, allowed: Any = (), of: str = "") -> Any:
        """Makes a call, and returns its results. Raises DriverError for a status that is not allowed.

        Args:
            call: CUDA's name of the call, without its prefix.
            args: the arguments of the call.
            allowed: the statuses that are not errors, other than 0.
            of: the object of the call, for errors.
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
        """Whether the work that a query, named as for `call`, asks about is done."""
        name = self._name(call)
        status, _ = self._status_of(name, handle)
        if status not in (0, _NOT_READY):
            raise DriverError(name, status, self.error_text(status))
        return status == 0

    def address(self, call: str) -> int:
        """Returns the address of a call, named as for `call`, for callers in C."""
        return self._address_of(self._name(call))

    # -- the process ---

    @abstractmethod
    def versions(self) -> str:
        """Returns the versions of the driver, its binding and the compiler, in words."""

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
        """Returns the calling thread's current context; None if it has none."""

    def make_current(self, context: int) -> None:
        """Makes a context the calling thread's current one."""
        self.call("CtxSetCurrent", context)

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether kernels of device `ordinal` can access memory of device `peer`."""
        return bool(self.call("DeviceCanAccessPeer", ordinal, peer))

    @abstractmethod
    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        """Whether the link from device `ordinal` to device `peer` carries atomic adds."""

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current context access a peer's memory. A repeated call is not an error."""
        self.call("CtxEnablePeerAccess", peer_context, 0, allowed=(_PEER_ACCESS_ALREADY_ENABLED,))

    # -- memory ---

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocates device memory; its contents are undefined."""

    @abstractmethod
    def allocate_block(self, nbytes: int) -> int:
        """Allocates device memory whose handles processes of other PID namespaces can also open.

        Raises RuntimeUnavailableError if the driver does not support such memory.
        """

    def free(self, ptr: int) -> None:
        """Frees memory of `allocate` or `allocate_block`. Waits for the work that may use it."""
        self.release("MemFree", ptr)

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Returns base and size of the allocation that contains `nbytes` at an address, or of several such allocations
        that are mapped side by side. The size is below `nbytes` if the bytes extend past these allocations.
        """
        base, size = self.call("MemGetAddressRange", ptr)
        return int(base), int(size)

    @abstractmethod
    def pointer_device(self, ptr: int) -> int | None:
        """Returns the device that owns memory; None if no device does."""

    @abstractmethod
    def allocation_id(self, ptr: int) -> int:
        """Returns the number of the allocation that contains an address. A later allocation at the same address has
        another number."""

    @abstractmethod
    def export_memory(self, base: int, size: int) -> bytes:
        """Returns a handle, of at most 64 bytes, by which other processes map a range that `address_range` returned.

        An export may keep the memory from being freed until `end_export`.
        """

    @abstractmethod
    def end_export(self, handle: bytes) -> None:
        """Ends an `export_memory`, after which other processes can't rely on the handle."""

    @abstractmethod
    def import_memory(self, handle: bytes) -> int:
        """Maps memory of another process for the current context, and returns the address of its first byte. Raises
        OSError if the exporting process does not hand the memory over.
        """

    def release_memory(self, base: int) -> None:
        """Unmaps memory of `import_memory`."""
        self.release("IpcCloseMemHandle", base)

    @abstractmethod
    def dmabuf(self, base: int, nbytes: int) -> int:
        """Returns a file descriptor of a DMA-BUF of whole pages of device memory, for other devices' drivers. The
        caller closes it.
        """

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy between any two addresses."""
        self.call("MemcpyAsync", dst, src, nbytes, stream)

    # -- streams and events ---

    def create_stream(self, *, first: bool = False) -> int:
        """Creates a stream that does not wait for the legacy default stream.

        Args:
            first: whether blocks of its kernels are scheduled before waiting blocks of other streams' kernels.
        """
        priority = self.call("CtxGetStreamPriorityRange")[1] if first else 0
        return int(self.call("StreamCreateWithPriority", _STREAM_NON_BLOCKING, priority))

    @abstractmethod
    def relax_capture(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        """Sets the calling thread's capture mode, and returns the previous mode. By default the new mode allows calls
        that a capture in progress on another thread would forbid.
        """

    def create_event(self, *, times: bool = True) -> int:
        """Creates an event. Without `times` the event does not record its time, and recording it takes less time."""
        return int(self.call("EventCreate", 0 if times else _EVENT_DISABLE_TIMING))

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads an image into the current context."""
        return int(self.call("ModuleLoadData", image))

    def module_function(self, module: int, name: str) -> int:
        """Returns the handle of a kernel of a module."""
        return int(self.call("ModuleGetFunction", module, name.encode(), of=name))

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """Returns address and size of a module's variable."""
        address, nbytes = self.call("ModuleGetGlobal", module, name.encode(), of=name)
        return int(address), int(nbytes)

    @abstractmethod
    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Allows launches of a kernel with this much dynamic shared memory."""

    @abstractmethod
    def _own_calls(self) -> dict[str, int]:
        """Returns the addresses of those `calls` that differ between vendors."""

    def calls(self) -> DriverCalls:
        """Returns the addresses of the driver's calls for callers in C. The runtime sets the field `context`."""
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
            is_capturing=self.address("StreamIsCapturing"),
            exchange_capture_mode=self.address("ThreadExchangeStreamCaptureMode"),
            relaxed=CAPTURE_MODE_RELAXED,
            free=self.address("MemFree"),
            pointer_attribute=self.address("PointerGetAttribute"),
            buffer_id=_BUFFER_ID,
            **self._own_calls(),
        )
