"""Stream operations that write a word of memory or wait for a word's value, and a check of an order by such a word."""

from __future__ import annotations

import ctypes
import time

from proxyccl.device.base_runtime import BaseRuntime, StreamLike
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue
from support.running import wait_for


def write_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues a store of `value` to a word."""
    StreamOperations(runtime, [WriteValue(ptr, value)])(stream)


def wait_value(runtime: BaseRuntime, ptr: int, value: int, stream: StreamLike = None) -> None:
    """Queues a wait until a word is at least `value`."""
    StreamOperations(runtime, [WaitValue(ptr, value)])(stream)


def check_order(runtime: BaseRuntime, ptr: int, stream: StreamLike, *, ordered: bool) -> None:
    """Asserts whether the work of `stream` waits for another stream's wait for the value 1 in a word of pinned memory,
    then stores 1 to the word, so that all work ends.
    """
    last = runtime.create_event()
    last.record(stream)
    try:
        if ordered:
            time.sleep(0.2)
            assert not last.query()
        else:
            wait_for(last.query, "the stream's work")
    finally:
        ctypes.c_uint64.from_address(ptr).value = 1
