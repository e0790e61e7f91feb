"""Each thread's own default stream: one number (CU_STREAM_PER_THREAD, hipStreamPerThread) means a different stream
in each thread.
"""

from __future__ import annotations

import itertools
import threading

from proxyccl.device.base_runtime import BaseRuntime

ThreadStream = tuple[int, int]
"""A thread's own default stream: its handle in that thread, and the thread's `thread_number`."""


class _Local(threading.local):
    number = 0


_numbers, _local = itertools.count(1), _Local()


def thread_number() -> int:
    """A number of the calling thread that no other thread ever gets: those of `get_ident` are reused."""
    number = _local.number
    if not number:
        number = _local.number = next(_numbers)
    return number


def identify_stream(runtime: BaseRuntime, handle: int) -> int | ThreadStream:
    """The meaning of a handle in the calling thread: equal for two calls only if they mean the same stream."""
    return (handle, thread_number()) if handle == runtime.thread_stream else handle


def reachable_stream(runtime: BaseRuntime, stream: int | ThreadStream) -> int:
    """A handle that, in the calling thread, means a stream whose end comes after the end of `stream`.

    No handle means another thread's own default stream. The legacy default stream stands for it: its work runs after
    all work on the threads' default streams.
    """
    if isinstance(stream, int):
        return stream
    handle, thread = stream
    if thread == thread_number() or runtime.legacy_stream is None:
        return handle
    return runtime.legacy_stream
