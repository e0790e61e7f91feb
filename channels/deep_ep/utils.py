"""Events: what a call waits for, and what waits for a call."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """What the current stream has been given so far. CPU tensors have no streams, and no event waits for them."""

    def __init__(self) -> None:
        self._event: Any = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for it."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event that may be none. As a context manager, it makes the current stream wait at the end of the block.

    Attributes:
        event: the event, or None.
        extra_tensors: tensors that are kept as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event.

        Raises:
            ValueError: there is no event: the call was made without `async_finish`.
        """
        if self.event is None:
            raise ValueError("event: there is none, as the call was made without async_finish")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
