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
    is not known.

    Args:
        identified: a type of arrays without buffers; types derived from it have no part in this.
        identity: the name of the attribute.
        lock: held during a call.
        refuse: called as refuse(status, kept) for a call whose status is not 0; it raises the exception.
    """

    def __new__(
        cls, identified: type, identity: str, lock: _Lock, refuse: Callable[[int, Any], object]
    ) -> PreparedCalls: ...
    def set_stream(self, stream: int) -> None:
        """The stream of the calls from now on, by its handle; with 0 none is repeated."""
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
    ) -> None:
        """Keeps a call, in the place of another that falls on it. Nothing is kept of arrays that can't be described.

        Args:
            x, out: its arrays, to which no reference is kept.
            options: at most six, known by identity.
            issue: address of proxyccl_calls_issue (calls.h), or of a function like it.
            callers, call, launch: what that is given, by address.
            kept: what must live as long as these; `refuse` is given it.
        """
    def repeat(self, x: object, out: object, options: tuple[object, ...]) -> bool:
        """Issues a call that is kept. False if it is not, or there is no stream. Raises what `refuse` raises."""
    def clear(self) -> None:
        """Forgets all calls."""
