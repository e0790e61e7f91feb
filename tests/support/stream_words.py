"""Words of memory that a stream writes or waits for, one operation a call."""

from __future__ import annotations

from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue


def write_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues the store of a value to a word."""
    StreamOperations(runtime, [WriteValue(ptr, value)])(stream)


def wait_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues a wait until a word is at least `value`."""
    StreamOperations(runtime, [WaitValue(ptr, value)])(stream)
