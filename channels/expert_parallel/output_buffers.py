"""The output buffers of a layer as arrays. Buffers are workspace memory that peers store rows to and load rows from."""

from __future__ import annotations

import ctypes
from typing import Any

from msgspec import Struct

from proxyccl.channels import array_libraries
from proxyccl.channels.expert_parallel.arrays import LibraryArrays, MemoryPart
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.base_runtime import BaseRuntime, Memory


class TakenBuffer(Struct, frozen=True):
    """A buffer for one output.

    Attributes:
        number: the buffer's number, from 1; 0 if there is no buffer.
        whole: an array of the buffer's whole memory, of type uint8, or with torch of any type; None to make new arrays
            for the output.
        passed: whether rows only pass through the buffer, and are then copied to the output's arrays.
    """

    number: int = 0
    whole: Any = None
    passed: bool = False


NO_BUFFER = TakenBuffer()


class OutputBuffers:
    """Consecutive buffers of equal size in a workspace's memory. The last buffer is for the rows of a combine.

    Attributes:
        nbytes: bytes of each buffer.
        scales_offset: the offset in bytes at which scales begin in a buffer.
        numbers: maps the buffers' addresses to the buffers' numbers.
        passing: the number of the buffer that a combine may copy rows to; 0 if there is none.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        self._runtime = runtime
        self._count, self.nbytes = int(experts.output_buffers), int(experts.output_bytes)
        self.scales_offset = int(experts.output_scales)
        self._parts = [MemoryPart(memory, experts.outputs + n * self.nbytes, self.nbytes) for n in range(self._count)]
        self.numbers = {part.ptr: number for number, part in enumerate(self._parts, 1)}
        self._next = self.passing = 0
        self._whole: dict[tuple[int, LibraryArrays], Any] = {}

    def take(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """Returns the buffer for the next output. Successive outputs cycle through all buffers except the last. A
        derived class may give the result's `whole` the type `dtype`. `on_current_stream`: whether the output is made on
        the library's current stream, and that stream captures no graph.
        """
        number = self._next
        self._next = (number + 1) % (self._count - 1)
        return self._in_turn(number + 1, arrays)

    def take_for_combine(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """Returns the buffer for the experts' results of a combine, which is always the last buffer."""
        return self._in_turn(self._count, arrays)

    def address(self, number: int) -> int:
        return self._parts[number - 1].ptr

    def close(self) -> None:
        """Drops this object's reference to the memory. Arrays that still exist keep the memory alive."""

    def _in_turn(self, number: int, arrays: LibraryArrays) -> TakenBuffer:
        key = number, arrays
        if key not in self._whole:
            part = self._parts[number - 1]
            self._whole[key] = arrays.adopt(Array(self._runtime, part, (part.nbytes,), as_dtype("uint8")))
        return TakenBuffer(number, self._whole[key])


KEPT_OUTPUTS = 2
"""The number of outputs that callers typically hold at the same time, because the two halves of a batch overlap."""


def _lease_of(nbytes: int) -> Any:
    """Returns a ctypes array type for a buffer's bytes. Arrays that a library makes over an object of this type keep
    the object alive. DLPack capsules would also keep the object alive, but take ten times as long.
    """

    class Lease(ctypes.c_ubyte * nbytes):  # type: ignore[misc]
        def __del__(self) -> None:
            self.free.add(self.number)

    return Lease


class KeptOutputs(OutputBuffers):
    """Buffers whose arrays stay valid as long as they are referenced, like new arrays.

    A buffer is free again when the last array in the buffer has been freed. On the host runtime, a free buffer can be
    reused immediately. On a GPU, several streams may still have queued work on an array when it is freed. torch's
    caching allocator knows these streams (`record_stream`), so the buffers are allocated from a pool of that allocator.

    If no other buffer is free, rows pass through the last buffer and are copied to new arrays. Rows are also copied if
    the layer can't observe when the arrays are freed: on a GPU with a library other than torch or with a torch without
    pools, in a graph (which may run after the arrays are freed), and on streams other than the current stream.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        super().__init__(runtime, memory, experts)
        self._memory, self._at, self.passing = memory, int(experts.outputs), self._count
        self._free = set(range(1, self._count))  # used on the host runtime
        self._lease = _lease_of(self.nbytes)
        self._places: Any = None  # used on GPUs: a pool of torch's allocator (torch_tensors/places.py)
        self._was_opened = False

    def take(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """Returns a free buffer, or if no buffer is free, the last buffer, which rows only pass through."""
        if self._runtime.name != "host":
            places = on_current_stream and arrays.is_torch
            return self._take_place(arrays.type_of(dtype)) if places else self._passed()
        try:
            number = self._free.pop()
        except KeyError:
            return self._passed()
        lease = self._lease.from_address(self.address(number))
        lease.number, lease.free, lease.memory = number, self._free, self._memory
        return TakenBuffer(number, arrays.of_buffer(lease))

    def take_for_combine(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        taken = self.take(arrays, dtype, on_current_stream=on_current_stream)
        return NO_BUFFER if taken.passed else taken

    def close(self) -> None:
        if self._places is not None:
            self._places.close()
            self._places = None

    def _passed(self) -> TakenBuffer:
        return TakenBuffer(self._count, passed=True)

    def _take_place(self, native: Any) -> TakenBuffer:
        if not self._was_opened:
            self._was_opened = True
            opener = array_libraries.load("torch: places of outputs")
            self._places = opener.open_places(self._runtime, self._memory, self._at, self.nbytes, self._count - 1)
        taken = None if self._places is None else self._places.take(native)
        return self._passed() if taken is None else TakenBuffer(taken[0] + 1, taken[1])
