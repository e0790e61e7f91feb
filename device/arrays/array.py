"""`Array`, this library's array, and `as_view`, which reads any library's array.

`as_view` reads an array by DLPack, else by the CUDA array interface, else by the buffer protocol. Nothing is copied.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.device._native import ffi
from proxyccl.device.arrays.dlpack import dlpack_device, export_dlpack, from_dlpack
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.arrays.libraries import current_stream, from_torch, libraries
from proxyccl.device.arrays.view import ArrayView, require_contiguous, require_memory
from proxyccl.device.base_runtime import BaseRuntime, Memory, StreamLike
from proxyccl.device.errors import ArgumentError, ClosedError, SuspendedError

if TYPE_CHECKING:
    from proxyccl.device._native import VoidPointer  # defined only in the type stub

__all__ = ["Array", "ArrayView", "as_view", "current_stream"]

_MOST_ADDRESS = 2**64 - 1
_from_buffer, _cast = ffi.from_buffer, ffi.cast  # cached, because looking up the attributes takes time in each call


class Array:
    """A contiguous array in device memory, in C order. `Communicator.empty` makes an Array.

    On the host runtime ``numpy.asarray(a)`` shares the array's memory; on a GPU the array offers
    ``__cuda_array_interface__`` and ``__dlpack__``.

    Attributes:
        address: `ptr` while the memory exists, is not suspended, and belongs to this array only; else None. C reads
            this attribute instead of the slower `ptr`.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, shape: tuple[int, ...], dtype: DType) -> None:
        self._runtime = runtime
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.address: int | None = None
        self._suspended = False
        self._views: set[int] = set()
        self._view_numbers = itertools.count()

    @property
    def runtime(self) -> BaseRuntime:
        """The runtime of the array's device."""
        return self._runtime

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        if self.memory.closed:
            raise ClosedError("the array's memory was freed")
        if self._suspended:
            raise SuspendedError(f"{self!r} has no memory: its communicator was suspended and did not resume")
        return self.memory.ptr

    def set_suspended(self, suspended: bool) -> None:
        """Makes `ptr`, and so every use of the elements, raise SuspendedError, or undoes this. Only for the owner of an
        array that has an `address`.
        """
        self._suspended = suspended
        self.address = None if suspended or self.memory.closed else self.memory.ptr

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
        """The array's `ArrayView`."""
        return ArrayView(self.ptr, self.shape, self.dtype, (self._runtime.name, self._runtime.device), True, self)

    def numpy(self) -> NDArray[Any]:
        """Returns a copy in host memory. Waits for the device."""
        out = np.empty(self.shape, self.dtype.numpy())
        if self.nbytes:
            self._runtime.synchronize()
            self._runtime.copy(out.ctypes.data, self.ptr, self.nbytes)
        return out

    def upload(self, values: Any) -> Array:
        """Overwrites the array with values from host memory, broadcast and converted as in numpy. Returns the array.

        Waits until the values are on the device.

        Raises:
            ArgumentError: the values are a masked array, or can't be broadcast or converted.
        """
        require_unmasked(values, "values")
        host = np.empty(self.shape, self.dtype.numpy())
        try:
            host[...] = np.asarray(values)
        except (OverflowError, TypeError, ValueError) as error:
            raise ArgumentError("values", f"can't be converted to {self.shape} of {self.dtype}: {error}") from error
        if self.nbytes:
            self._runtime.copy(self.ptr, host.ctypes.data, self.nbytes)
        return self

    def free(self) -> None:
        """Frees the memory now instead of with the last reference to the array. No queued work may use the memory.

        On a GPU the caller must first drop views that were made by ``__cuda_array_interface__``, because this library
        does not know of these views.

        Raises:
            BufferError: numpy, or another library by DLPack, still has views of the array.
        """
        if self._views:
            raise BufferError(f"the array can't be freed: other libraries have views of it ({len(self._views)})")
        self.address = None
        self.memory.close()

    def fill(self, value: Any) -> Array:
        """Sets every element. Returns the array."""
        return self.upload(value)

    def hold(self) -> VoidPointer:
        """Returns the address of the first element. While the returned object lives, the array can't be freed."""
        number = next(self._view_numbers)
        self._views.add(number)

        def let_go(_: object, array: Array = self) -> None:
            array._views.discard(number)

        return ffi.gc(_cast("void *", self.ptr), let_go)

    def _interface(self, data: object) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.numpy().str, "data": data, "strides": None, "version": 3}

    def __getattr__(self, name: str) -> Any:
        # On each device the array has only the attributes of protocols that the device supports: other libraries test
        # with hasattr().
        if name == "__array_interface__" and self._runtime.name == "host":
            # Passes a buffer instead of an address, because numpy keeps a buffer's owner alive.
            return self._interface(ffi.buffer(self.hold(), self.nbytes))
        if name == "__cuda_array_interface__" and self._runtime.name != "host":
            return self._interface((self.ptr, False))
        raise AttributeError(f"'Array' object has no attribute {name!r}")

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack_device(self._runtime.name, self._runtime.device)

    def __dlpack__(
        self,
        *,
        stream: StreamLike = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("an Array is exported only where it lies; numpy() makes a copy in host memory")
        return export_dlpack(self)


def _from_interface(x: Any, device: tuple[str, int], argument: str) -> ArrayView:
    interface = x.__cuda_array_interface__
    try:
        numpy_type = np.dtype(interface["typestr"])
        shape = tuple(operator.index(n) for n in interface["shape"])
        strides = None if interface.get("strides") is None else tuple(map(operator.index, interface["strides"]))
        pointer, read_only = interface["data"]
        address = operator.index(pointer or 0)
        if not 0 <= address <= _MOST_ADDRESS or any(n < 0 for n in shape) or len(strides or shape) != len(shape):
            raise ValueError(f"address {address}, shape {shape}, strides {strides}")  # noqa: TRY301
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(argument, f"its __cuda_array_interface__ can't be read: {error!r}") from error
    dtype = as_dtype(numpy_type, argument)
    if interface.get("mask") is not None:
        raise ArgumentError(argument, "the array has a mask; expected an array without one")
    require_contiguous(shape, strides, dtype, argument)
    require_memory(address, shape, argument)
    return ArrayView(address, shape, dtype, device, not read_only, x)


def _from_numpy(x: NDArray[Any], writable: bool, owner: object, argument: str) -> ArrayView:
    require_unmasked(x, argument)
    dtype = as_dtype(x.dtype, argument)
    require_contiguous(x.shape, x.strides, dtype, argument)
    return ArrayView(x.ctypes.data, x.shape, dtype, ("host", 0), writable, owner)


def require_unmasked(x: object, argument: str) -> None:
    """Raises ArgumentError for numpy's masked arrays, because their memory also holds the values that are masked."""
    numpy_ma = sys.modules.get("numpy.ma")  # no array is masked until numpy.ma is imported
    if isinstance(x, getattr(numpy_ma, "MaskedArray", ())):
        raise ArgumentError(argument, "the array is masked; pass x.filled(), which replaces the masked values")


def as_view(x: Any, argument: str, gpu: str = "cuda") -> ArrayView:
    """Returns a view of the caller's array. Raises ArgumentError if `x` is not an array, has no memory, has a mask, is
    a lazy view of torch's, is not contiguous, or has an unknown element type or device.

    Args:
        x: an `Array`, or anything with ``__dlpack__``, ``__cuda_array_interface__`` or the buffer protocol;
            contiguous in C order.
        argument: the argument's name in messages.
        gpu: the runtime of arrays with ``__cuda_array_interface__``: "cuda", or "hip", because AMD's packages also
            offer this attribute.
    """
    if isinstance(x, ArrayView):
        return x
    if isinstance(x, Array):
        return x.view()
    if isinstance(x, np.ndarray):
        # numpy's arrays are not read by DLPack, which numpy refuses for read-only arrays and for ml_dtypes' types.
        return _from_numpy(x, x.flags.writeable, x, argument)
    if libraries[type(x)].is_torch:
        return from_torch(x, argument)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return from_dlpack(x, argument)
    if hasattr(x, "__cuda_array_interface__"):
        # ``__cuda_array_interface__`` always describes a GPU's memory, even if this process uses the host runtime.
        return _from_interface(x, ("cuda" if gpu == "host" else gpu, -1), argument)
    try:
        buffer = memoryview(x)
    except TypeError:
        raise ArgumentError(
            argument,
            "expected an array (an object with __dlpack__, __cuda_array_interface__ or the buffer protocol), "
            f"not {type(x).__name__}",
        ) from None
    except (BufferError, ValueError) as error:  # the buffer was closed or released
        raise ArgumentError(argument, f"the {type(x).__name__} gives no buffer: {error}") from error
    if buffer.c_contiguous:  # checks the address here, because numpy's array would have another address instead of 0
        require_memory(int(_cast("uintptr_t", _from_buffer(buffer))), buffer.shape or (), argument)
    try:
        array = np.asarray(buffer)
    except ValueError as error:
        raise ArgumentError(argument, f"has elements of a type that numpy does not know: {error}") from error
    return _from_numpy(array, not buffer.readonly, (x, buffer), argument)
