"""Fake GPUs for a CPU-only torch: tensors that claim to be on a GPU, and streams of the HIP runtime.

The HIP runtime's calls go to the host runtime (tests/support/hip), so device memory is CPU memory. The streams are
asynchronous, as on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime
from support.paths import ROOT

_HIP_ON_HOST = ROOT / "build/rocm-on-host"


@functools.cache
def _runtime(device: int) -> Runtime:
    return open_runtime("hip", device)


class _Event:
    def __init__(self, device: int, stream: Any) -> None:
        self.event = _runtime(device).create_event()
        self.event.record(stream)

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class _Stream:
    """Stands in for torch.cuda.ExternalStream."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream, self.device = handle, device
        self.stream_id, self.device_index, self.device_type = handle, device.index, 1

    def record_event(self) -> _Event:
        return _Event(self.device.index, self.cuda_stream)

    def wait_event(self, event: _Event) -> None:
        _runtime(self.device.index).wait_event(self.cuda_stream, event.event)

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.record_event().synchronize()


_current = threading.local()


def _current_stream(device: torch.device) -> _Stream:
    if getattr(_current, "stream", None) is None:
        _current.made = _runtime(device.index).create_stream()
        _current.stream = _Stream(_current.made.handle, device)
    return _current.stream


@contextlib.contextmanager
def _stream(stream: _Stream | None) -> Iterator[None]:
    before = getattr(_current, "stream", None)
    if stream is not None:
        _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before


def _set_stream(stream_id: int, device_index: int, _: int) -> None:
    _current.stream = _Stream(stream_id, torch.device("cuda", device_index))


_CAPSULE = b"dlpack_exchange_api"
_DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_HIP = 10  # DLPack's number for the device type


def _exchange_on(number: int) -> tuple[object, object]:
    """Returns a capsule with DLPack's functions for tensors on a device, and an object that must outlive the capsule.
    torch's own functions would name the CPU as the tensors' device.
    """
    pointer_of, capsule_of = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule_of.restype, capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    words = ctypes.c_void_p * 7  # version, pointer to an older version's table, five functions
    functions = words.from_buffer_copy(
        ctypes.string_at(pointer_of(torch.Tensor.__dlpack_c_exchange_api__, _CAPSULE), 56)
    )
    describe = _DESCRIBE(functions[5])

    def describe_on(x: Any, tensor: int) -> int:
        try:
            describe(x, tensor)
        except RuntimeError:
            return -1
        (ctypes.c_int32 * 2).from_address(tensor + 8)[:] = [_HIP, number]
        return 0

    callback = _DESCRIBE(describe_on)
    functions[5] = ctypes.cast(callback, ctypes.c_void_p).value
    return capsule_of(ctypes.addressof(functions), _CAPSULE, None), (functions, callback)


@functools.cache
def _tensors_on(number: int) -> type[torch.Tensor]:
    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False
        device = torch.device("cuda", number)
        __dlpack_c_exchange_api__, _kept = _exchange_on(number)

        def get_device(self) -> int:
            return number

        def record_stream(self, stream: _Stream) -> None:
            """Does nothing: on_gpu keeps the memory."""

    return OnGpu


_memory: list[torch.UntypedStorage] = []
"""The memory of the current test's tensors. A GPU's allocator reuses memory in stream order; the CPU's allocator would
reuse the memory of a deleted tensor at once, before queued work has read it.
"""


def on_gpu(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """Returns a tensor that claims to be on a device, with the memory of `tensor`. The memory is kept for the test."""
    _memory.append(tensor.untyped_storage())
    return tensor.as_subclass(_tensors_on(device))


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for all work of the current stream, and returns a CPU tensor with the same memory."""
    _current_stream(tensor.device).synchronize()
    return tensor.as_subclass(torch.Tensor)


_future = torch._C.Future


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch use these fake GPUs until the test ends, with proxies as threads. Skips the test if `make
    rocm-on-host` was not run.
    """
    if not (_HIP_ON_HOST / "lib/libamdhip64.so").exists():
        pytest.skip("needs: make rocm-on-host")
    _memory.clear()
    monkeypatch.setenv("ROCM_PATH", str(_HIP_ON_HOST))
    monkeypatch.setenv("PROXYCCL_PROXY", "thread")
    names = {
        "ExternalStream": _Stream,
        "current_stream": _current_stream,
        "stream": _stream,
        "set_device": lambda _: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    in_c = {
        "Future": lambda _: _future([]),  # torch for CPUs lacks futures of GPUs
        "_cuda_getCurrentRawStream": lambda index: _current_stream(torch.device("cuda", index)).cuda_stream,
        "_cuda_getCurrentStream": lambda index: (_current_stream(torch.device("cuda", index)).stream_id, index, 1),
        "_cuda_setStream": _set_stream,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda _: None,
    }
    for name, value in in_c.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
