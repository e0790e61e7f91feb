"""AMD's `Driver`, on hip-python and the machine's ROCm libraries.

HIP's calls differ from CUDA's in their names and in two points. HIP has no contexts: calls act on the calling thread's
current device, so a device's number serves as the context. And by default, memory is coherent between devices only at
the boundaries of kernels, so device memory is allocated uncached.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from proxyccl.device.driver import CAPTURE_MODE_RELAXED, DeviceInfo, Driver
from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.hip_bindings import hip, library
from proxyccl.device.gpu.hip_compiler import HipCompiler, compiler_version

_ORDERED_FOR_OWNER = 100  # hipGPUDirectRDMAWritesOrderingOwner
_MALLOC_UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not name


def check_versions(driver: int, runtime: int) -> None:
    """Raises RuntimeUnavailableError if the driver is older than the runtime.

    Args:
        driver: the HIP version of the driver, 10,000,000 * major + 100,000 * minor + patch.
        runtime: the runtime library's version in the same form.
    """
    if driver // 100_000 < runtime // 100_000:
        raise RuntimeUnavailableError(
            f"hip: the driver supports HIP {_version(driver)} and is older than the runtime, {_version(runtime)}; "
            "update the driver or install an older ROCm"
        )


def _version(number: int) -> str:
    return f"{number // 10_000_000}.{number // 100_000 % 100}"


class HipDriver(Driver):
    """AMD's driver. ROCm loads kernels lazily, but is not known to block other calls while it loads a kernel, so
    `loads_lazily` is False.

    Raises:
        RuntimeUnavailableError: the package, ROCm or a device is missing, or the driver is too old.
    """

    runtime = "hip"
    _PREFIX = "hip"
    _OTHER_NAMES = {  # noqa: RUF012  (never changed)
        "CtxEnablePeerAccess": "DeviceEnablePeerAccess",
        "CtxGetCurrent": "GetDevice",
        "CtxGetDevice": "GetDevice",
        "CtxGetStreamPriorityRange": "DeviceGetStreamPriorityRange",
        "CtxSetCurrent": "SetDevice",
        "CtxSynchronize": "DeviceSynchronize",
        "EventCreate": "EventCreateWithFlags",
        "LaunchKernel": "ModuleLaunchKernel",
        "MemFree": "Free",
        "MemHostGetDevicePointer": "HostGetDevicePointer",
        "MemHostRegister": "HostRegister",
        "MemHostUnregister": "HostUnregister",
    }

    def __init__(self) -> None:
        try:
            status = int(hip.hipInit(0)[0])
        except RuntimeError as error:
            raise RuntimeUnavailableError(
                f"hip: ROCm's runtime library can't be loaded ({error}); install ROCm, or name its directory in "
                "ROCM_PATH"
            ) from None
        if status == hip.hipError_t.hipErrorNoDevice:
            raise RuntimeUnavailableError("hip: ROCm sees no device: there is no AMD GPU, or no access to /dev/kfd")
        if status:
            raise RuntimeUnavailableError(f"hip: the runtime can't be initialised: {self.error_text(status)}")
        check_versions(int(self.call("DriverGetVersion")), int(self.call("RuntimeGetVersion")))
        compiler_version()
        self.compiler = HipCompiler()

    def _status_of(self, name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
        try:
            status, *results = getattr(hip, name)(*args)
        except RuntimeError as error:  # hip-python can't load the library or find the call
            raise RuntimeUnavailableError(f"hip: ROCm's runtime library lacks {name}: {error}") from None
        return int(status), tuple(results)

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object per process)
    def _address_of(self, name: str) -> int:
        return int(ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0)

    def error_text(self, status: int) -> str:
        try:
            error = hip.hipError_t(status)
        except ValueError:
            return "an error that hip-python does not know"
        return f"{error.name}, {hip.hipGetErrorString(error)[1]}"

    def versions(self) -> str:
        return f"HIP {_version(int(self.call('RuntimeGetVersion')))}, {self.compiler.version()}"

    # -- devices and contexts ---

    def device_count(self) -> int:
        status, _ = self._status_of("hipGetDeviceCount")
        return 0 if status == hip.hipError_t.hipErrorNoDevice else int(self.call("GetDeviceCount"))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object per process)
    def device(self, ordinal: int) -> DeviceInfo:
        properties = self.call("GetDeviceProperties", ordinal)
        # Without the attribute, RDMA writes are assumed to be unordered (0).
        kind = getattr(hip.hipDeviceAttribute_t, "hipDeviceAttributeGPUDirectRDMAWritesOrdering", None)
        ordering = 0 if kind is None else int(self.call("DeviceGetAttribute", kind, ordinal))
        return DeviceInfo(
            name=properties.name,
            device_id=f"hip:{bytes(properties.uuid.bytes).hex()}",
            architecture=properties.gcnArchName.partition(":")[0],  # "gfx942:sramecc+:xnack-"
            multiprocessors=properties.multiProcessorCount,
            memory_bytes=properties.totalGlobalMem,
            pci_address=f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0",
            orders_rdma_writes=ordering >= _ORDERED_FOR_OWNER,
        )

    def context(self, ordinal: int) -> int:
        return ordinal

    def current(self) -> int:
        """Returns the number of the thread's current device, which always exists."""
        return int(self.call("CtxGetCurrent"))

    def adds_at_peer(self, ordinal: int, peer: int) -> bool:
        kind = hip.hipDeviceP2PAttr.hipDevP2PAttrNativeAtomicSupported
        return bool(self.call("DeviceGetP2PAttribute", kind, ordinal, peer))

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        """Allocates uncached device memory, so that a running kernel sees peers' writes and copies."""
        return int(self.call("ExtMallocWithFlags", nbytes, _MALLOC_UNCACHED))

    def allocate_block(self, nbytes: int) -> int:
        """Raises RuntimeUnavailableError, because memory for other PID namespaces is untested on AMD GPUs."""
        raise RuntimeUnavailableError(
            "hip: memory of AMD GPUs is not passed between PID namespaces; start the ranks in one: --pid=host or "
            "hostPID for containers"
        )

    def pointer_device(self, ptr: int) -> int | None:
        status, values = self._status_of("hipPointerGetAttributes", ptr)
        if status or values[0].type != hip.hipMemoryType.hipMemoryTypeDevice:
            return None
        return int(values[0].device)

    def allocation_id(self, ptr: int) -> int:
        number = ctypes.c_uint64()
        self.call("PointerGetAttribute", number, hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_BUFFER_ID, ptr)
        return number.value

    def export_memory(self, base: int, size: int) -> bytes:
        handle = self.call("IpcGetMemHandle", base)
        return ctypes.string_at(handle.as_c_void_p().value, handle.c_sizeof())

    def end_export(self, handle: bytes) -> None:
        """Does nothing, because a HIP IPC handle keeps no memory allocated."""

    def import_memory(self, handle: bytes) -> int:
        ipc = hip.hipIpcMemHandle_st.fromObj(bytearray(handle))
        return int(self.call("IpcOpenMemHandle", ipc, hip.hipIpcMemLazyEnablePeerAccess))

    def dmabuf(self, base: int, nbytes: int) -> int:
        descriptor = ctypes.c_int()
        kind = hip.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        self.call("MemGetHandleForAddressRange", ctypes.addressof(descriptor), base, nbytes, kind, 0)
        return descriptor.value

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("MemcpyAsync", dst, src, nbytes, hip.hipMemcpyKind.hipMemcpyDefault, stream)

    def relax_capture(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        exchanged = ctypes.c_int(mode)
        # hip-python's wrapper has no parameter for the mode, and passes an uninitialised word.
        status = library().hipThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        if status:
            raise DriverError("hipThreadExchangeStreamCaptureMode", status, self.error_text(status))
        return exchanged.value

    def load_module(self, image: bytes) -> int:
        return int(self.call("ModuleLoadData", bytearray(image)))  # a bytearray, because hip-python never frees bytes

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Does nothing, because HIP does not limit a launch's shared memory."""

    def _own_calls(self) -> dict[str, int]:
        """Returns the calls without `batch`, because older ROCm lacks hipStreamBatchMemOp."""
        return {
            "copy": self.address("MemcpyDtoDAsync"),
            "wait64": self.address("StreamWaitValue64"),
            "capture_info": self.address("StreamGetCaptureInfo_v2"),
            "allocate_with_flags": self.address("ExtMallocWithFlags"),
            "flags": _MALLOC_UNCACHED,
        }
