"""Operations of a stream, issued in order by one call into C: writes of words, waits for words, copies, bit fills and
launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.errors import ArgumentError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.kernel import Launch, find_range
from proxyccl.device.sleepers import Sleepers, wakes

_WORD_BYTES = 8
_VALUES = range(1 << 63)


class WriteValue(Struct, frozen=True):
    """Makes a stream store a value in a word, after all earlier work of the stream."""

    ptr: int  # the device's address of a word of 8 bytes, aligned to 8
    value: int  # from 0 to 2**63 - 1


class WaitValue(Struct, frozen=True):
    """Makes a stream wait, without a time limit, until a word is at least `value`."""

    ptr: int  # the device's address of a word of 8 bytes, aligned to 8
    value: int  # from 0 to 2**63 - 1


class CopyBytes(Struct, frozen=True):
    """Copies, after all earlier work of the stream."""

    # The device's addresses. If the two are equal, nothing is copied.
    dst: int
    src: int
    nbytes: int  # may be 0


class SetBits(Struct, frozen=True):
    """Sets all bits of memory, after all earlier work of the stream."""

    dst: int  # the device's address
    nbytes: int  # may be 0


Operation = WriteValue | WaitValue | CopyBytes | SetBits | Launch
"""An operation of a stream. A `Launch` must belong to the streams' runtime."""


class StreamOperations:
    """Operations of a stream, in order. Calling this object queues the operations; in a capture they become part of the
    graph.

    If the driver refuses an operation, later operations are still queued, because a stream that has notified the proxy
    must also wait for the proxy.

    Args:
        runtime: the runtime of the streams.
        operations: the operations, at least one.
        sleepers: the sleepers of the proxy that the operations notify, which are woken first; None without a proxy.

    Raises:
        ArgumentError: there is no operation, an address is not a multiple of 8, or a value is out of range.
    """

    def __init__(
        self, runtime: BaseRuntime, operations: Sequence[Operation], *, sleepers: Sleepers | None = None
    ) -> None:
        if not operations:
            raise ArgumentError("operations", "expected at least one operation")
        self._runtime = runtime
        kinds = {WriteValue: lib.PROXYCCL_STREAM_WRITE, WaitValue: lib.PROXYCCL_STREAM_WAIT}
        words: list[WriteValue | WaitValue] = []
        steps: list[dict[str, Any]] = []
        for operation in operations:
            if isinstance(operation, Launch):
                steps.append({"launch": operation.prepared})
            elif isinstance(operation, SetBits):
                steps.append({"dst": operation.dst, "bytes": operation.nbytes})
            elif isinstance(operation, CopyBytes):
                if operation.nbytes and operation.dst != operation.src:
                    steps.append({"dst": operation.dst, "src": operation.src, "bytes": operation.nbytes})
            else:
                _require_word(operation)
                words.append(operation)
                if not steps or "words" not in steps[-1]:
                    steps.append({"words": 0})
                steps[-1]["words"] += 1
        self._launches = [operation for operation in operations if isinstance(operation, Launch)]
        fields = [{"kind": kinds[type(word)], "address": word.ptr, "value": word.value} for word in words]
        self._words, self._steps = ffi.new("ProxycclStreamOperation[]", fields), ffi.new("ProxycclStreamStep[]", steps)
        calls = runtime.calls
        self.prepared = ffi.new("ProxycclStreamOperations *")  # for callers in C (stream_operations.h)
        set_functions(ffi, self.prepared, calls, "batch", "write64", "wait64", "copy", "set", "capture_info", "current")
        self.prepared.context = calls.context
        self.prepared.words, self.prepared.steps, self.prepared.count = self._words, self._steps, len(steps)
        self._sleepers = sleepers
        self.prepared.wakes = self._wakes = wakes([sleepers])

    def __call__(self, stream: StreamLike = None) -> None:
        """Queues the operations. Raises KernelError if the driver refuses an operation."""
        handle = self._runtime.stream_handle(stream)
        status = lib.proxyccl_stream_issue(self.prepared, handle)
        if status == lib.PROXYCCL_OTHER_CONTEXT:
            with self._runtime.current():
                status = lib.proxyccl_stream_issue(self.prepared, handle)
        self.check(status)

    def pointers_into(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Finds the words of copies and launches that point into given ranges of memory. See `Launch.pointers_into`."""
        found = [pointer for launch in self._launches for pointer in launch.pointers_into(ranges)]
        for step in self._steps:
            for field in ("dst", "src") if step.bytes else ():
                value = getattr(step, field)
                number = find_range(ranges, value)
                if number is not None:
                    word = int(ffi.cast("uintptr_t", ffi.addressof(step, field)))
                    found.append((word, number, value - ranges[number][0]))
        return found

    def step_address(self, step: int) -> int:
        """Returns the address of a step's ProxycclStreamStep, for callers in C that change the step."""
        return int(ffi.cast("uintptr_t", self._steps + step))

    def set_copy(self, step: int, copied: CopyBytes) -> None:
        """Sets the addresses and the size of step number `step`, which must be a copy. Calls that are already queued
        are not affected.
        """
        made = self._steps[step]
        made.dst, made.src, made.bytes = copied.dst, copied.src, copied.nbytes

    def check(self, status: int) -> None:
        """Raises KernelError if `status`, which the driver returned for these operations, is not 0."""
        self._runtime.check(status, "stream operations")


def _require_word(operation: WriteValue | WaitValue) -> None:
    if operation.ptr <= 0 or operation.ptr % _WORD_BYTES:
        raise ArgumentError("ptr", f"expected the address of a word, aligned to 8, not {operation.ptr:#x}")
    if operation.value not in _VALUES:
        raise ArgumentError("value", f"expected an integer from 0 to 2**63 - 1, not {operation.value!r}")
