"""The extension of prepared_calls_module.c: prepared_calls.c, and the forms of experts' calls (expert_parallel/*.c)."""

from collections.abc import Callable
from typing import Any, Final, Protocol

MOST_KEPT: Final[int]
"""The most calls that a `PreparedCalls` keeps. Beyond them the one that was not used for longest goes."""

class _Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...

class PreparedCalls:
    """Calls that were made before, each found by its arrays and options, and issued without Python.

    An array is known by what its buffer tells: address, size, shape, format and whether it is read-only. One of the
    type `identified` is known by the object in its attribute `identity`, which is no other array's; with None there it
    is not known. A tensor on a GPU is known by address, shape and dtype, if its memory holds its elements in order. An
    argument for arrays may be a tuple of them, though not of arrays that have buffers.

    Args:
        identified: a type of arrays without buffers; types derived from it have no part in this.
        identity: the name of the attribute.
        lock: held during a call.
        refuse: called as refuse(status, kept) for a call whose status is not 0; it raises the exception.
        turn: called as turn(stream) with the lock held, before a call on another stream than the last; it orders the
            two and calls `set_stream`. None if what issues a call orders streams itself.
        tensor_types: types of torch's tensors that have memory of their own; types may be added later.

    Attributes:
        stream: the handle of the stream of the latest call; None if no call is repeated at present.
    """

    stream: int | None

    def __new__(
        cls,
        identified: type,
        identity: str,
        lock: _Lock,
        refuse: Callable[[int, Any], object],
        turn: Callable[[int], object] | None,
        tensor_types: set[type],
    ) -> PreparedCalls: ...
    def set_stream(self, stream: int | None) -> None:
        """The stream of the latest call, by its handle; with None no call is repeated before the next `turn`."""
    def order_by(self, order: int, event: int, thread_stream: int) -> None:
        """Has calls on another stream than the last follow it without `turn`.

        Args:
            order: address of a ProxycclStreamOrder (stream_order.h).
            event: that nothing else uses.
            thread_stream: the handle that means another stream in each thread, which stays with `turn`.
        """
    def keep(
        self,
        x: object,
        out: object,
        options: tuple[object, ...],
        issue: int,
        callers: int,
        call: int,
        launch: int,
        kept: object,
        holds: int = 0,
        guard: int = 0,
    ) -> None:
        """Keeps a call, in place of one with the same arrays and options. Nothing is kept of arrays that can't be
        described.

        Args:
            x, out: its arrays, to which no reference is kept.
            options: at most six, known by identity.
            issue: address of proxyccl_calls_issue (calls.h), or of a function like it.
            callers, call, launch: what that is given, by address.
            kept: what must live as long as these; `refuse` is given it.
            holds, guard: address of a function, and its argument: the call is repeated only while that returns not 0.
        """
    def repeat(self, x: object, out: object, options: tuple[object, ...], stream: int = ..., /) -> bool:
        """Issues a call that is kept, by default on the stream of the latest call.

        False if it is not kept, if it can't be on the stream, or if the thread's current device is another. Raises what
        `refuse` and `turn` raise.
        """
    def clear(self) -> None:
        """Forgets all calls."""

class Descriptor:
    """The part of `EPAllToAllLayoutDesc` that C reads and writes.

    Attributes:
        like: an array of the library and device of the tables.
        missing: why there are no rows; None if they were received.
        blocks: the arrays in which tables lie, their addresses, and the `Tables`.
        table_owners: these arrays, which must be kept alive while kernels use them.
    """

    owner: Any
    like: Any
    stream: Any
    missing: str | None
    number: int
    num_dispatch_token_cur_rank: int
    rows: int
    output_buffer: int
    counts_rows: bool
    @property
    def blocks(self) -> tuple[tuple[Any, int, Any], ...]: ...
    @property
    def table_owners(self) -> tuple[Any, ...]: ...
    def add_block(self, array: Any, address: int, tables: Any, offsets: int) -> None:
        """Adds tables that lie in an array, with the address of their offsets. There can be two blocks."""
    def find(self, name: str, /) -> tuple[Any, Any, Any] | None:
        """A table's array, its place there and its `Tables`; None if there is none of that name."""

class DispatchForm:
    """The form of a dispatch, whose arguments stay packed (dispatch_form.py).

    A call whose arrays are of other types or places does nothing and returns None. The arrays of any other are looked
    at by C, which fills in their addresses; where one has another shape than it should, or can't be placed by C, the
    `check` of its kind raises ArgumentError or tells its address. A call without a stream is on the one where torch
    works now. Where that is not the stream of C's calls, `queue` issues it.

    Args:
        issuer: `CallForm.issuer`.
        first, second: `CallForm.prepared`, of the whole call or its first half, and of what follows.
        kinds: `kind_of` the rows, their scales, the ids, the weights and the indices; None for those that there are
            not.
        sizes: elements of a row, scales of a row, slots of a token, the most tokens; bytes of a given row, of a token's
            ids, and of its weights.
        more: whether all ranks are told of more tokens than that; too_many(tokens) raises otherwise.
        call: address of the ProxycclDispatch.
        before: `GivenTokens.filled`.
        renumbering: what makes the array of lost ranks' slots, by the number of tokens, or None; where the kernel
            before takes the address of the ids, that array's, and the number of slots; and where it puts the new ids.
        clearing: address of the ProxycclStreamStep that clears a table of rows before they are received, or 0; and the
            table's number in ProxycclExpertLayout.
        phases: of a whole call and of its halves.
        descriptor: its type; `missing` of a new one; its owner; what numbers dispatches; its `Tables`, what makes their
            array, and the address of their offsets; what tells the address of an array that is not torch's.
        rows: how many the output has, or -1 if that is not known; whether kernels count them; where among the tables.
        scales: bytes of a row's scales; see scale_column of ProxycclDispatch.
        makers: of the output's rows, scales and weights; None for those that there are not.
        begun: called as begun(like, stream, given) in `begin`; it returns the output buffer.
        receive: called as receive(sent, stream) for second halves where the number of rows was not known.
        buffers: where the first output buffer begins, the bytes of each, and where scales begin in one; zeros for none.
    """

    def __new__(
        cls,
        issuer: tuple[Any, ...],
        first: tuple[Any, ...],
        second: tuple[Any, ...],
        kinds: tuple[Any, ...],
        sizes: tuple[int, ...],
        more: tuple[bool, Callable[[int], object] | None],
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
        receive: Callable[[Any, Any], Any] | None,
        buffers: tuple[int, int, int],
        /,
    ) -> DispatchForm: ...
    def run(self, x: Any, ids: Any, weight: Any, scatter: Any, stream: Any, /) -> Any:
        """Makes a call whose number of rows is known. Returns its rows, their weights and the descriptor."""
    def send(self, x: Any, ids: Any, weight: Any, scatter: Any, stream: Any, /) -> SentDispatch | None:
        """Makes the first half of a call."""
    def begin(self, x: Any, ids: Any, weight: Any, scatter: Any, stream: Any, /) -> Any:
        """Fills in a call and makes its descriptor, which it returns; `issue` follows."""
    def store(self, x: Any, ids: Any, weight: Any, scatter: Any, stream: Any, /) -> Any:
        """Makes a call whose rows go to an output buffer. Returns the descriptor, the buffer and the weights."""
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
        """Issues phases of a call that was filled in, with room for rows and the addresses of rows, scales, weights."""
    def fill(self, x: Any, tokens: int, /) -> bool | None:
        """Fills in this many tokens for `issue`. None if they are of other kinds."""
    def stream(self, x: Any, given: Any, /) -> Any:
        """The stream of a call."""

class SentDispatch:
    """A dispatch whose first half is queued.

    Attributes:
        desc: of the dispatch; filled when its rows are received.
        stream: of the first half.
        output: itself; None if the number of rows is not known yet.
        rows, weights: of the output.
        owners: the arrays that kernels use.
        recorded: the caller's tokens and weights, if a library records the call.
    """

    desc: Any
    stream: Any
    output: Any
    rows: Any
    weights: Any
    owners: tuple[Any, ...]
    recorded: tuple[Any, ...]
    def receive(self, stream: Any, /) -> Any:
        """Makes the second half on a stream. Returns the rows, their weights and the descriptor."""

class CombineForm:
    """The form of a combine, whose arguments stay packed (combine_form.py); see `DispatchForm`.

    Args:
        issuer: `CallForm.issuer`.
        first, second: `CallForm.prepared`, of the whole call or its first half, and of the second half.
        after_copy: the same for a whole call after a copy of its rows; None if there is none.
        kinds: `kind_of` the rows, their weights, the weights of slots, the ids that order sums, and two arrays with
            which sums begin.
        sizes: elements of a row, slots of a token, bytes of a row; with padded rows experts of a rank and rows of each,
            else 0 and 0; and the number of arrays with which sums begin.
        halves: whether the call is made in two halves.
        call: address of the ProxycclCombine.
        buffers: numbers of output buffers by address, or None; the one that other rows pass, or 0; its address; and the
            address of the copy's ProxycclStreamStep.
        context: the owner of descriptors.
        output: output(tokens) returns a function that makes outputs of that many tokens; and a function that returns
            the address of an array that is not torch's.
        checks: check_desc(desc) raises for a descriptor that can't be combined; check_output(x, desc, out) returns
            `out` and its address or raises.
    """

    def __new__(
        cls,
        issuer: tuple[Any, ...],
        first: tuple[Any, ...],
        second: tuple[Any, ...],
        after_copy: tuple[Any, ...] | None,
        kinds: tuple[Any, ...],
        sizes: tuple[int, ...],
        halves: bool,
        call: int,
        buffers: tuple[Any, ...],
        context: Any,
        output: tuple[Any, ...],
        checks: tuple[Any, Any],
        /,
    ) -> CombineForm: ...
    def start(
        self,
        x: Any,
        desc: Any,
        weights: Any,
        topk_weights: Any,
        out: Any,
        stream: Any,
        order_ids: Any,
        added: tuple[Any, ...],
        /,
    ) -> Any:
        """Makes a call or its first half. Returns the result, or a `SentCombine`."""

class SentCombine:
    """A combine whose first half is queued.

    Attributes:
        desc: of the dispatch.
        stream: of the first half.
        x: the rows.
        recorded: the caller's rows and weights, if a library records the call.
    """

    desc: Any
    stream: Any
    x: Any
    recorded: tuple[Any, ...]
    def output(self, out: Any, /) -> tuple[Any, int]:
        """`out`, or a new array, and its address. Raises ArgumentError if it does not fit."""
    def receive(self, output: Any, target: int, stream: Any, /) -> Any:
        """Makes the second half on a stream. Returns the output."""
