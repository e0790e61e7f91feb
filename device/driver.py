"""The protocol of a GPU vendor's driver and run-time compiler: the calls that `GpuRuntime` is made of.

CUDA's driver API and HIP's are twins. Where they differ, in names, in a binding's results and in the nature of a
context, an implementation of this protocol hides it; everything else is written once, in gpu.py. Pointers,
streams, events, modules and functions are integers. Every call raises DriverError where the driver reports a failure,
and acts on the calling thread's current context.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from proxyccl.device.base_runtime import AllocationCalls, EngineFunctions, StreamOperationCalls, StreamOrderCalls


class DeviceInfo(Struct, frozen=True):
    """A driver's description of a device.

    Attributes:
        name: the vendor's name for it.
        device_id: names the physical device, the same in every process of the machine.
        architecture: the compiler's name of it: "sm_90", "gfx942".
        multiprocessors: SMs, or compute units.
        memory_bytes: size of its memory.
        pci_address: its PCI address, as sysfs names it: "0000:3b:00.0".
        orders_rdma_writes: whether its kernels see RDMA writes to its memory once they see a word that RDMA wrote
            after them, wherever that word lies.
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
        """The runtime whose kernels it compiles: "cuda" or "hip"."""
        ...

    def version(self) -> str:
        """Its name and version."""
        ...

    def options(self, architecture: str) -> tuple[str, ...]:
        """The options that every source of this library is compiled with, for a device's architecture."""
        ...

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """A loadable image. Raises CompileError with the compiler's messages."""
        ...


class Driver(Protocol):
    """A vendor's driver. One object a process; it holds no state of a device."""

    @property
    def runtime(self) -> str:
        """The runtime's name: "cuda" or "hip"."""
        ...

    @property
    def compiler(self) -> Compiler:
        """The compiler of the images that this driver loads."""
        ...

    @property
    def already_mapped(self) -> int:
        """The status of an import while older memory of the same address at its owner is mapped."""
        ...

    @property
    def out_of_memory(self) -> int:
        """The status that an allocation which does not fit gives."""
        ...

    @property
    def thread_stream(self) -> int:
        """The handle that means the calling thread's own default stream."""
        ...

    @property
    def legacy_stream(self) -> int:
        """The handle of the default stream that all threads share, which is ordered with each thread's own."""
        ...

    @property
    def loads_lazily(self) -> bool:
        """Whether a kernel's first launch may load it, and hold up every other call of the process meanwhile."""
        ...

    @property
    def queue_limit(self) -> str | None:
        """The setting by which streams share fewer of a device's queues than usual, such as
        ``CUDA_DEVICE_MAX_CONNECTIONS=1``; None if there is none.
        """
        ...

    def versions(self) -> str:
        """Versions of the driver, its binding and the compiler, in words."""
        ...

    def error_text(self, status: int) -> str:
        """The driver's own name and text for a status."""
        ...

    # -- devices and contexts ---

    def device_count(self) -> int:
        """Number of devices that this process may use."""
        ...

    def device(self, ordinal: int) -> DeviceInfo:
        """The description of device number `ordinal`."""
        ...

    def context(self, ordinal: int) -> int:
        """The device's primary context, which the vendor's runtime and other libraries share."""
        ...

    def current(self) -> int | None:
        """The calling thread's current context, or None."""
        ...

    def make_current(self, context: int) -> None:
        """Makes a context the calling thread's current one."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the current context."""
        ...

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether kernels of device `ordinal` can touch memory of device `peer`."""
        ...

    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        """Whether the link from device `ordinal` to device `peer` adds atomically."""
        ...

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current context reach a peer's memory. Doing it again is not an error."""
        ...

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        """Device memory; its contents are undefined."""
        ...

    def allocate_block(self, nbytes: int) -> int:
        """Device memory like that of `allocate`, whose handles processes of other PID namespaces can open.

        Raises RuntimeUnavailableError if the driver has none.
        """
        ...

    def free(self, ptr: int) -> None:
        """Frees memory of `allocate` or `allocate_block`. Waits for the work that may use it."""
        ...

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Base and size of the allocation that contains `nbytes` at an address, or of several that were mapped side
        by side; too small a size if the bytes leave them.
        """
        ...

    def memory_left(self) -> tuple[int, int]:
        """Bytes of the current device's memory that are free, and all."""
        ...

    def pointer_device(self, ptr: int) -> int | None:
        """The device that memory belongs to, or None if it does not belong to a device."""
        ...

    def allocation_id(self, ptr: int) -> int:
        """A number of the allocation that contains an address; another allocation at the same address has another
        number."""
        ...

    def export_memory(self, base: int, size: int) -> bytes:
        """A handle, of at most 64 bytes, by which other processes map the result of `address_range`.

        It may keep the memory from being freed until `end_export`.
        """
        ...

    def end_export(self, handle: bytes) -> None:
        """Ends an `export_memory`: nobody needs to open the handle from now on."""
        ...

    def import_memory(self, handle: bytes) -> int:
        """Maps memory of another process, for the current context; returns its base. OSError means that the process
        which exported it does not hand it over.
        """
        ...

    def release_memory(self, base: int) -> None:
        """Unmaps memory of `import_memory`."""
        ...

    def dmabuf(self, base: int, nbytes: int) -> int:
        """A file descriptor of the DMA-BUF of whole pages of device memory, for other devices' drivers. The caller
        closes it.
        """
        ...

    def register_host(self, ptr: int, nbytes: int) -> None:
        """Pins host memory and maps it for all devices."""
        ...

    def unregister_host(self, ptr: int) -> None:
        """Undoes `register_host`."""
        ...

    def host_device_pointer(self, ptr: int) -> int:
        """The current device's address of registered host memory."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy between any two addresses."""
        ...

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Queues the setting of bytes."""
        ...

    # -- streams and events ---

    def create_stream(self, *, first: bool = False) -> int:
        """A stream that does not wait for the legacy default stream.

        Args:
            first: whether its kernels' blocks are placed before those of other streams' kernels that wait for room.
        """
        ...

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream; its queued work still runs."""
        ...

    def stream_query(self, stream: int) -> bool:
        """Whether all queued work is done."""
        ...

    def stream_synchronize(self, stream: int) -> None:
        """Waits until all queued work is done."""
        ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Makes later work of the stream wait for an event's last record."""
        ...

    def relax_capture(self, mode: int | None = None) -> int:
        """Lets the calling thread make calls that a capture in progress elsewhere would forbid, and returns the
        previous mode; with `mode`, restores it.
        """
        ...

    def create_event(self, *, times: bool = True) -> int:
        """An event, which costs less if it does not record its time."""
        ...

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Marks the stream's current end."""
        ...

    def event_query(self, event: int) -> bool:
        """Whether the marked point was reached."""
        ...

    def event_synchronize(self, event: int) -> None:
        """Waits for the marked point."""
        ...

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between two events that were reached."""
        ...

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads an image into the current context."""
        ...

    def unload_module(self, module: int) -> None:
        """Unloads a module, whose kernels are no longer launched. Waits for those that run."""
        ...

    def module_function(self, module: int, name: str) -> int:
        """A kernel of a module."""
        ...

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """Address and size of a module's variable."""
        ...

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Lets a kernel be launched with this much dynamic shared memory."""
        ...

    # -- addresses for callers in C ---

    def engine_functions(self) -> EngineFunctions:
        """The calls that the proxy's engine makes."""
        ...

    def stream_operation_calls(self) -> StreamOperationCalls:
        """The calls for words of memory in a stream; the context is left to the caller."""
        ...

    def stream_order_calls(self) -> StreamOrderCalls:
        """The calls that order streams by events."""
        ...

    def allocation_calls(self) -> AllocationCalls:
        """The calls that allocate and number memory; the context is left to the caller."""
        ...

    def stream_query_address(self) -> int:
        """The address of `stream_query`'s call."""
        ...

    def launch_address(self) -> int:
        """The address of the launch call, with cuLaunchKernel's signature."""
        ...

    def current_address(self) -> int:
        """The address of a call that stores the calling thread's current context in the word that it is given."""
        ...
