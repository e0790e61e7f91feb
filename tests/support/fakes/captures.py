"""Stream captures on the HIP runtime that runs on the CPU (support/hip), with fakes of torch's and cupy's current
streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from proxyccl import Communicator, Runtime, Stream
from proxyccl.device.gpu.hip_bindings import library


class _Current(threading.local):
    """The handle of the calling thread's current stream in each library; 0 is the legacy default stream."""

    torch = 0
    cupy = 0


_current = _Current()
_TORCH = SimpleNamespace(
    cuda=SimpleNamespace(is_initialized=lambda: True),
    _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: _current.torch),
)
_CUPY = SimpleNamespace(
    cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=_current.cupy, device_id=-1))
)


def are_there() -> bool:
    """Returns whether captures are possible, which only the HIP library of support/hip supports."""
    return hasattr(library(), "hipOnHostCapture")


def use(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `torch` and `cupy` in sys.modules by fakes that have only current streams, until the test ends. All
    ranks must call this, after any code that checks whether torch is imported.
    """
    comm.all_gather_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", _TORCH)
    monkeypatch.setitem(sys.modules, "cupy", _CUPY)


@contextlib.contextmanager
def capture(runtime: Runtime, current_of: str | None) -> Iterator[Stream]:
    """Captures the work of a new stream during the `with` block. If `current_of` names a library, the stream
    is also the calling thread's current stream in that library.
    """
    stream = runtime.create_stream()
    before = dict(vars(_current))
    library().hipOnHostCapture(ctypes.c_void_p(stream.handle), 1)
    if current_of is not None:
        setattr(_current, current_of, stream.handle)
    try:
        yield stream
    finally:
        vars(_current).clear()
        vars(_current).update(before)
        library().hipOnHostCapture(ctypes.c_void_p(stream.handle), 0)
