"""Compiles with NVRTC from PyPI, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest

from proxyccl.device.build.compile_cache import CUDA_NAMES_DIR, INCLUDE_DIR, KERNEL_DIR

CUBIN = "-arch=sm_90"
PTX = "-arch=compute_90"


class Nvrtc:
    """A compiler that calls libnvrtc."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia")
        roots = spec.submodule_search_locations if spec is not None else None
        found = [path for root in roots or () for path in Path(root).glob("**/libnvrtc.so.*")]
        if not found:
            pytest.fail("libnvrtc is missing: pip install nvidia-cuda-nvrtc (it is part of the extra 'test')")
        self._lib = ctypes.CDLL(str(found[0]))

    def compile(self, source: str, arch: str) -> bytes:
        """Compiles a source. Returns the cubin (-arch=sm_*) or the PTX (-arch=compute_*). Asserts that there are no
        errors and no warnings.
        """
        program = ctypes.c_void_p()
        options = [f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}", f"-I{CUDA_NAMES_DIR}", "-std=c++17", arch]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check(self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source", 0, None, None))
        try:
            status = self._lib.nvrtcCompileProgram(program, len(options), encoded)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode().strip()
            assert (status, log) == (0, ""), log
            return self._fetch(program, "CUBIN" if arch.startswith("-arch=sm_") else "PTX")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        assert status == 0, self._lib.nvrtcGetErrorString(status)
