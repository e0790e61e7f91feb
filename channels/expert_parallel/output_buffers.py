"""The output buffers of a layer as arrays: memory of the workspace in which peers store rows, and from which they load.

It does not know about dispatch or combine: it chooses the next buffer, makes arrays in it, and finds the one that
contains an array.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from msgspec import Struct

from proxyccl.channels import array_libraries
from proxyccl.channels.expert_parallel.arrays import LibraryArrays, MemoryPart
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.base_runtime import BaseRuntime, Memory


class TakenBuffer(Struct, frozen=True):
    """A buffer for one output.

    Attributes:
        number: its number, from 1; 0 for none.
        whole: an array of bytes, or torch's of other elements, in whose memory the output's arrays are made; None to
            make new ones.
        passed: whether rows only pass the buffer, and are then copied to the output's arrays.
    """

    number: int = 0
    whole: Any = None
    passed: bool = False


NO_BUFFER = TakenBuffer()


class OutputBuffers:
    """Buffers of equal size, which follow each other. The last is for the rows of a combine.

    Args:
        runtime: of the memory.
        memory: the memory that they are part of.
        experts: the ProxycclExperts of the workspace.

    Attributes:
        nbytes: of each buffer.
        scales_offset: where scales begin in a buffer.
        numbers: the buffers' numbers, by their addresses.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        self._runtime = runtime
        self._count, self.nbytes = int(experts.output_buffers), int(experts.output_bytes)
        self.scales_offset = int(experts.output_scales)
        self._parts = [MemoryPart(memory, experts.outputs + n * self.nbytes, self.nbytes) for n in range(self._count)]
        self.numbers = {part.ptr: number for number, part in enumerate(self._parts, 1)}
        self._next = 0
        self._whole: dict[tuple[int, LibraryArrays], Any] = {}

    def take(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """The buffer for the next output: each in turn, except the last.

        Args:
            arrays: the library in which arrays are made.
            dtype: of the output's rows, which the buffer's array may have.
            on_current_stream: whether the output is made on that library's current stream, which captures no graph.
        """
        number = self._next
        self._next = (number + 1) % (self._count - 1)
        return self._in_turn(number + 1, arrays)

    def take_for_combine(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """The buffer for the experts' results of a combine: always the last."""
        return self._in_turn(self._count, arrays)

    def address(self, number: int) -> int:
        return self._parts[number - 1].ptr

    def scales_address(self, number: int) -> int:
        return self.address(number) + self.scales_offset

    @property
    def passing(self) -> int:
        """The number of the buffer that rows of a combine may pass; 0 if there is none."""
        return 0

    def close(self) -> None:
        """Ends the use of the memory. Remaining arrays keep it."""

    def _in_turn(self, number: int, arrays: LibraryArrays) -> TakenBuffer:
        key = number, arrays
        if key not in self._whole:
            part = self._parts[number - 1]
            self._whole[key] = arrays.adopt(Array(self._runtime, part, (part.nbytes,), as_dtype("uint8")))
        return TakenBuffer(number, self._whole[key])


KEPT_OUTPUTS = 2
"""Outputs that callers have at once as a rule: those of two halves of a batch overlap."""


def _lease_of(nbytes: int) -> Any:
    """A type of a buffer's bytes, for libraries that take buffers: they keep an object of it as long as they have
    arrays there, and a DLPack capsule, which would do the same, takes ten times as long.
    """

    class Lease(ctypes.c_ubyte * nbytes):  # type: ignore[misc]
        def __del__(self) -> None:
            self.free.add(self.number)

    return Lease


class OutputPlaces(Protocol):
    """Parts of the workspace that an array library's allocator hands out."""

    def take(self, native: Any) -> tuple[int, Any] | None:
        """The number of a free place, from 0, and an array of it of a type; None where there is none."""
        ...

    def close(self) -> None: ...


class PlaceOpener(Protocol):
    """The module of an array library that opens places."""

    def open_places(
        self, runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int
    ) -> OutputPlaces | None:
        """`count` places of `nbytes` each, from an offset of a memory on; None if the library has none."""
        ...


class KeptOutputs(OutputBuffers):
    """Buffers whose arrays stay valid as long as they are referenced, like new arrays.

    A buffer is free again when the last array in it is gone. On the host runtime nothing else matters. On a GPU, work
    that uses an array may still be queued when it goes, on several streams. torch's caching allocator knows them
    (`record_stream`), so there it hands out the buffers, as places of a pool.

    Buffers are taken while they are free. Rows pass the last one where no other is, or where nobody would know
    when the arrays are gone: on a GPU those of other libraries than torch, and of a torch without pools; in a graph,
    which may run again when they are; and on other streams than the current one.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        super().__init__(runtime, memory, experts)
        self._memory, self._at = memory, int(experts.outputs)
        self._free = set(range(1, self._count))  # on the host runtime
        self._lease = _lease_of(self.nbytes)
        self._places: OutputPlaces | None = None
        self._was_opened = False

    @property
    def passing(self) -> int:
        return self._count

    def take(self, arrays: LibraryArrays, dtype: DType, *, on_current_stream: bool) -> TakenBuffer:
        """A free buffer, or the last one, which rows only pass."""
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
            opener: PlaceOpener = array_libraries.load("torch: places of outputs")
            self._places = opener.open_places(self._runtime, self._memory, self._at, self.nbytes, self._count - 1)
        taken = None if self._places is None else self._places.take(native)
        return self._passed() if taken is None else TakenBuffer(taken[0] + 1, taken[1])
