"""The order of a group's launches: one collective after the other, on whatever streams the program uses.

Collectives of a group share scratch memory, so they never run at once: a launch on a different stream than the last
waits for that one. The fields that must agree between ranks are compared through the call log before the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from proxyccl.channels._prepared_calls import PreparedCalls
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.segment.call_log import CALL_DIFFERED, CALL_DIFFERS, LOG_ENTRIES, CallLog, encode_fields
from proxyccl.channels.segment.calls import CALL_FIELDS, OBJECT_FIELD, SHAPED, CollectiveCall, describe_call
from proxyccl.channels.segment.error_record import DIFFERENT_CALL
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import Array, current_stream
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import KernelError
from proxyccl.device.kernel import Launch
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.owned import OwnedStream, closed_stream
from proxyccl.device.process.interrupts import forget, when_interrupted
from proxyccl.device.runtime import Runtime, Stream, StreamLike
from proxyccl.device.stream_operations import StreamOperations
from proxyccl.device.thread_streams import ThreadStream, identify_stream, reachable_stream

Launchable = Launch | StreamOperations
"""A prepared call that can be launched, again and again."""


class CurrentStream(int):
    """The handle of the stream on which torch works now. It reuses memory that it gave out there in the stream's order,
    so tensors need not be kept alive for a launch on this stream.
    """


_NUMBERS = (int, CurrentStream)


class Launches:
    """Launches of one rank's collectives.

    Args:
        runtime: where they run.
        failure: checked before a launch, and where a call waits.
        call_log: compares the ranks' calls.

    Attributes:
        default_stream: the stream of calls without one on the host runtime.
        prepared_calls: calls that were repeated before: without a stream on the host runtime, and torch's on a GPU.
    """

    def __init__(self, runtime: Runtime, failure: FailureState, call_log: CallLog) -> None:
        self._runtime = runtime
        self._on_host = runtime.name == "host"
        self._failure = failure
        self._call_log = call_log
        self._objects: list[str] = []
        self._lock = threading.RLock()
        self._launching: list[AbstractContextManager[object]] = [self._lock]
        self._last: int | ThreadStream | None = None  # the stream of the latest launch
        self._last_stream_owner: StreamLike = None  # a stream's handle is good as long as the stream lives
        self.default_stream: Stream = runtime.create_stream(in_caller=True)
        self._default_handle = self.default_stream.handle
        self.prepared_calls = PreparedCalls(
            Array, "identity", self._lock, self._refuse, self._next_stream, libraries.tensor_types
        )
        self._repeating = [self.prepared_calls]
        if (order := runtime.stream_order_in_c()) is not None:
            self.prepared_calls.order_by(*order)
        when_interrupted(self._default_handle, lambda error: failure.abort(f"interrupted by {type(error).__name__}"))
        if synchronize := runtime.launch_target().synchronize:
            call_log.wait_on(self._default_handle, synchronize)

    def stream_for(self, stream: StreamLike, x: Any, *others: Any) -> StreamLike:
        """The stream that a call without one means: on a GPU the one where the library that owns `x` works now.

        A `CurrentStream` if the call's other arrays are torch's too.
        """
        if stream is not None or self._on_host:
            return stream
        found = current_stream(x)
        if isinstance(found, int) and all(libraries[type(each)].is_torch for each in (x, *others)):
            return CurrentStream(found)
        return found

    def choose(self, wish: bool) -> bool:
        """Chooses between two ways for this rank's next call, alike on all ranks of its host: as the first of them
        wished. The program's other threads make no call meanwhile."""
        return self._call_log.choose(wish)

    def number_object(self, name: str) -> int:
        """The number of an object that all ranks make together, in the same order, and whose calls are then compared as
        its own (`CollectiveCall.of`).

        Args:
            name: what mismatches call it, before "#" and the number.
        """
        with self._lock:
            self._objects.append(f"{name} #{len(self._objects) + 1}")
            return len(self._objects)

    def agree(self, call: CollectiveCall) -> tuple[int, ...]:
        """Logs a call and compares it with the peers' calls. Returns its encoded fields.

        The rank that comes later sees the difference. Nothing can complete before that, because every collective needs
        every rank.

        Raises:
            MismatchError: a peer made a different call.
        """
        self._failure.require_usable()
        fields = call.encode()
        native = encode_fields(fields)
        with self._lock:
            self._check(self._call_log.agree(native), native)
        return fields

    def launch(
        self,
        launchable: Callable[[StreamLike], None],
        stream: StreamLike,
        owners: tuple[object, ...],
        kept: tuple[object, ...] = (),
    ) -> None:
        """Launches on a stream, after the group's earlier launches on any stream.

        Without a stream the call waits on the host runtime: plain numpy arrays have no streams. With one, `owners` are
        kept alive until the stream has got past them, unless it is a `CurrentStream`; `kept` are in any case.
        """
        with self._lock:
            handle = self._handle_of(stream)
            # The last check before the driver call: since the call was agreed on, a module may have been loaded, and
            # kernels that begin later must not use memory that peers free after a failure.
            self._failure.require_usable()
            launchable(handle)
        self._launched(stream, handle, kept if isinstance(stream, CurrentStream) else (*owners, *kept))

    def issue(self, call: Any, launch: Launchable, stream: StreamLike, owners: tuple[object, ...] = ()) -> None:
        """`agree` and `launch` for a call whose fields (`encode_fields`) are encoded, too.

        It is one call into C, the wait included. With NULL as the fields, the launch is part of a call that was agreed
        on.
        """
        issue = self._call_log.issue if isinstance(launch, Launch) else self._call_log.ring
        with self._lock:
            if self._failure.state != "open":
                self._failure.require_usable()  # C checks the abort word itself
            handle = self._handle_of(stream)
            status = issue(call, launch.prepared, handle)
            if status == lib.PROXYCCL_OTHER_CONTEXT:
                with self._runtime.current():
                    status = issue(call, launch.prepared, handle)
            if status:
                self._refuse(status, (call, launch))
        if owners and stream is not None:
            self._runtime.in_flight.add(owners, stream, handle)

    def keep(
        self,
        call: Any,
        launch: Launchable,
        x: Any,
        out: Any,
        options: tuple[Any, ...],
        guard: AllocationGuard | None = None,
    ) -> None:
        """Keeps a call that `issue` has made, or may make, for ``prepared_calls.repeat(x, out, options)``.

        On the host runtime that repeats it without a stream, on a GPU on the stream that it is given.
        """
        issue, callers = self.issuer(launch)
        prepared, fields = (int(ffi.cast("uintptr_t", each)) for each in (launch.prepared, call))
        holds = (0, 0) if guard is None else guard.addresses
        self.prepared_calls.keep(x, out, options, issue, callers, fields, prepared, (call, launch, guard), *holds)

    def issuer(self, launch: Launchable) -> tuple[int, int]:
        """Addresses for C: of the function that issues a launchable as `issue` does, and of its first argument."""
        return self._call_log.addresses(operations=not isinstance(launch, Launch))

    @property
    def last_stream(self) -> int | None:
        """Handle of a stream whose end now comes after the latest launch, or None if there is none.

        A program that gives a stream by its number keeps it until the next call.
        """
        self._see_turns()
        last = self._last
        if last is None or self._failure.closed or closed_stream(self._last_stream_owner) is not None:
            return None
        return reachable_stream(self._runtime, last)

    def recent_calls(self, count: int) -> list[tuple[int, dict[str, str]]]:
        """The last collective calls of this rank in order: each with its number, from 1, and its fields in words."""
        return [(number, describe_call(fields)) for number, fields in self._call_log.recent(count)]

    def add_lock(self, lock: AbstractContextManager[object]) -> None:
        """Adds a lock that others hold while they check whether the group has failed, and launch."""
        self._launching.append(lock)

    def wait_for_launchers(self) -> None:
        """Returns when no thread is about to launch. If the group has failed or is closed, none will launch again."""
        for lock in self._launching:
            with lock:
                pass

    def add_prepared_calls(self, calls: PreparedCalls) -> None:
        """Adds calls that `end_repeats` ends too. Their lock is one of `add_lock`."""
        self._repeating.append(calls)

    def end_repeats(self) -> None:
        """From now on no prepared call is repeated."""
        for calls in self._repeating:
            calls.set_stream(None)

    def close(self) -> None:
        """Frees the default stream."""
        self.default_stream.close()
        forget(self._default_handle)

    def _refuse(self, status: int, kept: tuple[Any, ...]) -> None:
        """Raises the error for a nonzero status of a call, whose fields and launchable `kept` begins with."""
        call, launch, *_ = kept
        if status > 0:
            launch.check(status)
        self._check(status, call)

    def _check(self, status: int, call: Any) -> None:
        if status == CALL_DIFFERS:
            peer, theirs = self._call_log.difference()
            raise self._mismatch(peer, theirs, tuple(call.fields))
        if status == CALL_DIFFERED:
            peer, _ = self._call_log.difference()
            raise self._failure.file_mismatch(
                peer,
                lambda this_rank, here: (
                    f"{this_rank} and rank {peer} make different calls: an earlier call {here} and on rank {peer}, "
                    f"which was not compared: one of the two was more than {LOG_ENTRIES} calls ahead"
                ),
            )
        if status:
            raise self._failure.exception()

    def _mismatch(self, peer: int, theirs: tuple[int, ...], mine: tuple[int, ...]) -> Exception:
        field = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        name = CALL_FIELDS[field]
        own, there = describe_call(mine), describe_call(theirs)
        call, object_here, object_there = own["collective"], self._object_of(mine), self._object_of(theirs)
        if object_here != object_there:
            field, name = CALL_FIELDS.index(DIFFERENT_CALL), DIFFERENT_CALL

        def cause(this_rank: str, here: str) -> str:
            if name == DIFFERENT_CALL:
                what = f"{call}{object_here} {here}, {there[name]}{object_there} on rank {peer}"
                return f"{this_rank} and rank {peer} make different calls: {what}"
            if name != "shape":
                what = f"{call} with {name} {own[name]} {here}, with {name} {there[name]} on rank {peer}"
            elif call in SHAPED:
                what = f"{call} with an array of {own['count']} elements {here}, in another shape on rank {peer}"
            else:
                what = f"{call} {here}, with other registered arrays on rank {peer}"
            return f"{this_rank} and rank {peer} call a collective with different {name}: {what}"

        return self._failure.file_mismatch(peer, cause, field)

    def _object_of(self, fields: tuple[int, ...]) -> str:
        """The object of a call in words that follow its name; "" for calls of the communicator."""
        number = fields[OBJECT_FIELD]
        return f" of {self._objects[number - 1]}" if 0 < number <= len(self._objects) else ""

    def _handle_of(self, stream: StreamLike) -> int:
        """The handle of a call's stream, ordered after the latest launch."""
        self._see_turns()
        if stream is None and self._on_host and self._last == self._default_handle:
            return self._default_handle
        if type(stream) in _NUMBERS and stream == self._last and closed_stream(self._last_stream_owner) is None:
            return int(stream)
        return self._next_stream(stream)

    def _see_turns(self) -> None:
        """Learns on which stream C has repeated the latest call, if it has turned to another by itself."""
        if not self._on_host and (turned := self.prepared_calls.stream) is not None and turned != self._last:
            self._last = self._last_stream_owner = turned

    def _next_stream(self, stream: StreamLike) -> int:
        self._see_turns()
        on_default = stream is None and self._on_host
        handle = self._default_handle if on_default else self._runtime.stream_handle(stream)
        named = identify_stream(self._runtime, handle)
        closed = closed_stream(self._last_stream_owner)
        if named != self._last or closed is not None:
            if closed is not None:
                if closed.end is not None and not self._runtime.is_capturing(handle):
                    self._runtime.wait_event(handle, closed.end)
            elif self._last is not None:
                self._runtime.order_streams(reachable_stream(self._runtime, self._last), handle)
            self._last, self._last_stream_owner = named, stream
        elif type(stream) is not int or not isinstance(self._last_stream_owner, OwnedStream):
            self._last_stream_owner = stream
        # By its number a program names a stream that it keeps; an object might be closed, and its handle another's.
        is_number = not self._on_host and isinstance(self._last_stream_owner, int) and named == handle
        self.prepared_calls.set_stream(handle if on_default or is_number else None)
        if self._failure.closed:  # since this call's check
            self.end_repeats()
        return handle

    def _launched(self, stream: StreamLike, handle: int, owners: tuple[object, ...]) -> None:
        if stream is None and self._on_host:
            try:
                self.default_stream.synchronize()
            except KernelError:
                self._failure.check()
                raise
            self._failure.check()
        elif owners:
            self._runtime.in_flight.add(owners, stream, handle)
