"""hip-python, as the modules for HIP import it, and the results of its calls.

hip-python wraps each call, with its arguments and results as Python objects. Functions that C calls, and the one
call that it wraps wrongly, are taken from the library that it has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.lost_context import LOST_CONTEXT

try:
    from hip import hip, hiprtc
    from rocm.bindings.util.paths import get_library_path
except ImportError as error:
    raise RuntimeUnavailableError(
        f"hip: its Python package is missing ({error}); install it with: pip install 'proxyccl[hip]'"
    ) from None

__all__ = ["address_of", "call", "done", "error_text", "freed", "hip", "hiprtc", "library", "status_of"]


def error_text(status: Any) -> str:
    """The name and the text for a status."""
    try:
        error = hip.hipError_t(status)
    except ValueError:
        return "an error that hip-python does not know"
    return f"{error.name}, {hip.hipGetErrorString(error)[1]}"


def status_of(name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
    """A call's status and its other results."""
    try:
        status, *values = getattr(hip, name)(*args)
    except RuntimeError as error:  # hip-python's error if it can't load the library or find the call in it
        raise RuntimeUnavailableError(f"hip: ROCm's runtime library lacks {name}: {error}") from None
    return int(status), tuple(values)


def call(name: str, *args: Any) -> Any:
    """A call's results, without its status."""
    status, values = status_of(name, *args)
    if status:
        raise DriverError(name, status, error_text(status))
    return values[0] if len(values) == 1 else values


def freed(name: str, *args: Any) -> None:
    """`call` for a call that frees a resource, which is gone already if its context is lost."""
    status, _ = status_of(name, *args)
    if status and status not in LOST_CONTEXT:
        raise DriverError(name, status, error_text(status))


def done(name: str, *args: Any) -> bool:
    """Whether the work that a query asks about is done."""
    status, _ = status_of(name, *args)
    if status not in (0, hip.hipError_t.hipErrorNotReady):
        raise DriverError(name, status, error_text(status))
    return status == 0


@functools.cache
def library() -> ctypes.CDLL:
    """The library that hip-python calls."""
    return ctypes.CDLL(os.fsdecode(get_library_path("amdhip64")))


@functools.cache
def address_of(name: str) -> int:
    """The address of a function in it."""
    return int(ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0)
