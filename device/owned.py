"""A driver's objects, given back when they are closed or with their last reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import ArgumentError


class Owned:
    """An object that `release(*args)` gives back, once."""

    def __init__(self, release: Callable[..., Any], *args: Any) -> None:
        self._finalizer = weakref.finalize(self, release, *args)
        # Not at exit: the communicators are closed later than that.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives it back. Work that is still queued on a stream is done all the same."""
        self._finalizer()


class OwnedStream(Owned):
    """A stream that refuses to be used when it is closed."""

    def _require_open(self) -> None:
        if self.closed:
            raise ArgumentError("stream", "the stream is closed")
