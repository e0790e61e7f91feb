"""Objects of a driver that are released when they are closed or have no references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.device.base_runtime import Event
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process import forks


class Owned:
    """An object that calls `release(*args)` once, when it is closed or has no references."""

    def __init__(self, release: Callable[..., Any], *args: Any) -> None:
        self._process = forks.here()
        self._finalizer = forks.finalizer(self, release, *args)

    @property
    def closed(self) -> bool:
        """Whether the object was released."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Releases the object."""
        self._finalizer()


class OwnedStream(Owned):
    """A stream that refuses use after it was closed."""

    # After `close`, an event recorded after the stream's last work; None if the work was done before.
    end: Event | None = None

    def _require_open(self) -> None:
        self._process.require("the stream")
        if self.closed:
            raise ArgumentError("stream", "the stream is closed")


def closed_stream(stream: Any) -> OwnedStream | None:
    """Returns `stream` if it is a closed `OwnedStream`, else None. The handle of a closed stream may belong to a new
    stream.
    """
    return stream if isinstance(stream, OwnedStream) and stream.closed else None
