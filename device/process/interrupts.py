"""Lets Python's signal handlers run while the main thread waits in C, so that Ctrl-C ends any wait quickly.

Python runs handlers only in the main thread, after it has returned from C. So waits in C return from time to time. Some
waits can't return, such as those of a kernel that the host runtime runs in the main thread; such a wait calls `_look`
instead. If a handler then raises an exception, the awaited work is aborted, and `raise_interrupt` raises the exception
after the wait. A call that synchronizes a GPU runs in a separate thread, while the main thread waits interruptibly.
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
"""The most milliseconds that a wait stays in C."""

_interrupted: BaseException | None = None
_when_interrupted: dict[int, Callable[[BaseException], None]] = {}


def _look(stream: object) -> None:
    """C calls this function only because Python runs pending signal handlers before a function's first statement."""


def _keep(_kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """Stores the exception that a signal handler raised in `_look`, and ends the stream's waits."""
    global _interrupted  # noqa: PLW0603
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
    """Sets the function that ends the waits of a PROXYCCL_HOST_IN_CALLER stream's work if a signal handler raises.

    Args:
        stream: the stream's handle.
        end: the function, which is called with the handler's exception.
    """
    _when_interrupted[stream] = end


def forget(stream: int) -> None:
    """Undoes `when_interrupted` for a closed stream."""
    _when_interrupted.pop(stream, None)


def raise_interrupt() -> None:
    """Raises, in the main thread, the exception that `_look` has stored, if any."""
    global _interrupted
    if _interrupted is not None and threading.current_thread() is threading.main_thread():
        error, _interrupted = _interrupted, None
        try:
            raise error
        finally:
            del error  # breaks the reference cycle of error, traceback and frame


def in_handler() -> bool:
    """Whether the caller is a signal handler that runs in `_look`, during a wait in C."""
    return bool(lib.proxyccl_host_is_looking())


def await_driver(query: int, handle: int) -> None:
    """Polls, in the main thread, until a stream or an event is done, so that signal handlers run meanwhile. When this
    returns, the caller still makes the driver's wait, which returns the status.

    Args:
        query: address of the driver's function that queries a stream or an event.
        handle: the stream's or event's handle.
    """
    if threading.current_thread() is threading.main_thread():
        while lib.proxyccl_driver_await(query, handle, SLICE_MS) == lib.PROXYCCL_HOST_NOT_READY:
            pass  # signal handlers run between the calls


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
            except BaseException as error:  # `wait_elsewhere` raises it
                outcome.error = error
            del function
            _idle.append(self)
            outcome.done.set()


_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)


def wait_elsewhere(wait: Callable[[], None], look: Callable[[], None] | None = None) -> None:
    """Makes a call that may wait long in C, and raises its exceptions. In the main thread, or with `look`, another
    thread makes the call. If a signal handler or `look` raises an exception, the other thread continues the call.

    Args:
        wait: the call.
        look: a function to call every SLICE_MS while waiting, which may raise an exception to end the wait.
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
