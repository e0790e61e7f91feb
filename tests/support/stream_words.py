"""Queues stream operations that write a word of memory, or wait for a word's value."""

from __future__ import annotations

from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue


def write_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues a store of `value` to a word."""
    StreamOperations(runtime, [WriteValue(ptr, value)])(stream)


def wait_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues a wait until a word is at least `value`."""
    StreamOperations(runtime, [WaitValue(ptr, value)])(stream)
