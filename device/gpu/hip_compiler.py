"""AMD's `Compiler`: HIPRTC from the machine's ROCm."""

from __future__ import annotations

import functools
from typing import Any

from proxyccl.device.errors import CompileError, RuntimeUnavailableError
from proxyccl.device.gpu.hip_bindings import hiprtc


@functools.cache
def compiler_version() -> tuple[int, int]:
    """Returns HIPRTC's version (major, minor). Raises RuntimeUnavailableError if HIPRTC can't be loaded."""
    try:
        major, minor = _hiprtc("hiprtcVersion")
    except RuntimeError as error:
        raise RuntimeUnavailableError(f"hip: ROCm's run-time compiler can't be loaded ({error})") from None
    return int(major), int(minor)


def compile_options(architecture: str) -> tuple[str, ...]:
    """Returns the options for an architecture such as "gfx942". The last one enables __shfl_sync before ROCm 7."""
    return (f"--offload-arch={architecture}", "-std=c++17", "-O3", "-DHIP_ENABLE_WARP_SYNC_BUILTINS")


class HipCompiler:
    """HIPRTC. See `proxyccl.device.driver.Compiler` for the methods.

    Raises:
        RuntimeUnavailableError: HIPRTC is not installed.
    """

    runtime = "hip"

    def __init__(self) -> None:
        compiler_version()

    def version(self) -> str:
        major, minor = compiler_version()
        return f"HIPRTC {major}.{minor}"

    def options(self, architecture: str) -> tuple[str, ...]:
        return compile_options(architecture)

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
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


def _hiprtc(name: str, *args: Any) -> Any:
    status, *values = getattr(hiprtc, name)(*args)
    if int(status):
        raise CompileError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
