"""NVIDIA's `Driver`, on the PyPI package cuda-bindings. No CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from proxyccl.device.driver import CAPTURE_MODE_RELAXED, DeviceInfo, Driver
from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.cuda_bindings import cu
from proxyccl.device.gpu.cuda_compiler import CudaCompiler, compiler_version
from proxyccl.device.gpu.cuda_virtual_memory import VirtualMemory

_OLDEST_DRIVER = 12000
"""CUDA 12.0, the oldest driver API that has all calls of this module under their present names."""
_BATCHES_SINCE = 13000
"""CUDA 13.0, since which `cuMemcpyBatchAsync` has no parameter `failIdx`."""

_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS")
_QUEUES_UNLESS_SET = 8


def check_versions(driver: int, compiler_major: int) -> None:
    """Raises RuntimeUnavailableError if the driver can't run the compiler's output.

    Args:
        driver: the CUDA version of the driver, 1000 * major + 10 * minor.
        compiler_major: NVRTC's major version. NVRTC's cubins run on drivers of the same major version and later.
    """
    have = _in_words(driver)
    if driver < _OLDEST_DRIVER:
        raise RuntimeUnavailableError(f"cuda: the driver supports CUDA {have}; 12.0 or later is needed")
    if driver // 1000 < compiler_major:
        raise RuntimeUnavailableError(
            f"cuda: the driver supports CUDA {have} and is older than the compiler, NVRTC {compiler_major}; update the "
            f"driver or install an older compiler: pip install 'nvidia-cuda-nvrtc<{compiler_major}'"
        )


def _in_words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaDriver(Driver):
    """NVIDIA's driver.

    Raises:
        RuntimeUnavailableError: a package, the driver or a device is missing, or the driver is too old.
    """

    runtime = "cuda"
    _PREFIX = "cu"

    def __init__(self) -> None:
        try:
            status = int(cu.cuInit(0)[0])
        except RuntimeError as error:  # the binding can't load the driver's library
            raise RuntimeUnavailableError(f"cuda: NVIDIA's driver is not installed: {error}") from None
        if status == int(cu.CUresult.CUDA_ERROR_NO_DEVICE):
            raise RuntimeUnavailableError("cuda: NVIDIA's driver sees no device")
        if status:
            raise RuntimeUnavailableError(f"cuda: the driver can't be initialised: {self.error_text(status)}")
        check_versions(int(self.call("DriverGetVersion")), compiler_version()[0])
        self.compiler = CudaCompiler()
        self.blocks = self._virtual_memory = VirtualMemory(self, _pointer_attribute())

    def _status_of(self, name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
        status, *results = getattr(cu, name)(*args)
        return int(status), tuple(results)

    def _address_of(self, name: str) -> int:
        # Asks for the signatures of CUDA 12.0, the oldest supported version.
        status, address = _find_address(name, _OLDEST_DRIVER)
        if status:
            raise DriverError(f"cuGetProcAddress({name})", status, self.error_text(status))
        return address

    def error_text(self, status: int) -> str:
        name = cu.cuGetErrorName(cu.CUresult(status))[1]
        words = cu.cuGetErrorString(cu.CUresult(status))[1]
        return ", ".join(part.decode() for part in (name, words) if part) or "unknown error"

    @property
    def loads_lazily(self) -> bool:
        """Implements `BaseRuntime.loads_lazily` (CUDA_MODULE_LOADING)."""
        return bool(self.call("ModuleGetLoadingMode") == cu.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING)

    @property
    def queue_limit(self) -> str | None:
        """Reads the environment, because the driver does not report its number of queues."""
        for name in _QUEUES:
            value = os.environ.get(name, "")
            if value.isdecimal() and int(value) < _QUEUES_UNLESS_SET:
                return f"{name}={value}"
        return None

    def versions(self) -> str:
        return f"driver for CUDA {_in_words(int(self.call('DriverGetVersion')))}, {self.compiler.version()}"

    # -- devices and contexts ---

    def device_count(self) -> int:
        return int(self.call("DeviceGetCount"))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object per process)
    def device(self, ordinal: int) -> DeviceInfo:
        handle = self.call("DeviceGet", ordinal)

        def attribute(which: Any) -> int:
            return int(self.call("DeviceGetAttribute", which, handle))

        kinds = cu.CUdevice_attribute
        ordering = attribute(kinds.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
        ordered = int(cu.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER)
        major = attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = attribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        return DeviceInfo(
            name=self.call("DeviceGetName", 256, handle).partition(b"\0")[0].decode(),
            device_id=f"cuda:{bytes(self.call('DeviceGetUuid', handle).bytes).hex()}",
            architecture=f"sm_{major}{minor}",
            multiprocessors=attribute(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_bytes=int(self.call("DeviceTotalMem", handle)),
            pci_address=self.call("DeviceGetPCIBusId", 32, handle).partition(b"\0")[0].decode().lower(),
            orders_rdma_writes=ordering >= ordered,
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019  (retained once, for the life of the process)
    def context(self, ordinal: int) -> int:
        return int(self.call("DevicePrimaryCtxRetain", self.call("DeviceGet", ordinal)))

    def current(self) -> int | None:
        return int(self.call("CtxGetCurrent")) or None

    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        kind = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(self.call("DeviceGetP2PAttribute", kind, ordinal, peer))

    def free_stacks(self) -> None:
        self.call("CtxSetLimit", cu.CUlimit.CU_LIMIT_STACK_SIZE, 0)

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        return int(self.call("MemAlloc", nbytes))

    def allocate_block(self, nbytes: int) -> int:
        """Allocates a block by CUDA's virtual memory management."""
        return self._virtual_memory.allocate(nbytes)

    def free(self, ptr: int) -> None:
        if not self._virtual_memory.free(ptr):
            super().free(ptr)

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        base, size = super().address_range(ptr)
        if base + size < ptr + nbytes and self._virtual_memory.is_mapped(ptr):
            while base + size < ptr + nbytes and self._virtual_memory.is_mapped(base + size):
                size += super().address_range(base + size)[1]
        return base, size

    def pointer_device(self, ptr: int) -> int | None:
        kinds = cu.CUpointer_attribute
        status, kind = cu.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr)
        if status or int(kind) != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            return None
        # Calls the driver directly, because the binding returned 0 for memory of other devices too.
        ordinal = ctypes.c_int()
        attribute = int(kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        failed = _pointer_attribute()(ctypes.byref(ordinal), attribute, ptr)
        if failed:
            raise DriverError("cuPointerGetAttribute", failed, self.error_text(failed))
        return ordinal.value

    def allocation_id(self, ptr: int) -> int:
        word = self._virtual_memory.word(ptr)  # the driver's number changes if the block is suspended and resumed
        if word is not None:
            return int(word[0])
        return int(self.call("PointerGetAttribute", cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, ptr))

    def export_memory(self, base: int, size: int) -> bytes:
        """Returns a CUDA IPC handle, or a handle of `VirtualMemory` for mapped blocks, which CUDA IPC refuses."""
        try:
            return bytes(self.call("IpcGetMemHandle", base).reserved)
        except DriverError:
            if not self._virtual_memory.is_mapped(base):
                raise
        return self._virtual_memory.export(base, size)

    def end_export(self, handle: bytes) -> None:
        if VirtualMemory.is_handle(handle):
            self._virtual_memory.end_export(handle)

    def import_memory(self, handle: bytes) -> int:
        if VirtualMemory.is_handle(handle):
            return self._virtual_memory.open(handle)
        ipc = cu.CUipcMemHandle()
        ipc.reserved = handle
        return int(self.call("IpcOpenMemHandle", ipc, int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))

    def release_memory(self, base: int) -> None:
        if not self._virtual_memory.release(base):
            super().release_memory(base)

    def dmabuf(self, base: int, nbytes: int) -> int:
        kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return int(self.call("MemGetHandleForAddressRange", base, nbytes, kind, 0))

    def relax_capture(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        return int(self.call("ThreadExchangeStreamCaptureMode", cu.CUstreamCaptureMode(mode)))

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Raises the kernel's limit of dynamic shared memory, which is 48 KiB unless raised."""
        if nbytes > 48 * 1024:
            kind = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("FuncSetAttribute", cu.CUfunction(function), kind, nbytes)

    def _own_calls(self) -> dict[str, int]:
        status, copy_many = _find_address("cuMemcpyBatchAsync", _BATCHES_SINCE)
        return {
            "copy": self.address("MemcpyAsync"),
            "copy_many": 0 if status else copy_many,
            "batch": self.address("StreamBatchMemOp"),
            "capture_info": self.address("StreamGetCaptureInfo"),
            "allocate": self.address("MemAlloc"),
        }


@functools.cache
def _pointer_attribute() -> Any:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return kind(_find_address("cuPointerGetAttribute", _OLDEST_DRIVER)[1])


@functools.cache
def _find_address(name: str, version: int) -> tuple[int, int]:
    """Returns the driver's status, and the address of a driver function with the signature of CUDA version
    `version`."""
    status, *found = cu.cuGetProcAddress(name.encode(), version, 0)
    return int(status), 0 if status else int(found[0])
