"""AMD's driver and run-time compiler as a `Driver`: hip-python over a machine's ROCm libraries.

HIP's calls are CUDA's under other names, with two differences that show here. A context is a device: calls act on the
calling thread's current one, so a context is known by its device's number. And memory is by default coherent between
devices only where one kernel ends and the next begins, so it is allocated uncached.

hip-python wraps each call, with its arguments and results as Python objects. What C calls, and the one call that it
wraps wrongly, is taken from the very library that it has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from proxyccl.device.driver import DeviceInfo
from proxyccl.device.errors import CompileError, DriverError, RuntimeUnavailableError
from proxyccl.device.runtime import EngineFunctions

try:
    from hip import hip, hiprtc
    from rocm.bindings.util.paths import get_library_path
except ImportError as error:
    raise RuntimeUnavailableError(
        f"hip: its Python package is missing ({error}); install it with: pip install 'proxyccl[hip]'"
    ) from None

_PER_THREAD_STREAM = 2  # hipStreamPerThread
_MALLOC_UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not name


def _text(status: Any) -> str:
    """The name and the words for a status."""
    try:
        error = hip.hipError_t(status)
    except ValueError:
        return "an error that hip-python does not know"
    return f"{error.name}, {hip.hipGetErrorString(error)[1]}"


def _status(name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
    """A call's status and what else it returned."""
    try:
        status, *values = getattr(hip, name)(*args)
    except RuntimeError as error:  # how hip-python tells that it can't load the library or find the call in it
        raise RuntimeUnavailableError(f"hip: ROCm's runtime library lacks {name}: {error}") from None
    return int(status), tuple(values)


def _call(name: str, *args: Any) -> Any:
    """What a call returned, without its status."""
    status, values = _status(name, *args)
    if status:
        raise DriverError(name, status, _text(status))
    return values[0] if len(values) == 1 else values


def _done(name: str, *args: Any) -> bool:
    """Whether what a query asks for is done."""
    status, _ = _status(name, *args)
    if status not in (0, hip.hipError_t.hipErrorNotReady):
        raise DriverError(name, status, _text(status))
    return status == 0


def _hiprtc(name: str, *args: Any) -> Any:
    status, *values = getattr(hiprtc, name)(*args)
    if int(status):
        raise CompileError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def _library() -> ctypes.CDLL:
    """The library that hip-python calls."""
    return ctypes.CDLL(os.fsdecode(get_library_path("amdhip64")))


def _address(name: str) -> int:
    return int(ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0)


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
        raise RuntimeUnavailableError(f"hip: the runtime can't be initialised: {_text(status)}")
    check_versions(int(_call("hipDriverGetVersion")), int(_call("hipRuntimeGetVersion")))
    _compiler_version()


@functools.cache
def _compiler_version() -> tuple[int, int]:
    try:
        major, minor = _hiprtc("hiprtcVersion")
    except RuntimeError as error:
        raise RuntimeUnavailableError(f"hip: ROCm's run-time compiler can't be loaded ({error})") from None
    return int(major), int(minor)


def check_versions(driver: int, runtime: int) -> None:
    """Raises RuntimeUnavailableError if the driver is older than the runtime.

    Args:
        driver: 10,000,000 * major + 100,000 * minor + patch, as hipDriverGetVersion gives it.
        runtime: the same of the runtime library.
    """
    if driver // 100_000 < runtime // 100_000:
        raise RuntimeUnavailableError(
            f"hip: the driver supports HIP {_version(driver)} and is older than the runtime, {_version(runtime)}; "
            "update the driver or install an older ROCm"
        )


def _version(number: int) -> str:
    return f"{number // 10_000_000}.{number // 100_000 % 100}"


def compile_options(architecture: str) -> tuple[str, ...]:
    """What every source is compiled with, for "gfx942" and the like. Before ROCm 7 __shfl_sync must be asked for."""
    return (f"--offload-arch={architecture}", "-std=c++17", "-O3", "-DHIP_ENABLE_WARP_SYNC_BUILTINS")


class HipCompiler:
    """HIPRTC. See `proxyccl.device.driver.Compiler` for the methods.

    Raises:
        RuntimeUnavailableError: it is not installed.
    """

    runtime = "hip"

    def __init__(self) -> None:
        _compiler_version()

    def version(self) -> str:
        """HIPRTC's version."""
        major, minor = _compiler_version()
        return f"HIPRTC {major}.{minor}"

    def options(self, architecture: str) -> tuple[str, ...]:
        """See `compile_options`."""
        return compile_options(architecture)

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """A code object from HIPRTC."""
        program = _hiprtc("hiprtcCreateProgram", source.encode(), b"kernel.hip", 0, None, None)
        try:
            encoded = [option.encode() for option in options]
            (status,) = hiprtc.hiprtcCompileProgram(program, len(encoded), encoded)
            if int(status):
                log = bytearray(_hiprtc("hiprtcGetProgramLogSize", program))
                _hiprtc("hiprtcGetProgramLog", program, log)
                raise CompileError("HIPRTC could not compile the kernel source", log.rstrip(b"\0").decode())
            image = bytearray(_hiprtc("hiprtcGetCodeSize", program))
            _hiprtc("hiprtcGetCode", program, image)
            return bytes(image)
        finally:
            _hiprtc("hiprtcDestroyProgram", program.createRef())


class HipDriver:
    """AMD's driver. See `proxyccl.device.driver.Driver` for the methods.

    Raises:
        RuntimeUnavailableError: the package, ROCm or a device is missing, or the driver is too old.
    """

    runtime = "hip"
    out_of_memory = int(hip.hipError_t.hipErrorOutOfMemory)
    thread_stream = _PER_THREAD_STREAM

    def __init__(self) -> None:
        _initialise()
        self.compiler = HipCompiler()

    def versions(self) -> str:
        """Versions of the runtime and of the compiler."""
        return f"HIP {_version(int(_call('hipRuntimeGetVersion')))}, {self.compiler.version()}"

    def error_text(self, status: int) -> str:
        """The driver's name and words for a status."""
        return _text(status)

    # -- devices and contexts ---

    def device_count(self) -> int:
        """Number of devices."""
        status, values = _status("hipGetDeviceCount")
        if status == hip.hipError_t.hipErrorNoDevice:
            return 0
        return int(values[0]) if status == 0 else int(_call("hipGetDeviceCount"))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (one object a process)
    def device(self, ordinal: int) -> DeviceInfo:
        """What a device is."""
        properties = _call("hipGetDeviceProperties", ordinal)
        return DeviceInfo(
            name=properties.name,
            device_id=f"hip:{bytes(properties.uuid.bytes).hex()}",
            architecture=properties.gcnArchName.partition(":")[0],  # "gfx942:sramecc+:xnack-"
            multiprocessors=properties.multiProcessorCount,
            memory_bytes=properties.totalGlobalMem,
            pci_address=f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0",
        )

    def context(self, ordinal: int) -> int:
        """The device's number."""
        return ordinal

    def current(self) -> int | None:
        """The number of the thread's current device; it always has one."""
        return int(_call("hipGetDevice"))

    def make_current(self, context: int) -> None:
        """Makes a device current."""
        _call("hipSetDevice", context)

    def synchronize(self) -> None:
        """Waits for the current device."""
        _call("hipDeviceSynchronize")

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether a device reaches another's memory."""
        return bool(_call("hipDeviceCanAccessPeer", ordinal, peer))

    def enable_peer_access(self, peer_context: int) -> None:
        """Lets the current device reach a peer's memory."""
        status, _ = _status("hipDeviceEnablePeerAccess", peer_context, 0)
        if status not in (0, hip.hipError_t.hipErrorPeerAccessAlreadyEnabled):
            raise DriverError("hipDeviceEnablePeerAccess", status, _text(status))

    # -- memory ---

    def allocate(self, nbytes: int) -> int:
        """Uncached device memory: a kernel sees in it what peers and copies write while it runs."""
        return int(_call("hipExtMallocWithFlags", nbytes, _MALLOC_UNCACHED))

    def free(self, ptr: int) -> None:
        """Frees device memory."""
        _call("hipFree", ptr)

    def address_range(self, ptr: int, nbytes: int = 1) -> tuple[int, int]:
        """Base and size of an allocation."""
        base, size = _call("hipMemGetAddressRange", ptr)
        return int(base), int(size)

    def pointer_device(self, ptr: int) -> int | None:
        """The device that memory belongs to."""
        status, values = _status("hipPointerGetAttributes", ptr)
        if status or values[0].type != hip.hipMemoryType.hipMemoryTypeDevice:
            return None
        return int(values[0].device)

    def allocation_id(self, ptr: int) -> int:
        """A number of the allocation."""
        number = ctypes.c_uint64()
        _call("hipPointerGetAttribute", number, hip.hipPointer_attribute.HIP_POINTER_ATTRIBUTE_BUFFER_ID, ptr)
        return number.value

    def export_memory(self, base: int, size: int) -> bytes:
        """A HIP IPC handle."""
        handle = _call("hipIpcGetMemHandle", base)
        return ctypes.string_at(handle.as_c_void_p().value, handle.c_sizeof())

    def import_memory(self, handle: bytes) -> int:
        """Opens a HIP IPC handle."""
        ipc = hip.hipIpcMemHandle_st.fromObj(bytearray(handle))
        return int(_call("hipIpcOpenMemHandle", ipc, hip.hipIpcMemLazyEnablePeerAccess))

    def release_memory(self, base: int) -> None:
        """Closes what `import_memory` opened."""
        _call("hipIpcCloseMemHandle", base)

    def grant_access(self, base: int, size: int, ordinal: int) -> None:
        """Nothing: peer access between devices covers all memory that is supported here."""

    def dmabuf(self, base: int, nbytes: int) -> int:
        """A file descriptor of a DMA-BUF."""
        descriptor = ctypes.c_int()
        kind = hip.hipMemRangeHandleType.hipMemRangeHandleTypeDmaBufFd
        _call("hipMemGetHandleForAddressRange", ctypes.addressof(descriptor), base, nbytes, kind, 0)
        return descriptor.value

    def register_host(self, ptr: int, nbytes: int) -> None:
        """Pins and maps host memory."""
        _call("hipHostRegister", ptr, nbytes, hip.hipHostRegisterMapped | hip.hipHostRegisterPortable)

    def unregister_host(self, ptr: int) -> None:
        """Unpins host memory."""
        _call("hipHostUnregister", ptr)

    def host_device_pointer(self, ptr: int) -> int:
        """The device's address of pinned memory."""
        return int(_call("hipHostGetDevicePointer", ptr, 0))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queues a copy."""
        _call("hipMemcpyAsync", dst, src, nbytes, hip.hipMemcpyKind.hipMemcpyDefault, stream)

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Queues the setting of bytes."""
        _call("hipMemsetD8Async", dst, value, nbytes, stream)

    # -- streams and events ---

    def create_stream(self) -> int:
        """A non-blocking stream."""
        return int(_call("hipStreamCreateWithFlags", hip.hipStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream."""
        _call("hipStreamDestroy", stream)

    def stream_query(self, stream: int) -> bool:
        """Whether a stream is done."""
        return _done("hipStreamQuery", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Waits for a stream."""
        _call("hipStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Makes a stream wait for an event."""
        _call("hipStreamWaitEvent", stream, event, 0)

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured."""
        return bool(_call("hipStreamIsCapturing", stream) != hip.hipStreamCaptureStatus.hipStreamCaptureStatusNone)

    def relax_capture(self, mode: int | None = None) -> int:
        """Exchanges the thread's capture mode, by default for the relaxed one."""
        wanted = hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed if mode is None else mode
        exchanged = ctypes.c_int(int(wanted))
        # hip-python's wrapper takes no mode to give: it passes whatever lies in the word.
        status = _library().hipThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        if status:
            raise DriverError("hipThreadExchangeStreamCaptureMode", status, _text(status))
        return exchanged.value

    def create_event(self) -> int:
        """An event."""
        return int(_call("hipEventCreateWithFlags", hip.hipEventDefault))

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""
        _call("hipEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Records an event."""
        _call("hipEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether an event was reached."""
        return _done("hipEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Waits for an event."""
        _call("hipEventSynchronize", event)

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between events."""
        return float(_call("hipEventElapsedTime", start, end))

    # -- kernels ---

    def load_module(self, image: bytes) -> int:
        """Loads a code object."""
        # As a bytearray: bytes are kept by hip-python for the life of the process.
        return int(_call("hipModuleLoadData", bytearray(image)))

    def module_function(self, module: int, name: str) -> int:
        """A kernel."""
        return int(_call("hipModuleGetFunction", module, name.encode()))

    def module_global(self, module: int, name: str) -> tuple[int, int]:
        """A variable."""
        address, nbytes = _call("hipModuleGetGlobal", module, name.encode())
        return int(address), int(nbytes)

    # -- addresses ---

    def engine_functions(self) -> EngineFunctions:
        """Addresses of the calls that the engine makes."""
        return EngineFunctions(
            copy=_address("hipMemcpyDtoDAsync"),
            write64=_address("hipStreamWriteValue64"),
            event_record=_address("hipEventRecord"),
            event_query=_address("hipEventQuery"),
            make_current=_address("hipSetDevice"),
        )

    def launch_address(self) -> int:
        """hipModuleLaunchKernel."""
        return _address("hipModuleLaunchKernel")

    def current_address(self) -> int:
        """hipGetDevice."""
        return _address("hipGetDevice")
