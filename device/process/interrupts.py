"""Lets Python's signal handlers run while the main thread waits in C, so that Ctrl-C ends any wait without delay.

Python runs handlers only in the main thread, and only after it has returned from C. So waits return from time to time.
Waits that can't return, such as for a kernel that the host runtime runs in its caller, call `_look`: if a handler
raises, the exception is kept, the awaited work is told to end, and `raise_interrupt` raises the exception after the
wait. A driver's wait for a whole device runs in another thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType

from proxyccl.device._native import ffi, lib
from proxyccl.device.process.threads import Thread

SLICE_MS = 50
"""Milliseconds that a wait stays in C at a time."""

_interrupted: BaseException | None = None
_when_interrupted: dict[int, Callable[[BaseException], None]] = {}


def _look(stream: object) -> None:
    """Does nothing. C calls it because Python runs pending signal handlers before a function's first statement."""


def _keep(_kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """Keeps the exception that a handler raised in `_look`."""
    global _interrupted  # noqa: PLW0603  the main thread's, of which there is one
    if _interrupted is None:
        _interrupted = error
    stream = int(ffi.cast("uintptr_t", trace.tb_frame.f_locals["stream"]))
    _when_interrupted[stream](error)


_callback = ffi.callback("void(void *)", _look, onerror=_keep)


def _look_from_main_thread() -> None:
    identity = threading.main_thread().ident
    assert identity is not None
    lib.proxyccl_host_look_around(identity, _callback)


_look_from_main_thread()
os.register_at_fork(after_in_child=_look_from_main_thread)


def when_interrupted(stream: int, end: Callable[[BaseException], None]) -> None:
    """Sets how to end the waits of work that a host stream runs in its caller.

    Args:
        stream: the stream's handle.
        end: called with a handler's exception. It must make the waits of that work end.
    """
    _when_interrupted[stream] = end


def forget(stream: int) -> None:
    """Ends `when_interrupted`, for a stream that is closed."""
    _when_interrupted.pop(stream, None)


def raise_interrupt() -> None:
    """In the main thread, raises the exception that a signal handler raised during a wait in C, if there is one."""
    global _interrupted
    if _interrupted is not None and threading.current_thread() is threading.main_thread():
        error, _interrupted = _interrupted, None
        try:
            raise error
        finally:
            del error  # avoids a reference cycle of the error, its traceback and this frame


def in_handler() -> bool:
    """Whether the caller is a signal handler that interrupts a wait in C, which continues when the handler returns."""
    return bool(lib.proxyccl_host_is_looking())


def await_driver(query: int, handle: int) -> None:
    """In the main thread, polls until a stream or an event is done. The caller then makes the driver's own wait, which
    returns the status.

    Args:
        query: address of the driver's call that queries a stream or an event.
        handle: the stream's or event's handle.
    """
    if threading.current_thread() is threading.main_thread():
        while lib.proxyccl_driver_await(query, handle, SLICE_MS) == lib.PROXYCCL_HOST_NOT_READY:
            pass  # signal handlers run between two queries


class _Outcome:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


class _Helper:
    """A thread that makes calls for the main thread, one at a time."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], _Outcome]] = queue.SimpleQueue()
        Thread(self._run, "proxyccl-waits").start()

    def call(self, function: Callable[[], None]) -> _Outcome:
        outcome = _Outcome()
        self._calls.put((function, outcome))
        return outcome

    def _run(self) -> None:
        while True:
            function, outcome = self._calls.get()
            try:
                function()
            except BaseException as error:  # raised in the thread that waits for the call
                outcome.error = error
            del function
            _idle.append(self)
            outcome.done.set()


_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)


def wait_elsewhere(wait: Callable[[], None], look: Callable[[], None] | None = None) -> None:
    """Makes a call that may wait long in C, and raises its exceptions. If the caller is the main thread, another thread
    makes the call, which continues there if the main thread is interrupted.

    Args:
        wait: the call.
        look: called from time to time, in any thread; it may raise to end the wait. The call itself continues in the
            other thread.
    """
    if look is None and threading.current_thread() is not threading.main_thread():
        wait()
        return
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    outcome = helper.call(wait)
    while not outcome.done.wait(None if look is None else SLICE_MS / 1000):
        if look is not None:
            look()
    if outcome.error is not None:
        raise outcome.error
