"""A driver's objects, released when they are closed or with their last reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.device.base_runtime import Event
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process import forks


class Owned:
    """An object that `release(*args)` releases, once."""

    def __init__(self, release: Callable[..., Any], *args: Any) -> None:
        self._process = forks.here()
        self._finalizer = forks.finalizer(self, release, *args)

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Releases it. Work that is still queued on a stream is still done."""
        self._finalizer()


class OwnedStream(Owned):
    """A stream that refuses to be used when it is closed.

    Attributes:
        end: when it is closed, the event after its last work; None if that had ended by then.
    """

    end: Event | None = None

    def _require_open(self) -> None:
        self._process.require("the stream")
        if self.closed:
            raise ArgumentError("stream", "the stream is closed")


def closed_stream(stream: Any) -> OwnedStream | None:
    """The stream itself if the program has closed it: its handle may be another stream's by now."""
    return stream if isinstance(stream, OwnedStream) and stream.closed else None
