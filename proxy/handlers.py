"""Python functions that triggers are passed to, by channel."""

from __future__ import annotations

import time

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.interface import Handler
from proxyccl.proxy.trigger import Trigger


def require_callable(handler: object) -> None:
    """Raises ArgumentError for a handler that can't be called."""
    if not callable(handler):
        raise ArgumentError("handler", f"must be callable, not {type(handler).__name__}")


class Handlers:
    """The handlers of a service. They are called in its workers' threads.

    Attributes:
        running: the handlers that run now: for each one's channel, time.monotonic() when it began.
    """

    def __init__(self) -> None:
        self._by_channel: dict[int, Handler] = {}
        self.running: dict[int, float] = {}

    def add(self, channel: int, handler: Handler) -> None:
        """Directs the channel's triggers to the handler."""
        self._by_channel[channel] = handler

    def call(self, channel: int, trigger: Trigger) -> BaseException | None:
        """Passes a trigger to its handler. Returns its exception, or None.

        A SystemExit too: it would end only the thread, and with it the proxy.
        """
        self.running[channel] = time.monotonic()
        try:
            self._by_channel[channel](trigger)
        except BaseException as error:
            return error
        finally:
            del self.running[channel]
        return None
