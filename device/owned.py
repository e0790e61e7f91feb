"""A driver's objects, released when they are closed or with their last reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.device.base_runtime import Event
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process import forks


class Owned:
    """An object that is released once, by `release(*args)`."""

    def __init__(self, release: Callable[..., Any], *args: Any) -> None:
        self._process = forks.here()
        self._finalizer = forks.finalizer(self, release, *args)

    @property
    def closed(self) -> bool:
        """Whether the object was released."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Releases the object. Work that is queued on a stream is still done."""
        self._finalizer()


class OwnedStream(Owned):
    """A stream that raises ArgumentError if used after it was closed.

    Attributes:
        end: once the stream is closed, an event after the stream's last work; None if that work was done when the
            stream was closed.
    """

    end: Event | None = None

    def _require_open(self) -> None:
        self._process.require("the stream")
        if self.closed:
            raise ArgumentError("stream", "the stream is closed")


def closed_stream(stream: Any) -> OwnedStream | None:
    """Returns the stream if it is one that the program has closed, else None. A closed stream's handle may belong to
    another stream.
    """
    return stream if isinstance(stream, OwnedStream) and stream.closed else None
