"""The extension that prepared_calls.c makes."""

from collections.abc import Callable
from typing import Any, Protocol

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
        """Keeps a call, in the place of another that falls on it. Nothing is kept of arrays that can't be described.

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
