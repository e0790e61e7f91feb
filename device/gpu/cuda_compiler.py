"""NVIDIA's `Compiler`: NVRTC from PyPI."""

from __future__ import annotations

import functools
from typing import Any

from proxyccl.device.errors import CompileError, RuntimeUnavailableError
from proxyccl.device.gpu.cuda_bindings import nvrtc


@functools.cache
def compiler_version() -> tuple[int, int]:
    """Returns NVRTC's version (major, minor). Raises RuntimeUnavailableError if NVRTC is not installed."""
    try:
        major, minor = _nvrtc("nvrtcVersion", nvrtc.nvrtcVersion())
    except RuntimeError as error:
        raise RuntimeUnavailableError(
            f"cuda: NVRTC is not installed ({error}); install it with: pip install nvidia-cuda-nvrtc"
        ) from None
    return int(major), int(minor)


class CudaCompiler:
    """NVRTC. See `proxyccl.device.driver.Compiler` for the methods.

    Raises:
        RuntimeUnavailableError: NVRTC is not installed.
    """

    runtime = "cuda"
    _image = "CUBIN"

    def __init__(self) -> None:
        compiler_version()

    def version(self) -> str:
        major, minor = compiler_version()
        return f"NVRTC {major}.{minor}"

    def options(self, architecture: str) -> tuple[str, ...]:
        """Returns options for compiling to a cubin instead of PTX, because drivers refuse PTX of newer compilers."""
        return (f"-arch={architecture}", "-std=c++17", "-default-device")

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        program = _nvrtc("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
        try:
            encoded = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            if status:
                log = bytearray(_nvrtc("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program)))
                _nvrtc("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
                raise CompileError("NVRTC could not compile the kernel source", log.rstrip(b"\0").decode())
            size, get = f"nvrtcGet{self._image}Size", f"nvrtcGet{self._image}"
            image = bytearray(_nvrtc(size, getattr(nvrtc, size)(program)))
            _nvrtc(get, getattr(nvrtc, get)(program, image))
            return bytes(image)
        finally:
            _nvrtc("nvrtcDestroyProgram", nvrtc.nvrtcDestroyProgram(program))


class CudaLinkCompiler(CudaCompiler):
    """NVRTC for LTO-IR images, which a linker inlines into another compiler's code."""

    _image = "LTOIR"

    def options(self, architecture: str) -> tuple[str, ...]:
        """Returns the options of `CudaCompiler`, and the options that leave optimisation to the linker."""
        return (*super().options(architecture), "-dlto", "-rdc=true")


def _nvrtc(call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status:
        raise CompileError(f"{call}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if len(values) == 1 else tuple(values)
