"""Events in streams, for which calls wait, and which mark the end of asynchronous calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.stream_order import StreamMark, StreamOrder
from proxyccl.device.runtimes import open_driver

# Streams wait for each other by functions of the driver, because making torch's event objects takes microseconds.

_has_streams = functools.cache(torch.cuda.is_available)


@functools.cache
def order_of(device: int) -> StreamOrder:
    return stream_order.of(open_driver("hip" if torch.version.hip else "cuda"), device)


def _current_stream() -> tuple[int, int]:
    device = torch.cuda.current_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


class EventHandle:
    """An event that follows the work queued on the current stream when this object is made. Without a GPU, the event is
    empty and a wait for it does nothing.
    """

    def __init__(self) -> None:
        self._mark: StreamMark | None = None
        if _has_streams():
            device, stream = _current_stream()
            self._mark = order_of(device).mark(stream)

    def current_stream_wait(self) -> None:
        if self._mark is not None:
            self._mark.hold(_current_stream()[1])


class EventOverlap:
    """The event of a call, if the call was asynchronous. As a context manager, this object makes the current stream
    wait for the event at the end of the block.

    Attributes:
        event: the event; None for a synchronous call.
        extra_tensors: tensors that are kept alive as long as this object.
    """

    event: EventHandle | None = None
    extra_tensors: tuple[torch.Tensor, ...] | None = None
    _hook: Callable[[], Any] | None = None
    _releases = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        if event is not None:
            self.event = event
        if extra_tensors is not None:
            self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event. Returns the registered hook's result, or None.

        Args:
            release_handle: whether to drop the event after the wait.

        Raises:
            ValueError: there is no event, because the call was synchronous.
        """
        if self.event is None:
            raise ValueError("event: there is none, because the call was made without async_finish")
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Registers a function that the next `current_stream_wait` calls after its wait.

        Raises:
            ValueError: a function is registered already.
        """
        if self._hook is not None:
            raise ValueError("hook_after_wait: a hook is registered already")
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Returns this object, for a ``with`` statement; if `release_handle` is set, the end of the block drops the
        event.
        """
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(release_handle=releases)
