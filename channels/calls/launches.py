"""Orders a group's launches: collectives run one after the other, whatever their streams.

Collectives of a group share scratch memory, so they never run at the same time: a launch waits for the previous launch
if that is on another stream. Before a launch, the call log compares the fields that must agree between ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from proxyccl.channels.calls._calls import Calls, Form
from proxyccl.channels.liveness.failure import FailureState
from proxyccl.channels.segment.call_log import CALL_DIFFERED, CALL_DIFFERS, LOG_ENTRIES, CallLog, encode_fields
from proxyccl.channels.segment.calls import CALL_FIELDS, OBJECT_FIELD, SHAPED, CollectiveCall, describe_call
from proxyccl.channels.segment.error_record import DIFFERENT_CALL
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import Array, ArrayView, current_stream
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import KernelError
from proxyccl.device.in_flight import ThreadStream, identify_stream, reachable_stream
from proxyccl.device.kernel import Launch
from proxyccl.device.owned import OwnedStream, closed_stream
from proxyccl.device.process.interrupts import forget, when_interrupted
from proxyccl.device.runtime import Runtime, Stream, StreamLike
from proxyccl.device.stream_operations import StreamOperations

Launchable = Launch | StreamOperations
"""A prepared call that can be launched repeatedly."""


class CurrentStream(int):
    """The handle of torch's current stream. Torch's allocator reuses a stream's memory in the stream's order, so
    tensors need not be kept alive for a launch on this stream.
    """


_NUMBERS = (int, CurrentStream)
_MOST_CAPTURES = 16  # the greatest number of captures whose latest launches are known


def array_types(runtime: Runtime) -> tuple[type, type, dict[type, object], tuple[str, int], int]:
    """Returns the argument of `Calls` that names the types of arrays that C reads."""
    device = -1 if runtime.name == "host" else runtime.device
    return Array, ArrayView, libraries.tensor_types, (runtime.name, runtime.device), device


class Launches:
    """Orders and issues the launches of one rank's collectives.

    Args:
        failure: the group's failure state, which is checked before each launch and in each wait.
        log: compares the ranks' calls.
        rank, ranks: this rank's number, and the number of ranks.

    Attributes:
        log: the log of this rank's calls.
        locks: the locks that threads hold while they check whether the group has failed and then launch.
        default_stream: on the host runtime, the stream of calls that name no stream.
        calls: issues every call; reuses the form of an earlier call of the same signature.
    """

    def __init__(self, runtime: Runtime, failure: FailureState, log: CallLog, rank: int, ranks: int) -> None:
        self._runtime = runtime
        self._rank, self._ranks = rank, ranks
        self._on_host = runtime.name == "host"
        self._failure = failure
        self.log = log
        self._objects: list[str] = []
        self._lock = threading.RLock()
        self.locks: list[AbstractContextManager[object]] = [self._lock]
        self._last: int | ThreadStream | None = None  # the stream of the latest launch that was not captured
        self._last_stream_owner: StreamLike = None  # keeps that stream, and so its handle, alive
        # By a capture's number, the stream of its latest launch, and what keeps that stream alive.
        self._captured: dict[int, tuple[int | ThreadStream, StreamLike]] = {}
        self.default_stream: Stream = runtime.create_stream(in_caller=True)
        self._default_handle = self.default_stream.handle
        self.calls = Calls(
            array_types(runtime),
            rank,
            self._lock,
            CurrentStream,
            (self._refuse, self._turn, runtime.current, runtime.in_flight.add),
        )
        if runtime.thread_stream is not None:
            events = runtime.stream_events()
            self.calls.order_by(events.order, events.take(), runtime.thread_stream)
        when_interrupted(self._default_handle, lambda error: failure.abort(f"interrupted by {type(error).__name__}"))
        if synchronize := runtime.calls.synchronize:
            log.wait_on(self._default_handle, synchronize)

    def stream_for(self, stream: StreamLike, x: Any, *others: Any) -> StreamLike:
        """Resolves `stream=None`: on a GPU to the current stream of the library that owns `x`. Returns a
        `CurrentStream` if all of the call's arrays are torch's.
        """
        if stream is not None or self._on_host:
            return stream
        found = current_stream(x)
        if isinstance(found, int) and all(libraries[type(each)].is_torch for each in (x, *others)):
            return CurrentStream(found)
        return found

    def number_object(self, name: str) -> int:
        """Returns the number of an object that all ranks make together; all ranks make such objects in the same order.
        The call log compares the object's calls separately from the communicator's calls (`CollectiveCall.of`).

        Args:
            name: the object's name in errors about mismatches; "#" and the number are appended.
        """
        with self._lock:
            self._objects.append(f"{name} #{len(self._objects) + 1}")
            return len(self._objects)

    def agree(self, call: CollectiveCall) -> tuple[int, ...]:
        """Logs a call and compares it with the peers' calls. Returns the call's encoded fields.

        If two ranks' calls differ, the rank that calls later raises the error. No collective completes before all
        ranks' calls were compared, because each collective needs every rank.

        Raises:
            MismatchError: a peer made a different call.
        """
        self._failure.require_usable()
        fields = call.encode()
        native = encode_fields(fields)
        with self._lock:
            self._check(self.log.agree(native), native)
        return fields

    def launch(
        self,
        launchable: Callable[[StreamLike], None],
        stream: StreamLike,
        owners: tuple[object, ...],
        kept: tuple[object, ...] = (),
    ) -> None:
        """Launches on a stream, after the group's earlier launches on any stream.

        On the host runtime without a stream, waits for the launch's end, because numpy arrays have no streams. If
        `stream` is given, keeps `kept` alive until the stream has completed the launch, and also `owners` unless
        `stream` is a `CurrentStream`.
        """
        with self._lock:
            handle = self._handle_of(stream)
            # The failure state is checked again here, because loading a module may have taken long after the ranks
            # agreed. A kernel that begins after a failure must not use memory that peers may have freed.
            self._failure.require_usable()
            launchable(handle)
        if stream is None and self._on_host:
            try:
                self.default_stream.synchronize()
            except KernelError:
                self._failure.check()
                raise
            self._failure.check()
        elif owners := kept if isinstance(stream, CurrentStream) else (*owners, *kept):
            self._runtime.in_flight.add(owners, stream, handle)

    def issue(self, call: Any, launch: Launchable, stream: StreamLike, owners: tuple[object, ...] = ()) -> None:
        """Does the work of `agree` and `launch` for a call whose fields are encoded (`encode_fields`).

        One call into C compares, launches, and waits if the call is synchronous. A NULL `call` means that the ranks
        have already agreed on the call.
        """
        issue = self.log.issue if isinstance(launch, Launch) else self.log.ring
        with self._lock:
            if self._failure.state != "open":
                self._failure.require_awake()  # C checks the abort word in addition
            handle = self._handle_of(stream)
            status = issue(call, launch.prepared, handle)
            if status == lib.PROXYCCL_OTHER_CONTEXT:
                with self._runtime.current():
                    status = issue(call, launch.prepared, handle)
            if status:
                self._refuse(status, (call, launch))
        if owners and stream is not None:
            self._runtime.in_flight.add(owners, stream, handle)

    def form(
        self,
        fields: tuple[int, ...],
        launch: Launchable | None,
        views: Sequence[ArrayView] = (),
        ranges: Sequence[tuple[int, int]] = (),
        lent: int = -1,
    ) -> Form:
        """Returns the form of a call whose fields are encoded.

        Args:
            fields: the fields to compare with the other ranks.
            launch: the launchable, prepared for the arrays `views`; None if the call launches nothing.
            views: the call's arrays. Later calls may use other arrays with the same signature.
            ranges: (start, end) of memory other than the arrays, whose withdrawal drops the form.
            lent: the index of the array to announce to peers if calls use it often; -1 for none.
        """
        call = encode_fields(fields)
        operations = isinstance(launch, StreamOperations)
        issue, callers = self.log.addresses(operations=operations)
        prepared = 0 if launch is None else int(ffi.cast("uintptr_t", launch.prepared))
        pointers = [] if launch is None else launch.pointers_into([(view.ptr, view.nbytes) for view in views])
        words = launch.peers_words if isinstance(launch, Launch) else 0
        return Form(
            (issue, callers, int(ffi.cast("uintptr_t", call)), prepared),
            (call, launch),
            pointers,
            (words, self._ranks, self._rank),
            list(ranges),
            lent,
            operations,  # whether the launch is a schedule, which holds proxies' ids of memory
        )

    def issuer(self, launch: Launchable) -> tuple[int, int]:
        """Returns two addresses: of the C function that issues a launchable as `issue` does, and of that function's
        first argument.
        """
        return self.log.addresses(operations=not isinstance(launch, Launch))

    @property
    def last_stream(self) -> int | None:
        """The handle of a stream that is ordered after the latest launch outside captures; None if there was none.

        A program that passes a stream by number must keep that stream open until the next call that is not captured.
        """
        self._see_turns()
        last = self._last
        if last is None or self._failure.closed or closed_stream(self._last_stream_owner) is not None:
            return None
        return reachable_stream(self._runtime, last)

    def recent_calls(self, count: int) -> list[tuple[int, dict[str, str]]]:
        """Returns this rank's last collective calls in order; each is a pair of the call's number, from 1, and a
        description of its fields.
        """
        return [(number, describe_call(fields)) for number, fields in self.log.recent(count)]

    def wait_for_launchers(self) -> None:
        """Waits for each thread that has checked the group and is about to launch. If the group has failed or is
        closed, no thread launches after this method has returned.
        """
        for lock in self.locks:
            with lock:
                pass

    def recheck_next_call(self) -> None:
        """Makes the next call check that the group is still open, even if C could issue the call without Python."""
        self.calls.set_stream(None)

    def close(self) -> None:
        self.default_stream.close()
        forget(self._default_handle)

    def _refuse(self, status: int, kept: tuple[Any, ...]) -> None:
        """Raises the error for a call's nonzero status. `kept` begins with the call's fields and its launchable."""
        call, launch, *_ = kept
        if status > 0:
            assert launch is not None
            launch.check(status)
        self._check(status, call)

    def _check(self, status: int, call: Any) -> None:
        if status == CALL_DIFFERS:
            peer, theirs = self.log.difference()
            self._file_mismatch(peer, theirs, tuple(call.fields))
        elif status == CALL_DIFFERED:
            peer, _ = self.log.difference()
            self._failure.file_mismatch(
                peer,
                lambda this_rank, here: (
                    f"{this_rank} and rank {peer} make different calls: an earlier call {here} and on rank {peer}, "
                    f"which was not compared: one rank was more than {LOG_ENTRIES} calls ahead"
                ),
            )
        if status:
            raise self._failure.exception()

    def _file_mismatch(self, peer: int, theirs: tuple[int, ...], mine: tuple[int, ...]) -> None:
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
                what = f"{call} with an array of {own['count']} elements {here}, {SHAPED[call]} on rank {peer}"
            else:
                what = f"{call} {here}, with other registered arrays on rank {peer}"
            return f"{this_rank} and rank {peer} call a collective with different {name}: {what}"

        self._failure.file_mismatch(peer, cause, field)

    def _object_of(self, fields: tuple[int, ...]) -> str:
        number = fields[OBJECT_FIELD]
        return f" of {self._objects[number - 1]}" if 0 < number <= len(self._objects) else ""

    def _handle_of(self, stream: StreamLike) -> int:
        self._see_turns()
        if stream is None and self._on_host and self._last == self._default_handle:
            return self._default_handle
        if type(stream) in _NUMBERS and stream == self._last and closed_stream(self._last_stream_owner) is None:
            handle = int(stream)
            if not self._runtime.capture_of(handle):
                return handle
        return self._next_stream(stream)

    def _turn(self, stream: StreamLike) -> int:
        """Orders a stream after the latest launch, and returns the stream's handle. C calls this with the lock held."""
        self._failure.require_awake()
        return self._next_stream(stream)

    def _see_turns(self) -> None:
        """Updates the stream of the latest call, which C may have issued without Python."""
        if not self._on_host and (turned := self.calls.stream) is not None and turned != self._last:
            self._last = self._last_stream_owner = turned

    def _next_stream(self, stream: StreamLike) -> int:
        self._see_turns()
        on_default = stream is None and self._on_host
        handle = self._default_handle if on_default else self._runtime.stream_handle(stream)
        named = identify_stream(self._runtime, handle)
        closed = closed_stream(self._last_stream_owner)
        capture = self._runtime.capture_of(handle)
        # The stream of the latest launch of the same capture, or else outside captures.
        last, owner = self._captured.get(capture, (None, None)) if capture else (self._last, self._last_stream_owner)
        if closed_stream(owner) is not None:
            last = None
        if last is not None and last != named:
            self._runtime.order_streams(reachable_stream(self._runtime, last), handle)
        if capture:
            if len(self._captured) == _MOST_CAPTURES and capture not in self._captured:
                del self._captured[next(iter(self._captured))]
            self._captured[capture] = named, stream
            self.calls.set_stream(None)
            return handle
        if named != self._last or closed is not None:
            if closed is not None and closed.end is not None:
                self._runtime.wait_event(handle, closed.end)
            self._last, self._last_stream_owner = named, stream
        elif type(stream) is not int or not isinstance(self._last_stream_owner, OwnedStream):
            self._last_stream_owner = stream
        # C may use a handle again only if the program passed the handle as a number, because the program then keeps the
        # stream open. A stream object may be closed, and another stream may get its handle.
        is_number = not self._on_host and isinstance(self._last_stream_owner, int) and named == handle
        self.calls.set_stream(handle if on_default or is_number else None)
        if self._failure.closed:  # the group was closed after this call's check
            self.recheck_next_call()
        return handle
