"""Orders a GPU's streams by events, which are reused. Calls to C take 1 µs each instead of 10 µs through a Python
binding.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from proxyccl.device._native import ffi, lib
from proxyccl.device.driver import Driver
from proxyccl.device.errors import DriverError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.process import forks

_MADE_AT_ONCE = 8


_CALLS: dict[str, Callable[..., int]] = {
    "event record": lib.proxyccl_stream_mark,
    "stream wait": lib.proxyccl_stream_wait,
    "event query": lib.proxyccl_event_query,
    "capture query": lib.proxyccl_stream_ask_capture,
    "order of streams": lib.proxyccl_stream_follow,
}
"""The calls of stream_order.h, by their names in errors."""


class StreamMark:
    """A point in a stream, made by `StreamOrder.mark`. When the mark is freed, its event is reused.

    Args:
        order: the `StreamOrder` of the stream's device.
        event: the event, which the mark owns.
    """

    __slots__ = ("_event", "_order")

    def __init__(self, order: StreamOrder, event: int) -> None:
        self._order, self._event = order, event

    def __del__(self) -> None:
        self._order._idle.append(self._event)

    def hold(self, stream: int) -> None:
        """Makes later work of the stream with handle `stream` wait until the marked work is done."""
        status = lib.proxyccl_stream_wait(self._order._order, stream, self._event)
        if status:
            self._order.finish(status, "stream wait", (stream, self._event))


class StreamOrder:
    """Orders the streams, given by their handles, of one device. `of` returns a device's object, which any thread may
    use.

    The methods raise DriverError if the driver reports an error, for example because the device's context is lost.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._context, driver = context, context.driver
        calls = driver.calls()
        self._order = ffi.new("ProxycclStreamOrder *")
        set_functions(ffi, self._order, calls, "capture_info", "exchange_capture_mode", "current")
        set_functions(ffi, self._order, calls, record="event_record", wait="wait_event", query="event_query")
        self._order.relaxed, self._order.context = calls.relaxed, context.handle
        self._idle: list[int] = []  # unused events; threads take and return them by atomic list operations

    def in_c(self) -> tuple[int, list[int], Callable[[], int], Callable[[int, str, tuple[int, ...]], None]]:
        """Returns the address of the ProxycclStreamOrder, the list of unused events, the function that takes an unused
        event, and `finish`.
        """
        return int(ffi.cast("uintptr_t", self._order)), self._idle, self._take, self.finish

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream's work goes into a graph."""
        return bool(lib.proxyccl_stream_capture(self._order, stream))

    def ask_capture(self, stream: int) -> int:
        """Returns the number of the capture that records a stream's work into a graph; 0 if there is none. Makes this
        device current, because the handle of a default stream refers to the current device.
        """
        capture = ffi.new("uint64_t *")
        status = lib.proxyccl_stream_ask_capture(self._order, stream, capture)
        if status:
            self.finish(status, "capture query", (stream, capture))
        return capture[0]

    def mark(self, stream: int) -> StreamMark:
        """Marks the point after the work queued so far on a stream."""
        event = self._take()
        mark = StreamMark(self, event)
        status = lib.proxyccl_stream_mark(self._order, event, stream)
        if status:
            self.finish(status, "event record", (event, stream))
        return mark

    def follow(self, first: int, then: int, *, alike: bool = False) -> None:
        """Makes later work of `then` wait for work queued on `first`.

        With `alike`, does nothing if a capture into a graph records only one of the streams.
        """
        event = self._take()
        status = lib.proxyccl_stream_follow(self._order, event, first, then, alike)
        self._idle.append(event)  # recording the event again does not change a wait that is already queued
        if status:
            self.finish(status, "order of streams", (event, first, then, alike))

    def finish(self, status: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Handles a call's nonzero status: repeats the call with the device current if it was not, else raises
        DriverError.

        Args:
            status: the call's status.
            name: the call's name in `_CALLS`.
            arguments: the call's arguments except the first, the order.
        """
        if status == lib.PROXYCCL_OTHER_CONTEXT:
            with self._context.current():
                status = _CALLS[name](self._order, *arguments)
        if status:
            raise DriverError(name, status, self._context.driver.error_text(status))

    def _take(self) -> int:
        try:
            return self._idle.pop()
        except IndexError:
            create = functools.partial(self._context.driver.create_event, times=False)
            made: list[int] = [self._context.call(create) for _ in range(_MADE_AT_ONCE)]
            self._idle.extend(made[1:])
            return made[0]


_lock = threading.Lock()
forks.hold_while_forking(_lock)
_made: dict[tuple[str, int], StreamOrder] = {}


def of(driver: Driver, ordinal: int) -> StreamOrder:
    """Returns the process's `StreamOrder` of a device."""
    context = DeviceContext(driver, ordinal)
    with _lock:
        found = _made.get((driver.runtime, context.handle))
        if found is None:
            found = _made[driver.runtime, context.handle] = StreamOrder(context)
        return found
