"""Ends the waits of streams for the proxy once the group has failed.

The worker that failed, or the daemon that is gone, stores `done` no more, and streams may hold calls that reset it and
wait again. So it is stored until nothing is queued any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from proxyccl.proxy.interface import Proxy

_SECONDS = 0.001


class WaitRelease:
    """A thread that stores `done` again and again, from `begin` to `close`.

    Args:
        proxy: gives the rank's proxy; None if nothing has used it, and then no stream waits for it.
        name: the thread's name.
    """

    def __init__(self, proxy: Callable[[], Proxy | None], name: str) -> None:
        self._proxy = proxy
        self._name = name
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins. All ranks must know of the failure by now: whoever checks after a stream must learn of it."""
        with self._lock:
            proxy = self._proxy()
            if proxy is None or self._thread is not None or self._end.is_set():
                return
            self._thread = threading.Thread(target=self._run, args=(proxy,), name=self._name, daemon=True)
            self._thread.start()

    def _run(self, proxy: Proxy) -> None:
        while not self._end.is_set():
            proxy.end_waits()
            self._end.wait(_SECONDS)

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._end.set()
        if self._thread is not None:
            self._thread.join()
