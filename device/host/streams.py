"""Streams and events of the host runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ResourceError
from proxyccl.device.host.status import check_status
from proxyccl.device.owned import Owned, OwnedStream
from proxyccl.device.process.interrupts import SLICE_MS


class HostStream(OwnedStream):
    """A stream of the host runtime. Raises ResourceError if the stream's thread can't be started.

    Args:
        kind: which thread runs the work: PROXYCCL_HOST_QUEUED, PROXYCCL_HOST_INLINE or PROXYCCL_HOST_IN_CALLER
            (runtime.h).
    """

    def __init__(self, kind: int) -> None:
        out = ffi.new("void **")
        check_status(lib.proxyccl_host_stream_create(out, kind), "stream create", ResourceError)
        self._stream = out[0]
        self.handle = int(ffi.cast("uintptr_t", self._stream))
        # The finalizer waits for the stream's work and ends the stream's thread.
        super().__init__(lib.proxyccl_host_stream_destroy, self._stream)
        self._end = threading.Lock()

    def close(self) -> None:
        """Destroys the stream once its queued work is done and no thread waits for it in `finish`."""
        with self._end:
            if not self.closed and self._process.is_here:
                self._await()  # the destroy call's own wait would not run signal handlers
            super().close()

    def finish(self) -> None:
        """Waits for all queued work. Another thread may close the stream during the wait."""
        with self._end:
            if not self.closed:
                self.synchronize()

    def synchronize(self) -> None:
        self._require_open()
        check_status(self._await(), "stream synchronize")

    def _await(self) -> int:
        # Each C call waits for a limited time, so that signal handlers run between the calls.
        target = ffi.new("uint64_t *")
        while True:
            status = lib.proxyccl_host_stream_await(self._stream, target, SLICE_MS)
            if status != lib.PROXYCCL_HOST_NOT_READY:
                return status

    def query(self) -> bool:
        self._require_open()
        status = lib.proxyccl_host_stream_query(self._stream)
        if status == lib.PROXYCCL_HOST_NOT_READY:
            return False
        check_status(status, "stream query")
        return True


class HostEvent(Owned):
    """A point in a host stream."""

    def __init__(self, stream_handle: Callable[[StreamLike], int]) -> None:
        self._stream_handle = stream_handle
        out = ffi.new("void **")
        check_status(lib.proxyccl_host_event_create(out), "event create")
        self._event = out[0]
        self.handle = int(ffi.cast("uintptr_t", self._event))
        super().__init__(lib.proxyccl_host_event_destroy, self._event)

    def record(self, stream: StreamLike = None) -> None:
        handle = ffi.cast("void *", self._stream_handle(stream))
        check_status(lib.proxyccl_host_event_record(self._event, handle), "event record")

    def query(self) -> bool:
        return int(lib.proxyccl_host_event_query(self._event)) == 0

    def synchronize(self) -> None:
        self._process.require("the event")
        target = ffi.new("uint64_t *")
        while lib.proxyccl_host_event_await(self._event, target, SLICE_MS) == lib.PROXYCCL_HOST_NOT_READY:
            pass  # signal handlers run between the calls

    def elapsed(self, start: Any) -> float:
        out = ffi.new("float *")
        check_status(lib.proxyccl_host_event_elapsed(out, start._event, self._event), "event elapsed")
        return float(out[0])
