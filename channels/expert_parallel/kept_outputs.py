"""Output buffers whose arrays stay valid as long as they are referenced, like new arrays.

A buffer is free again when the last array in it is gone. On the host runtime nothing else matters. On a GPU, work
that uses an array may still be queued when it goes, on several streams. torch's caching allocator knows them
(`record_stream`), so there it hands out the buffers, as places of a pool.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from proxyccl.channels import array_libraries
from proxyccl.channels.expert_parallel.arrays import LibraryArrays
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, OutputBuffers, TakenBuffer
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.base_runtime import BaseRuntime, Memory

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

    def close(self) -> None:
        """Ends the use of the memory."""
        ...


class PlaceOpener(Protocol):
    """The module of an array library that opens places."""

    def open_places(
        self, runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int
    ) -> OutputPlaces | None:
        """`count` places of `nbytes` each, from an offset of a memory on; None if the library has none."""
        ...


class KeptOutputs(OutputBuffers):
    """Buffers that are taken while they are free. Rows pass the last one where no other is, or where nobody would know
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
        """The number of the last."""
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
        """A free buffer, or none."""
        taken = self.take(arrays, dtype, on_current_stream=on_current_stream)
        return NO_BUFFER if taken.passed else taken

    def close(self) -> None:
        """Ends the use of the memory. Remaining arrays keep it."""
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
