"""Arrays: a view of anybody's array, and memory of our own as an array.

`as_view` takes whatever a caller has (DLPack first, then the CUDA array interface, then the buffer protocol) and says
where it lies. It knows no rank and copies nothing.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.device.dtypes import DTYPES, DType, as_dtype, from_dlpack_type
from proxyccl.device.errors import ArgumentError, ClosedError

if TYPE_CHECKING:
    from proxyccl.device.runtime import Memory, Runtime, StreamLike

# DLPack device types (dlpack.h, DLDeviceType).
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_ROCM, _DL_ROCM_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 10, 11, 13
_DL_RUNTIME = {
    _DL_CPU: "host",
    _DL_CUDA: "cuda",
    _DL_CUDA_MANAGED: "cuda",
    _DL_ROCM: "hip",
    _DL_CUDA_HOST: "cuda",
    _DL_ROCM_HOST: "hip",
}


@dataclass(frozen=True)
class ArrayView:
    """Where an array lies. It keeps `owner` alive and owns nothing.

    Attributes:
        ptr: address of the first element.
        shape: elements in each dimension; the array is contiguous in C order.
        dtype: element type.
        device: runtime ("host", "cuda", "hip") and device number; number -1 where the exporter does not tell.
        writable: whether its exporter lets it be written.
    """

    ptr: int
    shape: tuple[int, ...]
    dtype: DType
    device: tuple[str, int]
    writable: bool
    owner: object

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


class Array:
    """Contiguous device memory as an array, in C order; made by `Communicator.empty`.

    On the host runtime it is a numpy array in all but name (``numpy.asarray(a)`` shares its memory); on a GPU it offers
    ``__cuda_array_interface__`` and ``__dlpack__``.
    """

    def __init__(self, runtime: Runtime, memory: Memory, shape: tuple[int, ...], dtype: DType) -> None:
        self._runtime = runtime
        self.memory = memory
        self.shape = shape
        self.dtype = dtype

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        if self.memory.closed:
            raise ClosedError("the array's memory was freed")
        return self.memory.ptr

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype={self.dtype}, device={self._runtime.name}:{self._runtime.device})"

    def view(self) -> ArrayView:
        """This array as an `ArrayView`."""
        return ArrayView(self.ptr, self.shape, self.dtype, (self._runtime.name, self._runtime.device), True, self)

    def numpy(self) -> NDArray[Any]:
        """A copy in host memory. Waits for the device."""
        out = np.empty(self.shape, self.dtype.numpy())
        if self.nbytes:
            self._runtime.synchronize()
            self._runtime.copy(out.ctypes.data, self.ptr, self.nbytes)
        return out

    def upload(self, values: Any) -> Array:
        """Overwrites the array with values from host memory, broadcast and converted as numpy does. Returns itself.

        Waits until the values are on the device.
        """
        host = np.empty(self.shape, self.dtype.numpy())
        host[...] = np.asarray(values)
        if self.nbytes:
            self._runtime.copy(self.ptr, host.ctypes.data, self.nbytes)
        return self

    def free(self) -> None:
        """Frees the memory now, and not with the last reference to the array. No work may use it any more."""
        self.memory.close()

    def fill(self, value: Any) -> Array:
        """Sets every element. Returns itself."""
        return self.upload(value)

    def _interface(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.numpy().str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }

    def __getattr__(self, name: str) -> Any:
        # Offered only where they are true, since callers ask with hasattr().
        if name == "__array_interface__" and self._runtime.name == "host":
            return self._interface()
        if name == "__cuda_array_interface__" and self._runtime.name != "host":
            return self._interface()
        raise AttributeError(f"'Array' object has no attribute {name!r}")

    def __dlpack_device__(self) -> tuple[int, int]:
        return {"host": _DL_CPU, "cuda": _DL_CUDA, "hip": _DL_ROCM}[self._runtime.name], self._runtime.device

    def __dlpack__(
        self,
        *,
        stream: StreamLike = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("an Array is exported where it lies; numpy() makes a copy in host memory")
        return _export_dlpack(self)


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_DLTENSOR = b"dltensor"

# What an exported tensor refers to, until its consumer calls the deleter.
_exported: dict[int, tuple[object, ...]] = {}


def _release_export(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _drop_capsule(capsule: int) -> None:
    # A capsule that was consumed has been renamed; one that was not still owns its tensor.
    holder = ctypes.cast(capsule, ctypes.py_object)
    if _is_valid(holder, _DLTENSOR):
        _exported.pop(int(_get_pointer(holder, _DLTENSOR)), None)


_deleter = _Deleter(_release_export)
_capsule_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop_capsule)


def _export_dlpack(array: Array) -> Any:
    device_type, device = array.__dlpack_device__()
    shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
    managed = _DLManagedTensor()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id = array.ptr, device_type, device
    tensor.ndim, tensor.shape, tensor.strides, tensor.byte_offset = len(array.shape), shape, None, 0
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = (*array.dtype.dlpack, 1)
    managed.deleter = _deleter
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, array)
    return _new_capsule(address, _DLTENSOR, ctypes.cast(_capsule_destructor, ctypes.c_void_p))


def _from_dlpack(x: Any, argument: str) -> ArrayView:
    device_type, device = (int(v) for v in x.__dlpack_device__())
    runtime = _DL_RUNTIME.get(device_type)
    if runtime is None:
        raise ArgumentError(argument, f"DLPack device type {device_type} is not supported")
    # On a GPU -1 tells the exporter not to order its stream with ours: the caller names the stream.
    try:
        capsule = x.__dlpack__() if runtime == "host" else x.__dlpack__(stream=-1)
    except BufferError as error:
        raise ArgumentError(argument, f"its library does not hand it over: {error}") from None
    tensor = _DLManagedTensor.from_address(_get_pointer(capsule, _DLTENSOR)).tensor
    dtype = from_dlpack_type(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if dtype is None:
        raise ArgumentError(
            argument, f"DLPack type code {tensor.dtype.code} of {tensor.dtype.bits} bits is not supported"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        _check_contiguous(shape, [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)], dtype, argument)
    pointer = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(pointer, shape, dtype, (runtime, device), True, (x, capsule))


def _is_torch(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _is_cupy(kind: type) -> bool:
    return kind.__module__.startswith("cupy") and kind.__name__ == "ndarray"


def _from_torch(x: Any, argument: str) -> ArrayView:
    # Not through DLPack: that takes microseconds, and refuses tensors that require a gradient.
    if x.device.type not in ("cpu", "cuda"):
        raise ArgumentError(argument, f"torch device {x.device} is not supported")
    dtype = as_dtype(x.dtype, argument)
    if not x.is_contiguous():
        raise ArgumentError(
            argument, f"the array is not contiguous in C order (shape {tuple(x.shape)}, strides {x.stride()} elements)"
        )
    device = ("host", 0)
    if x.device.type == "cuda":
        device = ("hip" if sys.modules["torch"].version.hip else "cuda", x.device.index)
    return ArrayView(x.data_ptr(), tuple(x.shape), dtype, device, True, x)


def _torch_fingerprint(x: Any) -> tuple[Any, ...] | None:
    return (x.data_ptr(), x.shape, x.dtype) if x.is_cuda and x.is_contiguous() else None


def _cupy_fingerprint(x: Any) -> tuple[Any, ...] | None:
    return (x.data.ptr, x.shape, x.dtype.str) if x.flags.c_contiguous else None


def _array_fingerprint(x: Array) -> tuple[Any, ...] | None:
    return None if x.memory.closed else (x.memory.ptr, x.shape, x.dtype.name)


def _torch_stream(x: Any) -> int:
    # What torch's own compiler emits; current_stream() makes objects and takes microseconds.
    stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
    return stream


def _cupy_stream(_: Any) -> StreamLike:
    # The object, for who holds it keeps the stream; torch never destroys its own.
    stream: StreamLike = sys.modules["cupy"].cuda.get_current_stream()
    return stream


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class _Library:
    """What is known of a library's arrays on a GPU; see the functions of the same names."""

    fingerprint: Callable[[Any], tuple[Any, ...] | None]
    stream: Callable[[Any], StreamLike]


def _find_library(kind: type) -> _Library:
    if _is_torch(kind):
        return _Library(_torch_fingerprint, _torch_stream)
    if _is_cupy(kind):
        return _Library(_cupy_fingerprint, _cupy_stream)
    return _Library(_nothing, _nothing)


_libraries: dict[type, _Library] = {Array: _Library(_array_fingerprint, _nothing)}


def _library(kind: type) -> _Library:
    known = _libraries.get(kind)
    if known is None:
        known = _libraries[kind] = _find_library(kind)
    return known


def fingerprint(x: Any) -> tuple[Any, ...] | None:
    """What an array on a GPU is to a call: equal for two arrays only if every call treats them alike.

    None where that is not known cheaply. An array that was checked once need not be checked again while its
    fingerprint is the same.
    """
    return _library(type(x)).fingerprint(x)


def current_stream(x: Any) -> StreamLike:
    """The stream on which the library that owns a GPU's array works now; None where it has no such notion."""
    return _library(type(x)).stream(x)


def _check_contiguous(shape: Sequence[int], strides: Sequence[int] | None, dtype: DType, argument: str) -> None:
    if strides is None or math.prod(shape) == 0:
        return
    expected = dtype.itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise ArgumentError(
                argument,
                f"the array is not contiguous in C order (shape {tuple(shape)}, strides {tuple(strides)} bytes)",
            )
        expected *= extent


def _from_interface(interface: dict[str, Any], device: tuple[str, int], owner: object, argument: str) -> ArrayView:
    dtype = as_dtype(np.dtype(interface["typestr"]), argument)
    shape = tuple(int(n) for n in interface["shape"])
    _check_contiguous(shape, interface.get("strides"), dtype, argument)
    pointer, read_only = interface["data"]
    return ArrayView(int(pointer or 0), shape, dtype, device, not read_only, owner)


def as_view(x: Any, argument: str, gpu: str = "cuda") -> ArrayView:
    """Where the caller's array lies.

    Args:
        x: an `Array`, or anything with ``__dlpack__``, ``__cuda_array_interface__`` or the buffer protocol;
            contiguous in C order.
        argument: the caller's name for it, for messages.
        gpu: the runtime that ``__cuda_array_interface__`` means: AMD's packages use the same name.

    Raises:
        ArgumentError: it is no array, is not contiguous, or has an element type or a device that is not known.
    """
    if isinstance(x, ArrayView):
        return x
    if isinstance(x, Array):
        return x.view()
    if isinstance(x, np.ndarray):
        # Before DLPack, which numpy refuses for read-only arrays and for ml_dtypes' types.
        dtype = as_dtype(x.dtype, argument)
        _check_contiguous(x.shape, x.strides, dtype, argument)
        return ArrayView(x.ctypes.data, x.shape, dtype, ("host", 0), x.flags.writeable, x)
    if _is_torch(type(x)):
        return _from_torch(x, argument)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, argument)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_interface(x.__cuda_array_interface__, (gpu, -1), x, argument)
    try:
        buffer = memoryview(x)
    except TypeError:
        raise ArgumentError(
            argument,
            f"{type(x).__name__} is no array: "
            "it has neither __dlpack__ nor __cuda_array_interface__ nor the buffer protocol",
        ) from None
    host = np.asarray(buffer)
    dtype = as_dtype(host.dtype, argument)
    _check_contiguous(host.shape, host.strides, dtype, argument)
    return ArrayView(host.ctypes.data, host.shape, dtype, ("host", 0), not buffer.readonly, (x, buffer))


def reduction_dtypes() -> list[str]:
    """Names of the element types that kernels can reduce."""
    return [name for name, dtype in DTYPES.items() if dtype.c_name]
