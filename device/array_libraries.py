"""What is known of other libraries' arrays beyond DLPack: torch's and cupy's. It imports neither."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxyccl.device.array_view import ArrayView
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError


def is_torch(kind: type) -> bool:
    """Whether a type is torch's tensor or derived from it. Imports no torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _is_cupy(kind: type) -> bool:
    return kind.__module__.startswith("cupy") and kind.__name__ == "ndarray"


def from_torch(x: Any, argument: str) -> ArrayView:
    """Where a tensor lies.

    Raises:
        ArgumentError: it is not contiguous, or has an element type or a device that is not known.
    """
    # Not through DLPack: that takes microseconds, and refuses tensors that require a gradient.
    if not (x.is_cuda or x.is_cpu):
        raise ArgumentError(argument, f"torch device {x.device} is not supported; expected cpu or cuda")
    dtype = as_dtype(x.dtype, argument)
    if not x.is_contiguous():
        raise ArgumentError(
            argument, f"the array is not contiguous in C order (shape {tuple(x.shape)}, strides {x.stride()} elements)"
        )
    device = ("host", 0)
    if x.is_cuda:
        device = ("hip" if sys.modules["torch"].version.hip else "cuda", x.get_device())
    return ArrayView(x.data_ptr(), tuple(x.shape), dtype, device, True, x)


def _torch_fingerprint(x: Any) -> tuple[Any, ...] | None:
    return (x.data_ptr(), x.shape, x.dtype) if (x.is_cuda or x.is_cpu) and x.is_contiguous() else None


def _cupy_fingerprint(x: Any) -> tuple[Any, ...] | None:
    return (x.data.ptr, x.shape, x.dtype.str) if x.flags.c_contiguous else None


def _torch_stream(x: Any) -> int:
    # What torch's own compiler emits; current_stream() makes objects and takes microseconds.
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
    return stream


def _cupy_stream(_: Any) -> StreamLike:
    # The object and not its handle: a reference keeps the stream alive. torch never destroys its own.
    stream: StreamLike = sys.modules["cupy"].cuda.get_current_stream()
    return stream


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class _Library:
    """What is known of a library's arrays; see `fingerprint`, `current_stream` and `from_torch`."""

    fingerprint: Callable[[Any], tuple[Any, ...] | None]
    stream: Callable[[Any], StreamLike]
    is_torch: bool = False


def _find_library(kind: type) -> _Library:
    if is_torch(kind):
        return _Library(_torch_fingerprint, _torch_stream, is_torch=True)
    if _is_cupy(kind):
        return _Library(_cupy_fingerprint, _cupy_stream)
    return _Library(_nothing, _nothing)


class _Libraries(dict[type, _Library]):
    """By array type; a type's library is found when it is first looked up."""

    def __missing__(self, kind: type) -> _Library:
        known = self[kind] = _find_library(kind)
        return known


libraries = _Libraries()
"""What is known of each type of arrays."""


def register(kind: type, fingerprint: Callable[[Any], tuple[Any, ...] | None]) -> None:
    """Makes an array type known that works on no stream of its own; see `fingerprint`."""
    libraries[kind] = _Library(fingerprint, _nothing)


def fingerprint(x: Any) -> tuple[Any, ...] | None:
    """What an array is to a call: equal for two arrays only if every call treats them alike.

    None where that is not known cheaply. An array that was checked once need not be checked again while its
    fingerprint is the same.
    """
    return libraries[type(x)].fingerprint(x)


def current_stream(x: Any) -> StreamLike:
    """The stream on which the library that owns a GPU's array works now; None where it has no such notion."""
    return libraries[type(x)].stream(x)
