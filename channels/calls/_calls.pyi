"""The C extension of `module.c`: forms of calls, transfers, and experts' calls (expert_parallel/*.c)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from proxyccl.device.base_runtime import StreamLike

MOST_FORMS: Final[int]
"""The most forms that a `Calls` keeps. If there are more, the least recently used form is dropped."""

LEAST_LENT_BYTES: Final[int]
"""`Calls.take_notes` reports arrays of at least this size."""

MOST_DIMENSIONS: Final[int]
"""The most dimensions of an array that `Calls` reads."""

NAMED_BY_PROXIES: Final[int]
RECEIVED_BY_PROXIES: Final[int]
"""Flags of memory: schedules may send from it (NAMED_BY_PROXIES), schedules may receive in it (RECEIVED_BY_PROXIES)."""

class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...

class Form:
    """A call without the addresses of its arrays.

    Args:
        prepared: addresses of the function that issues the call (such as proxyccl_calls_issue, calls.h), and of that
            function's arguments: the callers, the encoded fields, and the launch, which is 0 if the call launches
            nothing.
        kept: objects that must live as long as `prepared` is used; they are passed to `refuse` of `Calls`.
        relocations: the words of the launch's arguments that point into the call's arrays: for each the address of the
            word, the index of the array, and the offset in the array.
        peers: three numbers: the address of an array that holds, by rank, the address of the call's last array for that
            rank's kernels, or 0 if there is no such array; the number of ranks; this rank.
        ranges: start and end of memory whose withdrawal ends the form.
        lent: the index of the array that peers should reach if the program uses it often; -1 for none.
        names_memory: whether the launch names memory by the proxies' ids. The form is then bound to the addresses of
            one call, if proxies reach one of the call's arrays.
    """

    def __new__(
        cls,
        prepared: tuple[int, int, int, int],
        kept: object,
        relocations: list[tuple[int, int, int]],
        peers: tuple[int, int, int],
        ranges: list[tuple[int, int]],
        lent: int,
        names_memory: bool,
    ) -> Form: ...

class Calls:
    """The calls of one group.

    A call's form is found by its options and by the kinds of its arrays: type, element type, shape, alignment, whether
    the array is read-only, how peers reach the array, and how each two arrays overlap. If no form is kept, the first
    option is called as ``prepare(x, out, options, reached, logged)`` and returns the `Form`: `reached` tells whether
    kernels of all ranks reach the array `out`, and `logged` whether an earlier `prepare` of this call has logged the
    call.

    Args:
        arrays: the types `Array` and `ArrayView`; a dict from each type of torch's tensors that have their own memory
            to the capsule of its DLPack functions, to which types may be added; the `device` of views; the GPU on which
            tensors lie, or -1 for the CPU.
        rank: this rank.
        lock: held while a call is issued, but not while it is prepared.
        current_stream: the type of stream handles for which the caller's allocator reuses arrays in stream order.
        functions: ``refuse(status, kept)`` raises the error for a nonzero status of a call; ``turn(stream)`` returns
            the handle of a stream, ordered after the latest call, and calls `set_stream`; ``context()`` makes the
            device current in a block; ``keep(objects, stream, handle)`` keeps objects until the stream has passed the
            work that it has.
    """

    # The handle of the stream of the latest call; None if the next call must call `turn` to order its stream.
    stream: int | None
    made: int  # the number of calls issued
    prepared: int  # the number of forms prepared

    def __new__(
        cls,
        arrays: tuple[type, type, dict[type, object], tuple[str, int], int],
        rank: int,
        lock: _Lock,
        current_stream: type,
        functions: tuple[
            Callable[[int, Any], object],
            Callable[[StreamLike], int],
            Callable[[], AbstractContextManager[None]],
            Callable[[object, StreamLike, int], object],
        ],
    ) -> Calls: ...
    def call(self, x: object, out: object, options: tuple[object, ...], stream: StreamLike, /) -> bool:
        """Makes a call.

        Args:
            x, out: the call's arrays, which may be the same object; a tuple for several arrays or for none, at most
                eight in all.
            options: at most ten. Texts, numbers and tuples are compared by value, other objects by identity.
            stream: None for the default stream.

        Returns:
            False, without any effect, if C can't read an array; `as_view` may be able to read that array.

        Raises the errors that `prepare`, `refuse` and `turn` raise.
        """
    def call_kept(self, x: object, out: object, options: tuple[object, ...], stream: int, /) -> bool:
        """Makes a call if its form is kept; otherwise only orders the stream after earlier calls, and returns False.
        The caller keeps the arrays until the stream has passed the call.
        """
    def clear(self) -> None:
        """Drops all forms; forms that are being prepared will not be kept."""
    def forget(self, start: int, end: int, /) -> None:
        """Drops the forms that are bound to memory in a range; forms that are being prepared will not be kept."""
    def set_reached(
        self,
        number: int,
        start: int,
        end: int,
        bases: list[int] | None,
        proxies: int,
        holds: int,
        guard: int,
        kept: object,
        /,
    ) -> None:
        """Sets how peers reach a range of this rank's memory.

        Args:
            number: identifies the range in later calls.
            start, end: its addresses.
            bases: by rank, the address of `start` for the kernels of that rank; None unless all ranks' kernels reach
                the range.
            proxies: the sum of the flags `NAMED_BY_PROXIES` and `RECEIVED_BY_PROXIES` that apply.
            holds, guard: addresses of a function, and of its first argument, that checks whether the range is still in
                the allocations that held it (allocation_guard.h); 0 for no check.
            kept: an object that must live as long as the guard.
        """
    def unset_reached(self, number: int, /) -> None:
        """Removes a range. An unknown number is ignored."""
    def reach_of(self, start: int, nbytes: int, /) -> int:
        """Returns how peers reach an array: 1 if the kernels of all ranks reach the array, plus the flags
        `NAMED_BY_PROXIES` and `RECEIVED_BY_PROXIES` that apply.
        """
    def take_notes(self) -> list[tuple[int, int]]:
        """Returns address and size of each `lent` array of at least `LEAST_LENT_BYTES` that calls used since the last
        `take_notes` and that peers do not reach. An array is listed once for each use.
        """
    def want(self, start: int, nbytes: int, lend: Callable[[int, int], object], /) -> None:
        """Requests that the next call with this array calls ``lend(start, nbytes)``, after the call was issued."""
    def set_stream(self, stream: int | None) -> None:
        """Sets the stream of the latest call, by its handle. After None, the next call orders its stream by calling
        `turn`.
        """
    def order_by(self, order: int, event: int, thread_stream: int) -> None:
        """Lets C order a call after the latest call on another stream, without `turn`.

        Args:
            order: address of a ProxycclStreamOrder (stream_order.h).
            event: handle of an event that nothing else uses.
            thread_stream: the handle that names a different stream in each thread; calls with this handle still call
                `turn`.
        """

class FlowCalls:
    """The transfers between pairs of ranks of one group.

    Args:
        arrays: as for `Calls`.
        ndarray: the type `numpy.ndarray`.
        current_stream: as for `Calls`.
        runtime: the group's runtime, which arrays of type `Array` must have.
        failure: the group's `FailureState`.
        lock: held while a call is issued.
        launch: the addresses of a ProxycclLaunch, 0 for a group of one rank, and of its argument, a ProxycclFlows;
            their owner; bytes of a lane; bytes of a lane that sends lines.
        order: addresses of the driver's function that copies, of the ProxycclStreamOrder of streams and events, and of
            the group's ProxycclControl; the handle that names a different stream in each thread, or 2**64 - 1 if there
            is none.
        functions: ``refuse(status)`` raises the error for a nonzero status of a call; ``handle_of(stream)`` returns a
            stream's handle; ``context()`` makes the device current in a block; ``keep(objects, stream, handle)`` keeps
            objects until the stream has passed the work that it has; ``make_event()`` returns the handle of an event;
            ``take_stream()`` returns a stream for a call that waits; ``wait(stream)`` waits for that stream's work, and
            makes the stream available for other calls.
    """

    events: list[int]  # handles of the events that were made

    def __new__(
        cls,
        arrays: tuple[type, type, dict[type, object], tuple[str, int], int],
        ndarray: type,
        current_stream: type,
        runtime: object,
        failure: object,
        lock: _Lock,
        launch: tuple[int, int, object, int, int],
        order: tuple[int, int, int, int],
        functions: tuple[
            Callable[[int], object],
            Callable[[StreamLike], int],
            Callable[[], AbstractContextManager[None]],
            Callable[[object, StreamLike, int], object],
            Callable[[], int],
            Callable[[], Any],
            Callable[[Any], object],
        ],
    ) -> FlowCalls: ...
    def call(self, x: Any, out: Any, options: tuple[Any, Any, Any], stream: StreamLike, /) -> bool:
        """Makes a call. On the host runtime, without a stream, waits for the call's end.

        Args:
            x, out: the arrays to send, and the arrays to receive in: one array, or a list or tuple of arrays.
            options: three values. First a function that compares the call with the other ranks, given (x, out), or the
                call's name for no comparison. Then the ranks for `x`, and the ranks for `out`: for a list of arrays, a
                list with one rank each; for one array, a rank, or the number of rows for each rank, or "even" for equal
                numbers of rows, or "all" for an array that goes to all ranks as a whole.
            stream: None for the default stream.

        Returns:
            False, without any effect, if Python must convert or refuse an argument.

        Raises the errors that the functions raise.
        """
    def call_borrowed(self, x: Any, out: Any, options: tuple[Any, Any, Any], stream: int, /) -> bool:
        """Makes a call like `call`, with arrays that the caller keeps until the stream has passed the call."""
    def takes(self, x: Any, received: bool, /) -> bool:
        """Whether `call` can send an array, or receive in the array; otherwise Python must handle the array."""

class Descriptor:
    """The part of `EPAllToAllLayoutDesc` that C reads and writes."""

    owner: Any
    like: Any  # an array of the library and device of the tables
    stream: Any
    missing: str | None  # the reason why the rows have not been received; None once they have been received
    number: int
    num_dispatch_token_cur_rank: int
    rows: int
    output_buffer: int
    counts_rows: bool
    def add_block(self, array: Any, address: int, tables: Any, offsets: int) -> None:
        """Adds an array that holds tables, with the address of the tables' offsets. At most two blocks can be added."""
    def find(self, name: str, /) -> tuple[Any, int, Any, Any] | None:
        """Returns the array that holds a table, the array's address, the table's place in the array, and its `Tables`;
        None if no table has that name.
        """

class FormList:
    """The forms of one kind of call, whose arrays may have any first extent.

    Args:
        calls: the group's `Calls`.
        widths: for each array argument of the call, the most arrays that it may hold as a tuple; 1 for no tuples; -n if
            it may be a tuple of exactly n arrays. An argument may be None, but an array in a tuple may not.
        further: the number of other arguments that follow.
        view: called as view(argument, x), with the argument's number, for an array that C can't read. Returns a view of
            the array, or raises ArgumentError.
        prepare: called with a call's arguments if no form is listed for the kinds of their arrays. Returns a form, or
            raises ArgumentError. A kind is the type, the element type, the shape without the first extent, and whether
            the array is read-only. At most 16 forms are listed; a further form replaces the oldest.
    """

    def __new__(
        cls,
        calls: Calls,
        widths: tuple[int, ...],
        further: int,
        view: Callable[[int, Any], Any],
        prepare: Callable[..., Any],
        /,
    ) -> FormList: ...
    def call(self, *arguments: Any) -> Any:
        """Makes a call, and returns its form's result. If the form refuses the first extents of the arrays, `prepare`
        raises ArgumentError.
        """

class DispatchForm:
    """The form of a dispatch, whose arguments stay packed (dispatch_form.py).

    A call is given the tokens or a pair of rows and scales, the ids, the weights, the indices, and a stream. A call
    that reuses an earlier routing is given the tokens, the descriptor of that dispatch, a stream and an array for the
    rows. A call without a stream runs on torch's current stream. If the current stream is not the stream of C's calls,
    `queue` issues the call.

    Args:
        common: `CallForm.common`.
        others: see `Form` in dispatch_form.c.
    """

    def __new__(
        cls,
        common: tuple[Any, ...],
        way: int,
        tokens: tuple[int, int, bool],
        call: int,
        before: tuple[int, ...],
        renumbering: tuple[Any, ...],
        clearing: tuple[int, int],
        phases: tuple[int, int, int],
        descriptor: tuple[Any, ...],
        rows: tuple[int, bool, int],
        scales: tuple[int, int],
        makers: tuple[Callable[[], Any] | None, ...],
        begun: Callable[[Any, Any, Any], Any] | None,
        proceed: Callable[..., Any],
        buffers: tuple[int, int, int],
        /,
    ) -> DispatchForm: ...
    def issue(
        self,
        desc: Any,
        stream: Any,
        owners: tuple[object, ...],
        first: bool,
        phases: int,
        rows: int,
        addresses: tuple[int, int, int],
        /,
    ) -> None:
        """Issues some phases of a call whose arguments are filled in. `rows` is the number of rows that the output has
        room for; `addresses` are those of rows, scales and weights.
        """

class CombineForm:
    """The form of a combine, whose arguments stay packed (combine_form.py); see `DispatchForm`.

    A call is given the rows, their weights, the weights of slots, the ids that order sums, up to two arrays of initial
    sums, the descriptor, an array for the result and a stream. The call returns the result, or a `SentCall`.

    Args:
        common: `CallForm.common`.
        others: see `Form` in combine_form.c.
    """

    def __new__(
        cls,
        common: tuple[Any, ...],
        after_copy: tuple[Any, ...] | None,
        sizes: tuple[int, int, int, int],
        spare_rows: bool,
        halves: bool,
        call: int,
        buffers: tuple[Any, ...],
        context: Any,
        output: Callable[[int], Callable[[], Any]],
        checks: tuple[Any, Any],
        /,
    ) -> CombineForm: ...

class SentCall:
    """A dispatch or a combine whose first half is queued."""

    desc: Any  # the dispatch's descriptor, filled when rows are received
    stream: Any  # the stream of the first half
    rows: Any  # a dispatch's output, None while its size is unknown; or the rows passed to a combine
    owners: tuple[Any, ...]  # the arrays that kernels use
    # The caller's tokens or rows, and their weights, if the call is recorded for a backward pass.
    recorded: tuple[Any, ...]
    def receive(self, stream: Any, out: Any = None, /) -> Any:
        """Issues the second half on a stream. Returns a dispatch's rows, their weights and the descriptor; or the
        result of a combine, which is `out` or a new array. If `out` does not fit, raises ArgumentError and does
        nothing.
        """
