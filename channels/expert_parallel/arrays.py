"""Makes arrays for the results of expert-parallel calls, by the library of the caller's arrays."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.arguments import input_view
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.base_runtime import Memory

Maker = Callable[[], Any]


class MemoryPart:
    """A range of memory that `owner` frees. This object keeps `kept` alive."""

    def __init__(self, owner: Memory, offset: int, nbytes: int, kept: object = None) -> None:
        self._owner, self._kept = owner, kept
        self.ptr = owner.ptr + offset
        self.nbytes = nbytes

    @property
    def closed(self) -> bool:
        return self._owner.closed

    def close(self) -> None:
        """Does nothing, because the owner frees the memory."""


class LibraryArrays:
    """Makes arrays on a group's device. This class makes ProxyCCL's arrays, as `Communicator.empty` does; each derived
    class makes the arrays of another library. `strides` count elements.

    Attributes:
        kind: the type of the caller's arrays.
        int32, int64: the library's element types of these names.
    """

    is_torch = False

    def __init__(self, group: Group, kind: type) -> None:
        self._group, self.kind = group, kind
        self.int32, self.int64 = self.type_of("int32"), self.type_of("int64")

    def type_of(self, dtype: DType | str) -> Any:
        """Returns the library's element type, which the other methods take. Raises ArgumentError if the library lacks
        the type.
        """
        return as_dtype(dtype)

    def maker(self, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Maker:
        """Returns a function that makes a new array. Only torch supports strides that are not in C order."""
        return functools.partial(allocate, self._group, shape, native)

    def part(self, array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Any:
        """Returns an array in another array's memory, from byte `offset` on. The element types may differ."""
        memory = MemoryPart(array.memory, offset, math.prod(shape) * native.itemsize)
        return Array(array.runtime, memory, shape, native)

    def address(self, array: Any) -> int:
        return int(array.ptr)

    def adopt(self, array: Array) -> Any:
        """Returns the library's view of an `Array`; the view keeps the `Array` alive."""
        return array

    def of_buffer(self, buffer: Any) -> Any:
        """Returns an array of the bytes of a ctypes object in `buffer.memory`. The array keeps the object alive."""
        offset, nbytes = ctypes.addressof(buffer) - buffer.memory.ptr, ctypes.sizeof(buffer)
        part = MemoryPart(buffer.memory, offset, nbytes, buffer)
        return Array(self._group.runtime, part, (nbytes,), as_dtype("uint8"))

    def upload(self, values: NDArray[Any]) -> Any:
        """Returns an array with the elements of `values`. The array may share the memory of `values`."""
        return allocate(self._group, values.shape, values.dtype).upload(values)


class NumpyArrays(LibraryArrays):
    def type_of(self, dtype: DType | str) -> Any:
        return as_dtype(dtype).numpy()

    def maker(self, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Maker:
        return functools.partial(np.empty, shape, native)

    def part(self, array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Any:
        return np.ndarray(shape, native, array.reshape(-1).view(np.uint8), offset)

    def address(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    def adopt(self, array: Array) -> Any:
        return np.asarray(array)

    def of_buffer(self, buffer: Any) -> Any:
        return np.frombuffer(buffer, np.uint8)

    def upload(self, values: NDArray[Any]) -> Any:
        return values


class TorchArrays(LibraryArrays):
    is_torch = True

    def __init__(self, group: Group, kind: type) -> None:
        self._torch, runtime = sys.modules["torch"], group.runtime
        self._device = self._torch.device("cpu" if runtime.name == "host" else f"cuda:{runtime.device}")
        super().__init__(group, kind)

    def type_of(self, dtype: DType | str) -> Any:
        return getattr(self._torch, as_dtype(dtype).name)

    def maker(self, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Maker:
        # torch.empty_strided() reads its arguments faster than torch.empty().
        return functools.partial(self._torch.empty_strided, shape, strides, dtype=native, device=self._device)

    def part(self, array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Any:
        """Does what `LibraryArrays.part` does, by a single torch call instead of a slice, a view and a reshape."""
        elements = array if array.dtype is native else array.view(native)
        return elements.as_strided(shape, strides, offset // native.itemsize)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def adopt(self, array: Array) -> Any:
        return self._torch.from_dlpack(array)

    def of_buffer(self, buffer: Any) -> Any:
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8)

    def upload(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values).to(self._device)


class ExpertArrays:
    """Chooses the library that makes the results of calls, and copies arrays to host memory."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: dict[type, LibraryArrays] = {}

    def like(self, x: Any) -> LibraryArrays:
        """Returns the library that makes results for a caller's array: torch for torch's tensors, numpy for arrays of
        other libraries on the host, otherwise ProxyCCL.
        """
        kind = type(x)
        if kind not in self._known:
            on_host = self._group.runtime.name == "host" and not isinstance(x, Array)
            library = TorchArrays if libraries[kind].is_torch else NumpyArrays if on_host else LibraryArrays
            self._known[kind] = library(self._group, kind)
        return self._known[kind]

    def download(self, x: Any, argument: str) -> NDArray[Any]:
        """Returns a copy of an array in host memory, made after all queued work. Errors name `argument`."""
        view = input_view(self._group, x, argument)
        self._group.synchronize()
        values = np.empty(view.shape, view.dtype.numpy())
        if view.nbytes:
            self._group.runtime.copy(values.ctypes.data, view.ptr, view.nbytes)
        return values


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of an array in C order."""
    strides, elements = [], 1
    for extent in reversed(shape):
        strides.append(elements)
        elements *= max(1, extent)
    return tuple(strides[::-1])
