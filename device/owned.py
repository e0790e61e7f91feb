"""What a runtime owns of its driver's: it goes when it is closed, or with the last reference to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import ArgumentError


class Owned:
    """Something that `release(*args)` gives back, once."""

    def __init__(self, release: Callable[..., Any], *args: Any) -> None:
        self._finalizer = weakref.finalize(self, release, *args)
        # Not at exit: the communicators are closed later than that.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives it back; what a stream still has queued is done all the same."""
        self._finalizer()


class OwnedStream(Owned):
    """A stream that refuses to be used when it is closed."""

    def _require_open(self) -> None:
        if self.closed:
            raise ArgumentError("stream", "the stream is closed")
