"""cuda-bindings, as the modules for CUDA import it, and the statuses that its calls return."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import DriverError, RuntimeUnavailableError
from proxyccl.device.gpu.lost_context import LOST_CONTEXT

try:
    from cuda.bindings import driver as cu
    from cuda.bindings import nvrtc
except ImportError as error:
    raise RuntimeUnavailableError(
        f"cuda: its Python packages are missing ({error}); install them with: pip install 'proxyccl[cuda]'"
    ) from None

__all__ = ["cu", "error_text", "freed", "nvrtc", "ok"]


def error_text(status: int) -> str:
    """The driver's name and text for a status."""
    name = cu.cuGetErrorName(cu.CUresult(status))[1]
    words = cu.cuGetErrorString(cu.CUresult(status))[1]
    return ", ".join(part.decode() for part in (name, words) if part) or "unknown error"


def ok(call: str, result: tuple[Any, ...]) -> Any:
    """The results of a call of the binding, without its status."""
    status, *values = result
    if status:
        raise DriverError(call, int(status), error_text(int(status)))
    return values[0] if len(values) == 1 else tuple(values)


def freed(call: str, result: tuple[Any, ...]) -> None:
    """`ok` for a call that frees a resource, which is gone already if its context is lost."""
    if int(result[0]) not in LOST_CONTEXT:
        ok(call, result)
