"""The output buffers of a layer as arrays: memory of the workspace in which peers store rows, and from which they load.

It does not know about dispatch or combine: it chooses the next buffer, makes arrays in it, and finds the one that
contains an array. `KeptOutputs` has those whose arrays stay valid as long as they are referenced.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

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
        """Where a buffer's rows begin."""
        return self._parts[number - 1].ptr

    def scales_address(self, number: int) -> int:
        """Where its scales begin."""
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
