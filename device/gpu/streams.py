"""Streams and events of a GPU, on any vendor's `Driver`."""

from __future__ import annotations

import contextlib
from typing import Any

from proxyccl.device.arrays.libraries import LEGACY_STREAMS, other_streams
from proxyccl.device.base_runtime import StreamLike, foreign_stream_handle
from proxyccl.device.driver import Driver
from proxyccl.device.errors import ArgumentError, KernelError
from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.owned import Owned, OwnedStream
from proxyccl.device.process.interrupts import await_driver


class GpuStream(OwnedStream):
    """A queue of device work, independent of the legacy default stream.

    Args:
        context: the device's context.
        first: see `Driver.create_stream`. Streams with `first` are for the library's own copies, which are never
            captured.
    """

    def __init__(self, context: DeviceContext, *, first: bool = False) -> None:
        self._context, self._driver, self.first = context, context.driver, first
        with context.current():
            self.handle = self._driver.create_stream(first=first)
        super().__init__(context.call, self._driver.release, "StreamDestroy", self.handle)

    def close(self) -> None:
        """Records the event `end` and destroys the stream. The driver finishes the stream's work first."""
        if not self.closed and self._process.is_here:
            with contextlib.suppress(KernelError):  # the device's context is lost, so there is no work to wait for
                end = GpuEvent(self._context)
                end.record(self)
                self.end = end
        super().close()

    def synchronize(self) -> None:
        self._require_open()
        synchronize(self._context, self.handle)

    def query(self) -> bool:
        self._require_open()
        with self._context.current():
            return self._driver.is_done("StreamQuery", self.handle)


class GpuEvent(Owned):
    """A point in a stream.

    Args:
        context: the device's context.
        times: see `Driver.create_event`.
    """

    def __init__(self, context: DeviceContext, *, times: bool = True) -> None:
        self._context, self._driver = context, context.driver
        with context.current():
            self.handle = self._driver.create_event(times=times)
        super().__init__(context.call, self._driver.release, "EventDestroy", self.handle)

    def record(self, stream: StreamLike = None) -> None:
        """Records the event after the work queued so far on a stream.

        Raises:
            ArgumentError: `stream` is not a stream, or it is None while the calling thread captures a stream into a
                graph.
        """
        # Recording an event on a named stream is allowed during another stream's capture: the graph does not need the
        # event.
        handle = stream_handle(self._context, None) if stream is None else handle_of(self._driver, stream)
        with self._context.current():
            self._driver.call("EventRecord", self.handle, handle)

    def query(self) -> bool:
        with self._context.current():
            return self._driver.is_done("EventQuery", self.handle)

    def synchronize(self) -> None:
        with self._context.current():
            await_driver(self._driver.address("EventQuery"), self.handle)
            self._driver.call("EventSynchronize", self.handle)

    def elapsed(self, start: Any) -> float:
        with self._context.current():
            return float(self._driver.call("EventElapsedTime", start.handle, self.handle))


def synchronize(context: DeviceContext, stream: int) -> None:
    """Waits for all work queued on a stream, given by its handle."""
    with context.current():
        await_driver(context.driver.address("StreamQuery"), stream)
        context.driver.call("StreamSynchronize", stream)


def stream_handle(context: DeviceContext, stream: StreamLike) -> int:
    """Returns the handle of a call's stream, by `handle_of`.

    Raises:
        ArgumentError: `stream` is not a stream or is closed, or the calling thread captures another stream into a
            graph.
    """
    handle = handle_of(context.driver, stream)
    others = other_streams(context.device, handle)
    if others and not (type(stream) is GpuStream and stream.first):
        _refuse_beside_capture(context, handle, others)
    return handle


def _refuse_beside_capture(context: DeviceContext, handle: int, others: tuple[tuple[str, int], ...]) -> None:
    order = stream_order.of(context.driver, context.device)
    for name, current in others:
        if order.ask_capture(current) and (handle in LEGACY_STREAMS or not order.ask_capture(handle)):
            raise ArgumentError(
                "stream",
                f"this thread captures another stream into a graph, which would miss the call; expected stream={name}",
            )


def handle_of(driver: Driver, stream: StreamLike) -> int:
    """Returns the handle of any library's stream, or of the calling thread's default stream for None.

    A thread's default stream is ordered with the legacy default stream, which other libraries use by default. Default
    streams of different threads are not ordered with each other, so ranks that are threads don't wait for each other's
    kernels.

    Raises:
        ArgumentError: `stream` is not a stream, or is closed.
    """
    if stream is None:
        return driver.thread_stream
    if type(stream) is int and stream >> 64 == 0:  # already a handle
        return stream
    if isinstance(stream, GpuStream):
        stream._require_open()
        return stream.handle
    return foreign_stream_handle(stream)
