"""Keeps arguments of queued launches alive until the launches are done, and waits for launches."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from proxyccl.device.base_runtime import BaseRuntime, Event, StreamLike
from proxyccl.device.errors import KernelError
from proxyccl.device.owned import OwnedStream, closed_stream

_BATCH = 16
_MOST_OPEN = 8
"""The most streams that have a batch without an event. At most this number of unused streams, and their arguments, are
kept alive.
"""


ThreadStream = tuple[int, int]
"""A thread's own default stream: its handle in that thread, and the thread's `thread_number`. One handle
(CU_STREAM_PER_THREAD, hipStreamPerThread) means a different stream in each thread.
"""


class _Local(threading.local):
    number = 0


_numbers, _local = itertools.count(1), _Local()


def thread_number() -> int:
    """Returns a number of the calling thread, which unlike `threading.get_ident()` is never reused."""
    number = _local.number
    if not number:
        number = _local.number = next(_numbers)
    return number


def identify_stream(runtime: BaseRuntime, handle: int) -> int | ThreadStream:
    """Returns a key for the stream that a handle means in the calling thread."""
    return (handle, thread_number()) if handle == runtime.thread_stream else handle


def reachable_stream(runtime: BaseRuntime, stream: int | ThreadStream) -> int:
    """Returns a handle, valid in the calling thread, of `stream` or of a stream that is ordered after it.

    Another thread's own default stream has no handle in the calling thread. For another thread's default stream,
    returns the legacy default stream, which is ordered after all threads' default streams.
    """
    if isinstance(stream, int):
        return stream
    handle, thread = stream
    if thread == thread_number() or runtime.legacy_stream is None:
        return handle
    return runtime.legacy_stream


class Launcher(Protocol):
    """An object whose launches are each ordered after the previous launch."""

    @property
    def last_stream(self) -> int | None:
        """The handle, in the calling thread, of a stream that is ordered after the latest launch; None if there is
        none."""


class InFlight:
    """Keeps references to the arguments of launches until the launches are done.

    The launches of a stream form batches, each followed by an event, because an event per launch would take more time.
    """

    def __init__(self, runtime: BaseRuntime) -> None:
        self._runtime = weakref.proxy(runtime)  # weak, because the runtime owns this object
        self._lock = threading.Lock()
        self._launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()
        self._open: dict[int | ThreadStream, tuple[StreamLike, list[object]]] = {}  # batches with no event, by stream
        self._batches: deque[tuple[Event, list[object]]] = deque()

    def add(self, kept: object, stream: StreamLike, handle: int) -> None:
        """Keeps an object and a stream alive until all work queued so far on the stream, whose handle is `handle`, is
        done."""
        with self._lock:
            key = identify_stream(self._runtime, handle)
            if key in self._open and closed_stream(self._open[key][0]) is not None:
                self._end_batch(key)  # another stream has got the handle of a closed stream
            _, batch = self._open.setdefault(key, (stream, []))
            batch.append(kept)
            if len(self._open) > _MOST_OPEN:
                self._end_an_open_batch()
            # An event recorded during a capture never completes, so the batch stays open until a launch outside the
            # capture.
            if len(batch) < _BATCH or self._runtime.capture_of(handle):
                return
            self._end_batch(key)
            self._release_done()

    def _release_done(self) -> None:
        # Queries each batch once, and puts back the batches that are not done.
        for _ in range(len(self._batches)):
            waiting = self._batches.popleft()
            if not waiting[0].query():
                self._batches.append(waiting)

    def _end_an_open_batch(self) -> None:
        """Records an event for the oldest open batch, because the program may no longer use the batch's stream."""
        for key, (stream, _) in self._open.items():
            if not isinstance(stream, OwnedStream) or not self._is_reachable(key):
                continue
            if stream.closed or not self._runtime.capture_of(_handle(key)):
                self._end_batch(key)
                self._release_done()
                return

    @staticmethod
    def _is_reachable(key: int | ThreadStream) -> bool:
        return isinstance(key, int) or key[1] == thread_number()

    def follow(self, launcher: Launcher) -> None:
        """Makes `wait` include this launcher's launches while the launcher exists."""
        with self._lock:
            self._launchers.add(launcher)

    def wait(self) -> None:
        """Waits until all launches are done.

        Call this before the driver loads a module or frees memory: the driver then locks the context and waits for
        kernels. If the kernels wait for copies of the process's proxy, which wait for the context, the result is a
        deadlock.

        Does not wait for graphs, nor for open batches on other threads' own default streams or on streams that the
        program passes as integers, because such streams may have been destroyed.
        """
        with self._lock:
            for key, (stream, _) in list(self._open.items()):
                lives = type(stream) is not int and self._is_reachable(key)
                if closed_stream(stream) is not None or (lives and not self._runtime.capture_of(_handle(key))):
                    self._end_batch(key)
            events = [event for event, _ in self._batches]
            for launcher in self._launchers:
                last = launcher.last_stream
                if last is not None and not self._runtime.capture_of(last):
                    events.append(self._event(last))
        for event in events:
            event.synchronize()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Returns a context in which the caller waits for all streams. When the context ends, the objects that were
        kept at its beginning are released, unless a signal handler's exception ended the wait.
        """
        with self._lock:
            opened, batches = self._open, self._batches
            self._open, self._batches = {}, deque()
        try:
            yield
        except KernelError:
            raise
        except BaseException:
            with self._lock:
                self._batches.extendleft(batches)
                for key, (stream, kept) in opened.items():
                    self._open.setdefault(key, (stream, []))[1].extend(kept)
            raise

    def _end_batch(self, key: int | ThreadStream) -> None:
        stream, kept = self._open.pop(key)
        closed = closed_stream(stream)
        event = self._event(_handle(key)) if closed is None else closed.end
        if event is not None:
            self._batches.append((event, kept))

    def _event(self, handle: int) -> Event:
        event: Event = self._runtime.create_event()
        event.record(handle)
        return event


def _handle(key: int | ThreadStream) -> int:
    return key if isinstance(key, int) else key[0]


class LaunchRuntime(BaseRuntime, Protocol):
    """A runtime that launches kernels. `in_flight` keeps the arguments of queued launches alive."""

    in_flight: InFlight
