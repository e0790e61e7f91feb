"""A cache that counts the users of its values, and keeps some unused values."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct, field

from proxyccl.device.errors import ClosedError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Entry(Struct, Generic[Value], eq=False):
    users: int = 0
    value: Value | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while making or discarding the value


class LeaseCache(Generic[Key, Value]):
    """Makes a value for the first user of a key, and discards the value some time after its last use.

    Threads may share a cache. While one thread makes or discards a value, which may take long, only threads that want
    the same value wait.

    Args:
        discard: a function that is called with each value that leaves the cache.
        keep: maximum number of unused values to keep. The least recently used values are discarded first.
        weigh: a function that returns a value's weight. By default the weight is 0.
        keep_weight: maximum total weight of unused values to keep.
    """

    def __init__(
        self,
        discard: Callable[[Value], object],
        *,
        keep: int = 0,
        weigh: Callable[[Value], float] = lambda _: 0,
        keep_weight: float = math.inf,
    ) -> None:
        self._discard = discard
        self._keep = keep
        self._weigh = weigh
        self._keep_weight = keep_weight
        self._entries: dict[Key, _Entry[Value]] = {}
        self._idle: OrderedDict[Key, float] = OrderedDict()  # weights of idle values, by key
        self._closed = False
        self._lock = threading.Lock()  # guards the fields; never held while a value is made or discarded

    @property
    def closed(self) -> bool:
        return self._closed

    def acquire(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the key's value, and calls `make` if there is none. Each call needs one call of `release`.

        If `make` raises an exception, `acquire` raises it too, and `release` must not be called.

        Raises:
            ClosedError: the cache is closed.
        """
        with self._lock:
            self._require_open()
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
            self._idle.pop(key, None)
        with entry.lock:
            try:
                self._require_open()
                if entry.value is None:
                    entry.value = make()
            except BaseException:
                with self._lock:
                    entry.users -= 1
                    self._forget(key, entry)
                raise
            return entry.value

    def release(self, key: Key, *, keep: bool = True) -> None:
        """Ends one use of a key's value. After the last use the value is kept for a while, or, without `keep`,
        discarded.

        Does nothing if the cache is closed.

        Raises:
            KeyError: the key is not in use.
        """
        with self._lock:
            if self._closed:
                return
            entry = self._entries.get(key)
            if entry is None or not entry.users:
                raise KeyError(key)
            entry.users -= 1
            if entry.users:
                return
            weight = 0 if entry.value is None else self._weigh(entry.value)
            keep = keep and weight <= self._keep_weight  # a heavier value would displace all others
            if keep and entry.value is not None:
                self._idle[key] = weight
        if not keep:
            self._discard_unused(key, entry)
        self._discard_idle(self._keep, self._keep_weight)

    def discard(self, key: Key) -> None:
        """Discards a key's value if it is unused."""
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None:
            self._discard_unused(key, entry)

    def discard_idle(self) -> bool:
        """Discards every unused value. Returns whether any was discarded."""
        return self._discard_idle(0, 0)

    def close(self) -> None:
        """Discards every value, including those in use."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
            self._idle.clear()
        with contextlib.ExitStack() as steps:  # closes all, even if one fails
            for entry in entries:
                steps.callback(self._discard_last, entry)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache is closed")

    def _forget(self, key: Key, entry: _Entry[Value]) -> None:
        if not entry.users and self._entries.get(key) is entry:
            del self._entries[key]

    def _discard_idle(self, keep: int, keep_weight: float) -> bool:
        """Discards unused values until at most `keep` values with a total weight of `keep_weight` remain."""
        discarded: list[bool] = []

        def discard(key: Key, entry: _Entry[Value]) -> None:
            discarded.append(self._discard_unused(key, entry))

        with contextlib.ExitStack() as steps, self._lock:  # closes all, even if one fails
            total = sum(self._idle.values())
            while self._idle and (len(self._idle) > keep or total > keep_weight):
                key, weight = self._idle.popitem(last=False)
                total -= weight
                steps.callback(discard, key, self._entries[key])
        return any(discarded)

    def _discard_unused(self, key: Key, entry: _Entry[Value]) -> bool:
        with entry.lock:
            with self._lock:
                value = entry.value
                if entry.users or value is None:  # another thread has since acquired or discarded the value
                    return False
                entry.value = None
                self._idle.pop(key, None)
            try:
                self._discard(value)
            finally:
                with self._lock:
                    self._forget(key, entry)
            return True

    def _discard_last(self, entry: _Entry[Value]) -> None:
        with entry.lock:
            value, entry.value = entry.value, None
            if value is not None:
                self._discard(value)
