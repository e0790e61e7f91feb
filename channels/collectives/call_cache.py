"""A cache of collective calls: their arguments stay packed, so that a repeated call is one call into C.

Before a launch, the arguments that ranks must agree on are compared through the control segments' call logs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.channels._prepared_calls import MOST_KEPT
from proxyccl.channels.group import Group
from proxyccl.channels.launches import Launchable
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.libraries import current_stream, libraries, other_streams
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations

Key = tuple[Any, ...]


def call_key(options: tuple[Any, ...], x: Any, out: Any) -> Key | None:
    """The key under which equal calls are found; None if the arrays' fingerprints can't tell.

    Args:
        options: the collective's name, and its other arguments except the arrays and the stream.
        x, out: input and output.
    """
    if out is None:
        return None
    # Does the same as `fingerprint`, inline: a repeated call runs from cold caches, where each function call counts.
    source = libraries[type(x)].fingerprint(x)
    target = source if out is x else libraries[type(out)].fingerprint(out)
    return None if source is None or target is None else (options, source, target)


def copy_launchable(group: Group, source: ArrayView, target: ArrayView) -> StreamOperations:
    """The launchable of a collective of one rank: a copy, or nothing in place."""
    return StreamOperations(group.runtime, [CopyBytes(target.ptr, source.ptr, source.nbytes)])


class _Prepared(Struct):
    """A call that was made, kept for its repetitions.

    Attributes:
        fields: the fields that are compared with the other ranks, encoded.
        launch: its launchable.
        guard: checks that its arrays still have the same memory; None if that needs no check.
        ranges: address and size of each array; empty once it has been repeated.
    """

    fields: Any
    launch: Launchable
    guard: AllocationGuard | None
    ranges: tuple[tuple[int, int], ...]


class CallCache:
    """The calls that one group's collectives have made."""

    def __init__(self, group: Group) -> None:
        self._launches = group.launches
        self._runtime = group.runtime
        self._on_host = group.runtime.name == "host"
        # A guard checks arrays that their owner may free, and that others may replace, while they are registered.
        self._launchables: dict[Key, tuple[Launchable, AllocationGuard | None]] = {}
        self._prepared: dict[Key, _Prepared] = {}
        self._changes = 0  # of what is known about arrays
        self._lock = threading.RLock()  # of these three; the end of an array may be noticed anywhere, even in here
        self._symmetric = group.symmetric
        self._exchange = group.exchange
        group.symmetric.listen(self._forget)

    def repeat(self, key: Key | None, x: Any, out: Any, stream: StreamLike) -> bool:
        """Issues a call that was made before with arrays of the same fingerprints. False if there was none.

        A call that it repeats without a stream on the host runtime is repeated by `Launches.prepared_calls` from then
        on.
        """
        changes = self._changes
        if key is None or (prepared := self._prepared.get(key)) is None:
            return False
        guard = prepared.guard
        if guard is not None and not guard.holds:
            return False
        for ptr, nbytes in prepared.ranges:
            self._runtime.expect_reuse(ptr, nbytes)
        prepared.ranges = ()
        # On a GPU nothing need be kept alive: an array's memory is freed after all work (gpu.py), and a tensor's is
        # reused in the order of its stream.
        owners = (x, out) if self._on_host and x is not None else ()
        if not self._on_host:
            if stream is None:
                stream = current_stream(x)
            elif type(stream) is int and other_streams(self._runtime.device, stream):
                self._runtime.stream_handle(stream)  # `issue` does not look at the number of the latest call's stream
        self._launches.issue(prepared.fields, prepared.launch, stream, owners)
        if owners and stream is None and guard is None:
            with self._lock:
                if changes == self._changes:
                    self._launches.keep(prepared.fields, prepared.launch, x, out, key[0])
        return True

    def keep_under(self, key: Key, x: Any, out: Any, options: tuple[Any, ...]) -> None:
        """Has ``Launches.prepared_calls.repeat(x, out, options, stream)`` repeat the call that was made under a key.

        Does nothing if that has been forgotten.
        """
        with self._lock:  # against `_forget`
            if (prepared := self._prepared.get(key)) is not None:
                self._launches.keep(prepared.fields, prepared.launch, x, out, options, prepared.guard)

    def run(
        self,
        call: CollectiveCall,
        arrays: tuple[ArrayView, ...],
        prepare: Callable[[], Launchable],
        stream: StreamLike,
        key: Key | None,
    ) -> None:
        """Compares the call with the other ranks', prepares it or finds it prepared, and launches it."""
        if stream is not None or not self._on_host:
            self._runtime.stream_handle(stream)  # refuses an invalid stream before anything is agreed
        fields = self._launches.agree(call)
        if call.count == 0:
            return
        launched = (call, *(view.ptr for view in arrays))
        self._symmetric.update()
        changes = self._changes  # read first: it may miss changes that happen meanwhile
        launchable, guard = self._launchables.get(launched, (None, None))
        if launchable is None or (guard is not None and not guard.holds):
            # Also read first: it misses replies that arrive meanwhile.
            settled = all(self._symmetric.is_settled(view) for view in arrays)
            lent = not settled and any(self._symmetric.is_lent(view) for view in arrays)
            with self._exchange.telling():
                launchable = prepare()
            guard = self._symmetric.guard(arrays)
            # A schedule waits for the replies itself, except for those to lent memory.
            if settled or (isinstance(launchable, StreamOperations) and not lent):
                self._keep(self._launchables, launched, (launchable, guard), changes)
            else:
                key = None
        self._launches.launch(launchable, stream, tuple(view.owner for view in arrays))
        if key is not None:
            ranges = tuple((view.ptr, view.nbytes) for view in arrays)
            self._keep(self._prepared, key, _Prepared(encode_fields(fields), launchable, guard, ranges), changes)

    def _keep(self, cache: dict[Key, Any], key: Key, value: object, changes: int) -> None:
        """Keeps a value that was made after this many changes, unless there has been another one."""
        with self._lock:
            if changes != self._changes:
                return
            if len(cache) >= MOST_KEPT and key not in cache:
                del cache[next(iter(cache))]
            cache[key] = value

    def _forget(self, start: int, end: int) -> None:
        """Forgets calls with arrays that peers may have mapped or unmapped."""
        with self._lock:
            self._changes += 1
            self._launches.prepared_calls.clear()
            for launched in list(self._launchables):
                if any(start <= ptr < end for ptr in launched[1:]):
                    self._launchables.pop(launched, None)
            kept = {id(launchable) for launchable, _ in list(self._launchables.values())}
            for key, prepared in list(self._prepared.items()):
                if id(prepared.launch) not in kept:
                    self._prepared.pop(key, None)

    def clear(self) -> None:
        """Forgets all launchables, including one that is being made."""
        with self._lock:
            self._changes += 1
            self._launchables.clear()
            self._prepared.clear()
            self._launches.prepared_calls.clear()
