"""Reads torch's tensors, and torch's and cupy's current streams, without importing either library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.arrays.view import ArrayView
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ArgumentError


def is_torch(kind: type) -> bool:
    """Whether a type is torch.Tensor or a subclass. This check does not import torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def from_torch(x: Any, argument: str, *, in_bytes: bool = False) -> ArrayView:
    """Returns a view of a tensor. With `in_bytes`, the view is a one-dimensional array of the tensor's bytes, and any
    element type is allowed. Raises ArgumentError if the tensor has no memory, is a lazy view, is not contiguous, or has
    an unknown element type or device.
    """
    # Avoids DLPack, which takes microseconds and refuses tensors that require a gradient.
    require_tensor_memory(x, argument)
    for is_lazy, kind, method in ((x.is_conj(), "conjugate", "conj"), (x.is_neg(), "negative", "neg")):
        if is_lazy:
            raise ArgumentError(
                argument, f"the tensor is a {kind} view, whose memory holds other values; pass x.resolve_{method}()"
            )
    dtype = as_dtype("uint8" if in_bytes else x.dtype, argument)
    if not x.is_contiguous():
        raise ArgumentError(
            argument, f"the array is not contiguous in C order (shape {tuple(x.shape)}, strides {x.stride()} elements)"
        )
    device = ("host", 0)
    if x.is_cuda:
        device = ("hip" if sys.modules["torch"].version.hip else "cuda", x.get_device())
    shape = (x.numel() * x.element_size(),) if in_bytes else tuple(x.shape)
    return ArrayView(x.data_ptr(), shape, dtype, device, True, x)


_INSTEAD = {
    "AsyncCollectiveTensor": "pass x.wait()",
    "DTensor": "pass x.to_local()",
    "FakeTensor": "expected a tensor with values",
    "MaskedTensor": "pass x.to_tensor(value)",
    "NestedTensor": "pass x.values()",
}
"""The advice for a tensor without memory, by the name of torch's class."""


def require_tensor_memory(x: Any, argument: str) -> None:
    """Raises ArgumentError unless a tensor has memory, contiguous or not, on a CPU or a GPU.

    Tensors without memory are: tensors made of other tensors, such as DTensor; tensors of FakeTensorMode; tensors
    within ``torch.vmap`` and other transformations; tensors whose storage was freed by ``resize_(0)``.
    """
    kind = type(x)
    instead = libraries[kind].instead
    if instead is not None:
        raise ArgumentError(argument, f"a {kind.__name__} has no memory of its own; {instead}")
    if x.layout != sys.modules["torch"].strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise ArgumentError(argument, f"the tensor has layout {layout}; expected a dense one (torch.strided)")
    if not (x.is_cuda or x.is_cpu):
        raise ArgumentError(argument, f"torch device {x.device} is not supported; expected cpu or cuda")
    if not x.numel():
        return
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + last + 1) * x.element_size()
    try:
        storage = x.untyped_storage()
        address, held = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # the tensor has no storage, or the storage has no address
        address, held = 0, 0
    # Queries the storage, because x.data_ptr() of a view of a freed storage returns the view's offset instead of 0.
    if not address or held < needed:
        reason = f"its storage has {held} bytes; expected {needed}" if held else "its storage was freed, or it has none"
        raise ArgumentError(argument, f"the {kind.__name__} of shape {tuple(x.shape)} has no memory: {reason}")


def _torch_stream(x: Any) -> int | None:
    device = x.get_device()
    if device < 0:  # the CPU
        return None
    # Calls the function that torch's compiled code calls, because torch.cuda.current_stream() takes microseconds.
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    return stream


def _cupy_stream(_: Any) -> StreamLike:
    # Returns cupy's stream object instead of its handle, because cupy destroys a stream that has no references.
    stream: StreamLike = sys.modules["cupy"].cuda.get_current_stream()
    return stream


class _Library(Struct, frozen=True):
    """Properties of an array type."""

    stream: Callable[[Any], StreamLike]
    is_torch: bool = False
    instead: str | None = None

    @staticmethod
    def current_of_device() -> Callable[[int], int]:
        """Returns the function that returns the handle of torch's current stream on a GPU."""
        found: Callable[[int], int] = sys.modules["torch"]._C._cuda_getCurrentRawStream
        return found


def _find_library(kind: type) -> _Library:
    if is_torch(kind):
        of_torch = (base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch."))
        instead = next((_INSTEAD[name] for name in of_torch if name in _INSTEAD), None)
        return _Library(_torch_stream, is_torch=True, instead=instead)
    if kind.__module__.startswith("cupy") and kind.__name__ == "ndarray":
        return _Library(_cupy_stream)
    return _Library(lambda _: None)


class _Libraries(dict[type, _Library]):
    """The `_Library` of each array type, found at the type's first lookup."""

    def __init__(self) -> None:
        super().__init__()
        # By type of torch's tensors, the capsule of DLPack's exchange functions in C. Only types whose tensors have
        # memory of their own are included.
        self.tensor_types: dict[type, object] = {}

    def __missing__(self, kind: type) -> _Library:
        known = self[kind] = _find_library(kind)
        functions = getattr(kind, "__dlpack_c_exchange_api__", None)  # torch has these functions since 2.10
        if known.is_torch and known.instead is None and functions is not None:
            self.tensor_types[kind] = functions
        return known


libraries = _Libraries()
"""The properties of each type of arrays."""


def register(kind: type, stream: Callable[[Any], StreamLike]) -> None:
    """Registers an array type with the function that returns its current stream (`current_stream`)."""
    libraries[kind] = _Library(stream)


_raw_stream: Callable[[int], int] | None = None
"""torch's function for the handle of the calling thread's current stream on a device, once torch has used a GPU."""
LEGACY_STREAMS = (0, 1)
"""Handles of the legacy default stream, which can't be captured: the null stream, and CU_STREAM_LEGACY."""


def other_streams(device: int, handle: int) -> tuple[tuple[str, int], ...]:
    """Returns torch's and cupy's current streams on a GPU, each as a Python expression and a handle. Leaves out the
    legacy default stream and the stream `handle`. Neither imports a library nor initialises a GPU.
    """
    found: tuple[tuple[str, int], ...] = ()
    raw_stream = _raw_stream
    if raw_stream is None and "torch" in sys.modules:
        raw_stream = _find_raw_stream()
    if raw_stream is not None and (current := raw_stream(device)) != handle and current not in LEGACY_STREAMS:
        found = (("torch.cuda.current_stream()", current),)
    if "cupy" in sys.modules and (current := _cupys_handle(device)) != handle and current not in LEGACY_STREAMS:
        found = (*found, ("cupy.cuda.get_current_stream()", current))
    return found


def _find_raw_stream() -> Callable[[int], int] | None:
    global _raw_stream  # noqa: PLW0603
    # While another thread imports torch, torch may lack attributes. Before torch uses a GPU, no stream is current, and
    # torch's function would create a context on the process's first device.
    cuda = getattr(sys.modules["torch"], "cuda", None)
    if cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized():
        _raw_stream = _Library.current_of_device()
    return _raw_stream


def _cupys_handle(device: int) -> int:
    # While another thread imports cupy, cupy may lack attributes.
    get_current = getattr(getattr(sys.modules["cupy"], "cuda", None), "get_current_stream", None)
    stream = None if get_current is None else get_current()
    return stream.ptr if stream is not None and stream.device_id in (-1, device) else 0


def current_stream(x: Any) -> StreamLike:
    """Returns the current stream of the library that owns a GPU's array; None if the library has no current stream."""
    return libraries[type(x)].stream(x)
