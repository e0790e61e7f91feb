"""NVIDIA's driver as a `Driver`: cuda-bindings from PyPI, no toolkit."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from proxyccl.device.base_runtime import AllocationCalls, EngineFunctions, StreamOperationCalls, StreamOrderCalls
from proxyccl.device.driver import DeviceInfo
from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.cuda_bindings import cu, error_text, freed, ok
from proxyccl.device.gpu.cuda_compiler import CudaCompiler, compiler_version
from proxyccl.device.gpu.cuda_virtual_memory import VirtualMemory

_OLDEST_DRIVER = 12000
"""CUDA 12.0: the first whose driver API has every call under the name used here."""
_BATCHES_SINCE = 13000
"""CUDA 13.0: `cuMemcpyBatchAsync` without its earlier parameter for failures."""

_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS")
_QUEUES_UNLESS_SET = 8

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD
_HOST_REGISTER = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP


@functools.cache
def _initialise() -> None:
    try:
        status = int(cu.cuInit(0)[0])
    except RuntimeError as error:  # the binding's error if it can't load the library
        raise RuntimeUnavailableError(f"cuda: NVIDIA's driver is not installed: {error}") from None
    if status == int(cu.CUresult.CUDA_ERROR_NO_DEVICE):
        raise RuntimeUnavailableError("cuda: NVIDIA's driver sees no device")
    if status:
        raise RuntimeUnavailableError(f"cuda: the driver can't be initialised: {error_text(status)}")
    version = int(ok("cuDriverGetVersion", cu.cuDriverGetVersion()))
    check_versions(version, compiler_version()[0])


def check_versions(driver: int, compiler_major: int) -> None:
    """Raises RuntimeUnavailableError if the driver can't run the compiler's output.

    Args:
        driver: 1000 * major + 10 * minor, as cuDriverGetVersion returns it.
        compiler_major: NVRTC's. Its cubins run on every driver of the same major version and later.
    """
    have = f"{driver // 1000}.{driver % 1000 // 10}"
    if driver < _OLDEST_DRIVER:
        raise RuntimeUnavailableError(f"cuda: the driver supports CUDA {have}; 12.0 or later is needed")
    if driver // 1000 < compiler_major:
        raise RuntimeUnavailableError(
            f"cuda: the driver supports CUDA {have} and is older than the compiler, NVRTC {compiler_major}; update the "
            f"driver or install an older compiler: pip install 'nvidia-cuda-nvrtc<{compiler_major}'"
        )


class CudaDriver:
    """NVIDIA's driver. See `proxyccl.device.driver.Driver` for the methods.

    Raises:
        RuntimeUnavailableError: a package, the driver or a device is missing, or the driver is too old.
    """

    runtime = "cuda"
    out_of_memory = int(cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    already_mapped = int(cu.CUresult.CUDA_ERROR_ALREADY_MAPPED)
    thread_stream = _PER_THREAD_STREAM
    legacy_stream = 0

    def __init__(self) -> None:
        _initialise()
        self.compiler = CudaCompiler()
        self._virtual_memory = VirtualMemory(self.allocation_id, _pointer_attribute())

    @property
    def loads_lazily(self) -> bool:
        """The mode that the driver took from CUDA_MODULE_LOADING when it was initialised."""
        mode = ok("cuModuleGetLoadingMode", cu.cuModuleGetLoadingMode())
        return bool(mode == cu.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING)

    @property
    def queue_limit(self) -> str | None:
        """The environment's: the driver tells nobody how many it took when it was initialised."""
        for name in _QUEUES:
            value = os.environ.get(name, "")
            if value.isdecimal() and int(value) < _QUEUES_UNLESS_SET:
                return f"{name}={value}"
        return None

    def versions(self) -> str:
        """Versions of the driver, and of the compiler."""
        version = int(ok("cuDriverGetVersion", cu.cuDriverGetVersion()))
        return f"driver for CUDA {version // 1000}.{version % 1000 // 10}, {self.compiler.version()}"

    def error_text(self, status: int) -> str:
        """The driver's name and text for a status."""
        return error_text(status)

    # -- devices and contexts ---

    def device_count(self) -> int:
        """Number of devices."""
        return int(ok("cuDeviceGetCount", cu.cuDeviceGetCount()))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object a process)
    def device(self, ordinal: int) -> DeviceInfo:
        """The description of a device."""
        handle = ok("cuDeviceGet", cu.cuDeviceGet(ordinal))

        def attribute(which: Any) -> int:
            return int(ok("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(which, handle)))

        kinds = cu.CUdevice_attribute
        ordering = attribute(kinds.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
        ordered = int(cu.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER)
        major = attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        name = ok("cuDeviceGetName", cu.cuDeviceGetName(256, handle))
        address = ok("cuDeviceGetPCIBusId", cu.cuDeviceGetPCIBusId(32, handle))
        uuid = ok("cuDeviceGetUuid", cu.cuDeviceGetUuid(handle))
        return DeviceInfo(
            name=name.partition(b"\0")[0].decode(),
            device_id=f"cuda:{bytes(uuid.bytes).hex()}",
            architecture=f"sm_{major}{minor}",
            multiprocessors=attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_bytes=int(ok("cuDeviceTotalMem", cu.cuDeviceTotalMem(handle))),
            pci_address=address.partition(b"\0")[0].decode().lower(),
            orders_rdma_writes=ordering >= ordered,
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019  (retained once, for the life of the process)
    def context(self, ordinal: int) -> int:
        """The device's primary context."""
        handle = ok("cuDeviceGet", cu.cuDeviceGet(ordinal))
        return int(ok("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(handle)))

    def current(self) -> int | None:
        """The calling thread's context, or None."""
        return int(ok("cuCtxGetCurrent", cu.cuCtxGetCurrent())) or None

    def make_current(self, context: int) -> None:
        """Makes a context current."""
        ok("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))

    def synchronize(self) -> None:
        """Waits for the context."""
        ok("cuCtxSynchronize", cu.cuCtxSynchronize())

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether a device reaches another's memory."""
        return bool(ok("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(ordinal, peer)))

    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        """Whether the link adds atomically."""
        kind = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(ok("cuDeviceGetP2PAttribute", cu.cuDeviceGetP2PAttribute(kind, ordinal, peer)))

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current context reach a peer's memory."""
        result = cu.cuCtxEnablePeerAccess(peer_context, 0)
        if result[0] != cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            ok("cuCtxEnablePeerAccess", result)

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        return int(ok("cuMemAlloc", cu.cuMemAlloc(nbytes)))

    def allocate_block(self, nbytes: int) -> int:
        """Device memory, mapped by itself as a block."""
        return self._virtual_memory.allocate(nbytes)

    def free(self, ptr: int) -> None:
        """Frees device memory."""
        if not self._virtual_memory.free(ptr):
            freed("cuMemFree", cu.cuMemFree(ptr))

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Base and size of an allocation, or of mapped blocks side by side."""
        base, size = (int(value) for value in ok("cuMemGetAddressRange", cu.cuMemGetAddressRange(ptr)))
        if base + size < ptr + nbytes and self._virtual_memory.is_mapped(ptr):
            while base + size < ptr + nbytes and self._virtual_memory.is_mapped(base + size):
                size += int(ok("cuMemGetAddressRange", cu.cuMemGetAddressRange(base + size))[1])
        return base, size

    def memory_left(self) -> tuple[int, int]:
        """Free bytes, and all."""
        free, total = ok("cuMemGetInfo", cu.cuMemGetInfo())
        return int(free), int(total)

    def pointer_device(self, ptr: int) -> int | None:
        """The device that memory belongs to."""
        kinds = cu.CUpointer_attribute
        status, kind = cu.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr)
        if status or int(kind) != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            return None
        # The driver itself: the binding was seen to answer 0 for every device's memory.
        ordinal = ctypes.c_int()
        attribute = int(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        failed = _pointer_attribute()(ctypes.byref(ordinal), attribute, ptr)
        if failed:
            raise DriverError("cuPointerGetAttribute", failed, error_text(failed))
        return ordinal.value

    def allocation_id(self, ptr: int) -> int:
        """A number of the allocation."""
        which = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        return int(ok("cuPointerGetAttribute", cu.cuPointerGetAttribute(which, ptr)))

    def export_memory(self, base: int, size: int) -> bytes:
        """A CUDA IPC handle, or one of mapped blocks, which IPC refuses."""
        result = cu.cuIpcGetMemHandle(base)
        if result[0] and self._virtual_memory.is_mapped(base):
            return self._virtual_memory.export(base, size)
        return bytes(ok("cuIpcGetMemHandle", result).reserved)

    def end_export(self, handle: bytes) -> None:
        """Releases mapped blocks; an IPC handle holds nothing."""
        if VirtualMemory.is_handle(handle):
            self._virtual_memory.end_export(handle)

    def import_memory(self, handle: bytes) -> int:
        """Opens a handle of `export_memory`."""
        if VirtualMemory.is_handle(handle):
            return self._virtual_memory.open(handle)
        ipc = cu.CUipcMemHandle()
        ipc.reserved = handle
        flag = int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(ok("cuIpcOpenMemHandle", cu.cuIpcOpenMemHandle(ipc, flag)))

    def release_memory(self, base: int) -> None:
        """Closes memory of `import_memory`."""
        if not self._virtual_memory.release(base):
            freed("cuIpcCloseMemHandle", cu.cuIpcCloseMemHandle(base))

    def dmabuf(self, base: int, nbytes: int) -> int:
        """A file descriptor of a DMA-BUF."""
        kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        result = cu.cuMemGetHandleForAddressRange(base, nbytes, kind, 0)
        return int(ok("cuMemGetHandleForAddressRange", result))

    def register_host(self, ptr: int, nbytes: int) -> None:
        """Pins and maps host memory."""
        ok("cuMemHostRegister", cu.cuMemHostRegister(ptr, nbytes, _HOST_REGISTER))

    def unregister_host(self, ptr: int) -> None:
        """Unpins host memory."""
        freed("cuMemHostUnregister", cu.cuMemHostUnregister(ptr))

    def host_device_pointer(self, ptr: int) -> int:
        """The device's address of pinned memory."""
        return int(ok("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(ptr, 0)))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy."""
        ok("cuMemcpyAsync", cu.cuMemcpyAsync(dst, src, nbytes, stream))

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Queues the setting of bytes."""
        ok("cuMemsetD8Async", cu.cuMemsetD8Async(dst, value, nbytes, stream))

    # -- streams and events ---

    def create_stream(self, *, first: bool = False) -> int:
        """A non-blocking stream."""
        flags, priority = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING), 0
        if first:
            _, priority = ok("cuCtxGetStreamPriorityRange", cu.cuCtxGetStreamPriorityRange())
        return int(ok("cuStreamCreateWithPriority", cu.cuStreamCreateWithPriority(flags, priority)))

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream."""
        freed("cuStreamDestroy", cu.cuStreamDestroy(stream))

    def stream_query(self, stream: int) -> bool:
        """Whether a stream is done."""
        return _done("cuStreamQuery", cu.cuStreamQuery(stream))

    def stream_synchronize(self, stream: int) -> None:
        """Waits for a stream."""
        ok("cuStreamSynchronize", cu.cuStreamSynchronize(stream))

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        ok("cuStreamWaitEvent", cu.cuStreamWaitEvent(stream, event, 0))

    def relax_capture(self, mode: int | None = None) -> int:
        """Exchanges the thread's capture mode, by default for the relaxed one."""
        wanted = cu.CUstreamCaptureMode(
            int(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) if mode is None else mode
        )
        return int(ok("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(wanted)))

    def create_event(self, *, times: bool = True) -> int:
        """An event."""
        flags = cu.CUevent_flags.CU_EVENT_DEFAULT if times else cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return int(ok("cuEventCreate", cu.cuEventCreate(int(flags))))

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""
        freed("cuEventDestroy", cu.cuEventDestroy(event))

    def record_event(self, event: int, stream: int) -> None:
        """Records an event."""
        ok("cuEventRecord", cu.cuEventRecord(event, stream))

    def event_query(self, event: int) -> bool:
        """Whether an event was reached."""
        return _done("cuEventQuery", cu.cuEventQuery(event))

    def event_synchronize(self, event: int) -> None:
        """Waits for an event."""
        ok("cuEventSynchronize", cu.cuEventSynchronize(event))

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between events."""
        return float(ok("cuEventElapsedTime", cu.cuEventElapsedTime(start, end)))

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads a cubin."""
        return int(ok("cuModuleLoadData", cu.cuModuleLoadData(image)))

    def unload_module(self, module: int) -> None:
        """Unloads a cubin."""
        freed("cuModuleUnload", cu.cuModuleUnload(module))

    def module_function(self, module: int, name: str) -> int:
        """A kernel."""
        return int(ok(f"cuModuleGetFunction({name})", cu.cuModuleGetFunction(module, name.encode())))

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """A variable."""
        address, nbytes = ok(f"cuModuleGetGlobal({name})", cu.cuModuleGetGlobal(module, name.encode()))
        return int(address), int(nbytes)

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Raises the kernel's limit, which is 48 KiB at first."""
        if nbytes > 48 * 1024:
            kind = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ok("cuFuncSetAttribute", cu.cuFuncSetAttribute(cu.CUfunction(function), kind, nbytes))

    # -- addresses ---

    def engine_functions(self) -> EngineFunctions:
        """Addresses of the calls that the engine makes."""
        return EngineFunctions(
            copy=_address("cuMemcpyAsync"),
            write64=_address("cuStreamWriteValue64"),
            write32=_address("cuStreamWriteValue32"),
            event_record=_address("cuEventRecord"),
            event_query=_address("cuEventQuery"),
            copy_many=_address_if_there("cuMemcpyBatchAsync", _BATCHES_SINCE),
            make_current=_address("cuCtxSetCurrent"),
        )

    def stream_operation_calls(self) -> StreamOperationCalls:
        """Words by cuStreamBatchMemOp."""
        return StreamOperationCalls(
            copy=_address("cuMemcpyAsync"),
            set=_address("cuMemsetD8Async"),
            batch=_address("cuStreamBatchMemOp"),
            is_capturing=_address("cuStreamIsCapturing"),
            current=_address("cuCtxGetCurrent"),
        )

    def stream_order_calls(self) -> StreamOrderCalls:
        """cuEventRecord and the others."""
        return StreamOrderCalls(
            record=_address("cuEventRecord"),
            wait=_address("cuStreamWaitEvent"),
            query=_address("cuEventQuery"),
            is_capturing=_address("cuStreamIsCapturing"),
            exchange_capture_mode=_address("cuThreadExchangeStreamCaptureMode"),
            relaxed=int(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
            current=_address("cuCtxGetCurrent"),
        )

    def allocation_calls(self) -> AllocationCalls:
        """cuMemAlloc and the others."""
        return AllocationCalls(
            free=_address("cuMemFree"),
            pointer_attribute=_address("cuPointerGetAttribute"),
            buffer_id=int(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID),
            allocate=_address("cuMemAlloc"),
            current=_address("cuCtxGetCurrent"),
            make_current=_address("cuCtxSetCurrent"),
            exchange_capture_mode=_address("cuThreadExchangeStreamCaptureMode"),
            relaxed=int(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
        )

    def stream_query_address(self) -> int:
        """cuStreamQuery's."""
        return _address("cuStreamQuery")

    def launch_address(self) -> int:
        """cuLaunchKernel."""
        return _address("cuLaunchKernel")

    def current_address(self) -> int:
        """cuCtxGetCurrent."""
        return _address("cuCtxGetCurrent")


def _done(call: str, result: tuple[Any, ...]) -> bool:
    if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    ok(call, result)
    return True


@functools.cache
def _pointer_attribute() -> Any:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return kind(_address("cuPointerGetAttribute"))


@functools.cache
def _address(name: str) -> int:
    # The version names the signature: 12.0's, the oldest driver's.
    return int(ok(f"cuGetProcAddress({name})", cu.cuGetProcAddress(name.encode(), _OLDEST_DRIVER, 0))[0])


@functools.cache
def _address_if_there(name: str, version: int) -> int:
    """The address of a call with the signature of a version of CUDA; 0 if the driver lacks it."""
    status, *found = cu.cuGetProcAddress(name.encode(), version, 0)
    return int(found[0]) if not status else 0
