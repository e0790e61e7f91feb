"""Stream captures on the HIP runtime over the host runtime, and stand-ins for torch's and cupy's current streams."""

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
    """The calling thread's current stream in each library, as a handle; the legacy default stream at first."""

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
    """Returns whether captures are possible: whether HIP's library is the one over the host runtime."""
    return hasattr(library(), "hipOnHostCapture")


def use(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts stand-ins for torch and cupy that have only current streams into sys.modules for the rest of a test. All
    ranks call this, after all code that looks whether torch is imported.
    """
    comm.all_gather_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", _TORCH)
    monkeypatch.setitem(sys.modules, "cupy", _CUPY)


@contextlib.contextmanager
def capture(runtime: Runtime, current_of: str | None) -> Iterator[Stream]:
    """Captures the work of a new stream within the block, in which the stream is the calling thread's current stream of
    the library `current_of`, if that is given.
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
