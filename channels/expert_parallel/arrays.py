"""Arrays for the results of expert-parallel calls, made by the library of the caller's arrays."""

from __future__ import annotations

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
from proxyccl.device.base_runtime import Memory


class MemoryPart:
    """A part of memory that its owner frees. It keeps `kept` alive."""

    def __init__(self, owner: Memory, offset: int, nbytes: int, kept: object = None) -> None:
        self._owner, self._kept = owner, kept
        self.ptr = owner.ptr + offset
        self.nbytes = nbytes

    @property
    def closed(self) -> bool:
        """Whether the owner has freed the memory."""
        return self._owner.closed

    def close(self) -> None:
        """Does nothing."""


def library_of(like: Any, runtime: str) -> str:
    """The library that makes arrays like another on a runtime: "torch", "numpy" on the host, else "proxyccl"."""
    if hasattr(like, "new_empty"):
        return "torch"
    return "numpy" if runtime == "host" and not isinstance(like, Array) else "proxyccl"


def part_of(array: Any, offset: int, shape: tuple[int, ...], dtype: DType | str) -> Any:
    """An array of the same library in the memory of an array of bytes, from byte `offset` on. torch's may be of other
    elements.
    """
    element = as_dtype(dtype)
    nbytes = math.prod(shape) * element.itemsize
    if isinstance(array, Array):
        return Array(array.runtime, MemoryPart(array.memory, offset, nbytes), shape, element)
    if isinstance(array, np.ndarray):
        return array[offset : offset + nbytes].view(element.numpy()).reshape(shape)
    elements = array.view(getattr(sys.modules["torch"], element.name))
    return elements.as_strided(shape, strides_of(shape), offset // element.itemsize)


def part_maker(like: Any, tail: tuple[int, ...], dtype: DType | str) -> Callable[[Any, int, int], Any]:
    """`part_of` for many arrays [rows, *tail] of `like`'s library: by an array of bytes, an offset and a number of
    rows.
    """
    element = as_dtype(dtype)
    if not hasattr(like, "new_empty"):
        return lambda array, offset, rows: part_of(array, offset, (rows, *tail), element)
    native, strides, itemsize = getattr(sys.modules["torch"], element.name), strides_of((1, *tail)), element.itemsize

    def part(array: Any, offset: int, rows: int) -> Any:
        elements = array if array.dtype is native else array.view(native)
        return elements.as_strided((rows, *tail), strides, offset // itemsize)

    return part


def words_of(array: Any, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *, wide: bool = False) -> Any:
    """An array of the same library in the memory of an int32 array, from element `first` on; of int64 if `wide`.
    torch's array may be of int64, with half as many elements.
    """
    if hasattr(array, "as_strided"):
        torch = sys.modules["torch"]
        native = torch.int64 if wide else torch.int32
        if array.dtype is not native:
            array = array.view(native)
        if wide:
            first //= 2
        return array.as_strided(shape, strides, first)  # one call where slices and shapes are several
    element, words = as_dtype("int64" if wide else "int32"), math.prod(shape) * (2 if wide else 1)
    if isinstance(array, Array):
        return Array(array.runtime, MemoryPart(array.memory, 4 * first, 4 * words), shape, element)
    return array[first : first + words].view(element.numpy()).reshape(shape)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of an array in C order, in elements."""
    strides, elements = [], 1
    for extent in reversed(shape):
        strides.append(elements)
        elements *= max(1, extent)
    return tuple(strides[::-1])


def first_rows(array: Any, rows: int) -> Any:
    """The first rows of an array, in its memory."""
    if isinstance(array, Array):
        return part_of(array, 0, (rows, *array.shape[1:]), array.dtype)
    return array[:rows]


class ExpertArrays:
    """Makes arrays, and copies them to and from host memory."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._of_words: dict[Any, Callable[[tuple[int, ...]], Any]] = {}

    def new(self, like: Any, shape: tuple[int, ...], dtype: DType | str) -> Any:
        """A new array of `like`'s library: of torch, of numpy on the host, else as from `Communicator.empty`."""
        element, library = as_dtype(dtype), library_of(like, self._group.runtime.name)
        if library == "torch":
            return like.new_empty(shape, dtype=getattr(sys.modules["torch"], element.name))
        if library == "numpy":
            return np.empty(shape, element.numpy())
        return allocate(self._group, shape, element)

    def new_words(self, like: Any, words: int) -> Any:
        """The same for int32."""
        key = type(like), like.device if hasattr(like, "new_empty") else None
        if key not in self._of_words:
            self._of_words[key] = self.maker(like, "int32")
        return self._of_words[key]((words,))

    def maker_of(self, like: Any, shape: tuple[int, ...], dtype: DType | str) -> Callable[[], Any]:
        """`new` for many arrays like one, of one shape."""
        if library_of(like, self._group.runtime.name) != "torch":
            return functools.partial(self.maker(like, dtype), shape)
        torch = sys.modules["torch"]
        native = getattr(torch, as_dtype(dtype).name)  # empty() takes longer to read its arguments
        return functools.partial(torch.empty_strided, shape, strides_of(shape), dtype=native, device=like.device)

    def columns_maker(self, like: Any, shape: tuple[int, ...], column: int) -> Callable[[], Any]:
        """Makes float32 tensors of this shape, [..., rows, n], whose last dimension but one lies together: columns of
        this many elements.
        """
        *leading, _, columns = shape
        strides = (*(extent * columns * column for extent in strides_of((*leading,))), 1, column)
        torch = sys.modules["torch"]
        return functools.partial(torch.empty_strided, shape, strides, dtype=torch.float32, device=like.device)

    def maker(self, like: Any, dtype: DType | str) -> Callable[[tuple[int, ...]], Any]:
        """`new` for many arrays like one, by their shapes."""
        element, library = as_dtype(dtype), library_of(like, self._group.runtime.name)
        if library == "torch":
            torch = sys.modules["torch"]
            empty, native, device = torch.empty, getattr(torch, element.name), like.device
            return lambda shape: empty(shape, dtype=native, device=device)
        if library == "numpy":
            return functools.partial(np.empty, dtype=element.numpy())
        return lambda shape: allocate(self._group, shape, element)

    @staticmethod
    def address(array: Any) -> int:
        """The address of an array that `new` made."""
        if hasattr(array, "data_ptr"):
            return int(array.data_ptr())
        return int(array.ptr if isinstance(array, Array) else array.__array_interface__["data"][0])

    def download_given(self, x: Any, argument: str) -> NDArray[Any]:
        """A copy of a caller's array in host memory, made after all queued work is done."""
        view = input_view(self._group, x, argument)
        self._group.synchronize()
        values = np.empty(view.shape, view.dtype.numpy())
        if view.nbytes:
            self._group.runtime.copy(values.ctypes.data, view.ptr, view.nbytes)
        return values

    def download(self, array: Any) -> NDArray[Any]:
        """The same for an array that `new` made."""
        if isinstance(array, Array):
            return array.numpy()
        self._group.synchronize()
        if hasattr(array, "detach"):
            copied: NDArray[Any] = array.detach().cpu().numpy()
            return copied
        return np.asarray(array.get() if hasattr(array, "get") else array)

    def upload(self, like: Any, values: NDArray[Any]) -> Any:
        """A new array of the library of `like`, with these values."""
        array = self.new(like, values.shape, str(values.dtype))
        if isinstance(array, Array):
            return array.upload(values)
        if hasattr(array, "copy_"):
            return array.copy_(sys.modules["torch"].from_numpy(values))
        array[...] = values
        return array
