"""AMD's driver as a `Driver`: hip-python over a machine's ROCm libraries.

HIP's calls are CUDA's under other names, with two differences that show here. A context is a device: calls act on the
calling thread's current one, so a context is known by its device's number. And memory is by default coherent between
devices only from kernel to kernel, so it is allocated uncached.
"""

from __future__ import annotations

import ctypes
import functools

from proxyccl.device.base_runtime import AllocationCalls, EngineFunctions, StreamOperationCalls, StreamOrderCalls
from proxyccl.device.driver import DeviceInfo
from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.hip_bindings import address_of, call, done, error_text, freed, hip, library, status_of
from proxyccl.device.gpu.hip_compiler import HipCompiler, compiler_version

_PER_THREAD_STREAM = 2  # hipStreamPerThread
_ORDERED_FOR_OWNER = 100  # hipGPUDirectRDMAWritesOrderingOwner
_MALLOC_UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not name


@functools.cache
def _initialise() -> None:
    try:
        status = int(hip.hipInit(0)[0])
    except RuntimeError as error:
        raise RuntimeUnavailableError(
            f"hip: ROCm's runtime library can't be loaded ({error}); install ROCm, or name its directory in ROCM_PATH"
        ) from None
    if status == hip.hipError_t.hipErrorNoDevice:
        raise RuntimeUnavailableError("hip: ROCm sees no device: there is no AMD GPU, or no access to /dev/kfd")
    if status:
        raise RuntimeUnavailableError(f"hip: the runtime can't be initialised: {error_text(status)}")
    check_versions(int(call("hipDriverGetVersion")), int(call("hipRuntimeGetVersion")))
    compiler_version()


def check_versions(driver: int, runtime: int) -> None:
    """Raises RuntimeUnavailableError if the driver is older than the runtime.

    Args:
        driver: 10,000,000 * major + 100,000 * minor + patch, as hipDriverGetVersion returns it.
        runtime: the same of the runtime library.
    """
    if driver // 100_000 < runtime // 100_000:
        raise RuntimeUnavailableError(
            f"hip: the driver supports HIP {_version(driver)} and is older than the runtime, {_version(runtime)}; "
            "update the driver or install an older ROCm"
        )


def _rdma_writes_ordering(ordinal: int) -> int:
    """The device's order of RDMA writes (hipGPUDirectRDMAWritesOrdering); 0 (none) if HIP has no such attribute."""
    kind = getattr(hip.hipDeviceAttribute_t, "hipDeviceAttributeGPUDirectRDMAWritesOrdering", None)
    return 0 if kind is None else int(call("hipDeviceGetAttribute", kind, ordinal))


def _version(number: int) -> str:
    return f"{number // 10_000_000}.{number // 100_000 % 100}"


class HipDriver:
    """AMD's driver. See `proxyccl.device.driver.Driver` for the methods.

    Raises:
        RuntimeUnavailableError: the package, ROCm or a device is missing, or the driver is too old.
    """

    runtime = "hip"
    out_of_memory = int(hip.hipError_t.hipErrorOutOfMemory)
    already_mapped = int(hip.hipError_t.hipErrorAlreadyMapped)
    thread_stream = _PER_THREAD_STREAM
    legacy_stream = 0
    loads_lazily = False
    """ROCm defers loading too, but is not known to hold up other calls meanwhile."""
    queue_limit = None
    """Not known to matter."""

    def __init__(self) -> None:
        _initialise()
        self.compiler = HipCompiler()

    def versions(self) -> str:
        """Versions of the runtime and of the compiler."""
        return f"HIP {_version(int(call('hipRuntimeGetVersion')))}, {self.compiler.version()}"

    def error_text(self, status: int) -> str:
        """The driver's name and text for a status."""
        return error_text(status)

    # -- devices and contexts ---

    def device_count(self) -> int:
        """Number of devices."""
        status, values = status_of("hipGetDeviceCount")
        if status == hip.hipError_t.hipErrorNoDevice:
            return 0
        return int(values[0]) if status == 0 else int(call("hipGetDeviceCount"))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object a process)
    def device(self, ordinal: int) -> DeviceInfo:
        """The description of a device."""
        properties = call("hipGetDeviceProperties", ordinal)
        return DeviceInfo(
            name=properties.name,
            device_id=f"hip:{bytes(properties.uuid.bytes).hex()}",
            architecture=properties.gcnArchName.partition(":")[0],  # "gfx942:sramecc+:xnack-"
            multiprocessors=properties.multiProcessorCount,
            memory_bytes=properties.totalGlobalMem,
            pci_address=f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0",
            orders_rdma_writes=_rdma_writes_ordering(ordinal) >= _ORDERED_FOR_OWNER,
        )

    def context(self, ordinal: int) -> int:
        """The device's number."""
        return ordinal

    def current(self) -> int | None:
        """The number of the thread's current device; it always has one."""
        return int(call("hipGetDevice"))

    def make_current(self, context: int) -> None:
        """Makes a device current."""
        call("hipSetDevice", context)

    def synchronize(self) -> None:
        """Waits for the current device."""
        call("hipDeviceSynchronize")

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether a device reaches another's memory."""
        return bool(call("hipDeviceCanAccessPeer", ordinal, peer))

    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        """Whether the link adds atomically."""
        kind = hip.hipDeviceP2PAttr.hipDevP2PAttrNativeAtomicSupported
        return bool(call("hipDeviceGetP2PAttribute", kind, ordinal, peer))

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current device reach a peer's memory."""
        status, _ = status_of("hipDeviceEnablePeerAccess", peer_context, 0)
        if status not in (0, hip.hipError_t.hipErrorPeerAccessAlreadyEnabled):
            raise DriverError("hipDeviceEnablePeerAccess", status, error_text(status))

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        """Uncached device memory: a running kernel sees peers' writes and copies in it."""
        return int(call("hipExtMallocWithFlags", nbytes, _MALLOC_UNCACHED))

    def allocate_block(self, nbytes: int) -> int:
        """Refused: it has not been tried."""
        raise RuntimeUnavailableError(
            "hip: memory of AMD GPUs is not passed between PID namespaces; start the ranks in one: --pid=host or "
            "hostPID for containers"
        )

    def free(self, ptr: int) -> None:
        """Frees device memory."""
        freed("hipFree", ptr)

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Base and size of an allocation."""
        base, size = call("hipMemGetAddressRange", ptr)
        return int(base), int(size)

    def memory_left(self) -> tuple[int, int]:
        """Free bytes, and all."""
        free, total = call("hipMemGetInfo")
        return int(free), int(total)

    def pointer_device(self, ptr: int) -> int | None:
        """The device that memory belongs to."""
        status, values = status_of("hipPointerGetAttributes", ptr)
        if status or values[0].type != hip.hipMemoryType.hipMemoryTypeDevice:
            return None
        return int(values[0].device)

    def allocation_id(self, ptr: int) -> int:
        """A number of the allocation."""
        number = ctypes.c_uint64()
        call("hipPointerGetAttribute", number, hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_BUFFER_ID, ptr)
        return number.value

    def export_memory(self, base: int, size: int) -> bytes:
        """A HIP IPC handle."""
        handle = call("hipIpcGetMemHandle", base)
        return ctypes.string_at(handle.as_c_void_p().value, handle.c_sizeof())

    def end_export(self, handle: bytes) -> None:
        """Nothing to do: a HIP IPC handle holds nothing."""

    def import_memory(self, handle: bytes) -> int:
        """Opens a HIP IPC handle."""
        ipc = hip.hipIpcMemHandle_st.fromObj(bytearray(handle))
        return int(call("hipIpcOpenMemHandle", ipc, hip.hipIpcMemLazyEnablePeerAccess))

    def release_memory(self, base: int) -> None:
        """Closes memory of `import_memory`."""
        freed("hipIpcCloseMemHandle", base)

    def dmabuf(self, base: int, nbytes: int) -> int:
        """A file descriptor of a DMA-BUF."""
        descriptor = ctypes.c_int()
        kind = hip.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        call("hipMemGetHandleForAddressRange", ctypes.addressof(descriptor), base, nbytes, kind, 0)
        return descriptor.value

    def register_host(self, ptr: int, nbytes: int) -> None:
        """Pins and maps host memory."""
        call("hipHostRegister", ptr, nbytes, hip.hipHostRegisterMapped | hip.hipHostRegisterPortable)

    def unregister_host(self, ptr: int) -> None:
        """Unpins host memory."""
        freed("hipHostUnregister", ptr)

    def host_device_pointer(self, ptr: int) -> int:
        """The device's address of pinned memory."""
        return int(call("hipHostGetDevicePointer", ptr, 0))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy."""
        call("hipMemcpyAsync", dst, src, nbytes, hip.hipMemcpyKind.hipMemcpyDefault, stream)

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Queues the setting of bytes."""
        call("hipMemsetD8Async", dst, value, nbytes, stream)

    # -- streams and events ---

    def create_stream(self, *, first: bool = False) -> int:
        """A non-blocking stream."""
        priority = 0
        if first:
            _, priority = call("hipDeviceGetStreamPriorityRange")
        return int(call("hipStreamCreateWithPriority", hip.hipStreamNonBlocking, priority))

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream."""
        freed("hipStreamDestroy", stream)

    def stream_query(self, stream: int) -> bool:
        """Whether a stream is done."""
        return done("hipStreamQuery", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Waits for a stream."""
        call("hipStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        call("hipStreamWaitEvent", stream, event, 0)

    def relax_capture(self, mode: int | None = None) -> int:
        """Exchanges the thread's capture mode, by default for the relaxed one."""
        wanted = hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed if mode is None else mode
        exchanged = ctypes.c_int(int(wanted))
        # hip-python's wrapper does not take a mode: it passes whatever is in the word.
        status = library().hipThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        if status:
            raise DriverError("hipThreadExchangeStreamCaptureMode", status, error_text(status))
        return exchanged.value

    def create_event(self, *, times: bool = True) -> int:
        """An event."""
        return int(call("hipEventCreateWithFlags", hip.hipEventDefault if times else hip.hipEventDisableTiming))

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""
        freed("hipEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Records an event."""
        call("hipEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether an event was reached."""
        return done("hipEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Waits for an event."""
        call("hipEventSynchronize", event)

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between events."""
        return float(call("hipEventElapsedTime", start, end))

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads a code object."""
        # As a bytearray: bytes are kept by hip-python for the life of the process.
        return int(call("hipModuleLoadData", bytearray(image)))

    def unload_module(self, module: int) -> None:
        """Unloads a code object."""
        freed("hipModuleUnload", module)

    def module_function(self, module: int, name: str) -> int:
        """A kernel."""
        return int(call("hipModuleGetFunction", module, name.encode()))

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """A variable."""
        address, nbytes = call("hipModuleGetGlobal", module, name.encode())
        return int(address), int(nbytes)

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Nothing: a launch may ask for all shared memory."""

    # -- addresses ---

    def engine_functions(self) -> EngineFunctions:
        """Addresses of the calls that the engine makes."""
        return EngineFunctions(
            copy=address_of("hipMemcpyDtoDAsync"),
            write64=address_of("hipStreamWriteValue64"),
            write32=address_of("hipStreamWriteValue32"),
            event_record=address_of("hipEventRecord"),
            event_query=address_of("hipEventQuery"),
            make_current=address_of("hipSetDevice"),
        )

    def stream_operation_calls(self) -> StreamOperationCalls:
        """One call for each word: older ROCm lacks hipStreamBatchMemOp."""
        return StreamOperationCalls(
            copy=address_of("hipMemcpyDtoDAsync"),
            set=address_of("hipMemsetD8Async"),
            write64=address_of("hipStreamWriteValue64"),
            wait64=address_of("hipStreamWaitValue64"),
            is_capturing=address_of("hipStreamIsCapturing"),
            current=address_of("hipGetDevice"),
        )

    def stream_order_calls(self) -> StreamOrderCalls:
        """hipEventRecord and the others."""
        return StreamOrderCalls(
            record=address_of("hipEventRecord"),
            wait=address_of("hipStreamWaitEvent"),
            query=address_of("hipEventQuery"),
            is_capturing=address_of("hipStreamIsCapturing"),
            exchange_capture_mode=address_of("hipThreadExchangeStreamCaptureMode"),
            relaxed=int(hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed),
            current=address_of("hipGetDevice"),
        )

    def allocation_calls(self) -> AllocationCalls:
        """hipExtMallocWithFlags and the others."""
        return AllocationCalls(
            free=address_of("hipFree"),
            pointer_attribute=address_of("hipPointerGetAttribute"),
            buffer_id=int(hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_BUFFER_ID),
            allocate_with_flags=address_of("hipExtMallocWithFlags"),
            flags=_MALLOC_UNCACHED,
            current=address_of("hipGetDevice"),
            make_current=address_of("hipSetDevice"),
            exchange_capture_mode=address_of("hipThreadExchangeStreamCaptureMode"),
            relaxed=int(hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed),
        )

    def stream_query_address(self) -> int:
        """hipStreamQuery's."""
        return address_of("hipStreamQuery")

    def launch_address(self) -> int:
        """hipModuleLaunchKernel."""
        return address_of("hipModuleLaunchKernel")

    def current_address(self) -> int:
        """hipGetDevice."""
        return address_of("hipGetDevice")
