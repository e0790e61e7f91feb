"""A cache of values that are made once for a key, shared by counted users, and kept for a while when unused."""

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
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the value is made or discarded


class LeaseCache(Generic[Key, Value]):
    """Makes a value for the first user of a key, and discards it some time after the last.

    Threads may share a cache. A thread that makes or discards a value blocks only threads that want the same value: a
    driver may take long.

    Args:
        discard: called with a value when it leaves the cache; undoes what `make` did.
        keep: most values that are kept idle. The least recently used values are discarded first.
        weigh: the weight of a value; without it every value weighs nothing.
        keep_weight: most weight that is kept idle.
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
        """Returns the key's value, which `make` makes if there is none. Each call is paired with a `release`.

        If `make` raises an exception, `acquire` raises it too, and there is nothing to release.

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
        """Ends one use. After the last use the value is kept idle, or discarded without `keep`.

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
            keep = keep and weight <= self._keep_weight  # a heavier value would evict all others
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
        """Discards every unused value. Returns whether there was any."""
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
        """Discards idle values until at most this number of them, and this weight, remain."""
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
                if entry.users or value is None:  # since the value was chosen, another thread acquired or discarded it
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
