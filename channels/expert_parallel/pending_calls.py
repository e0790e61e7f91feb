"""Calls in two halves between these: the first half is queued."""

from __future__ import annotations

from typing import Any, Protocol

from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.device.runtime import StreamLike


class PendingCall(Protocol):
    """A call whose first half is queued.

    Attributes:
        desc: of the dispatch; filled when its rows are received.
        stream: of the first half.
        recorded: the caller's rows and weights, if a library records the call.
    """

    desc: EPAllToAllLayoutDesc
    stream: StreamLike
    recorded: tuple[Any, ...]


class PendingDispatch(PendingCall, Protocol):
    """A dispatch."""

    @property
    def output(self) -> Any:
        """With a fixed number of rows, the `rows` and `weights` that the call fills and returns; else None."""
        ...

    def receive(self, stream: StreamLike) -> Dispatched:
        """Makes the second half on a stream."""
        ...


class PendingCombine(PendingCall, Protocol):
    """A combine."""

    def output(self, out: Any) -> tuple[Any, Any]:
        """`out`, or a new array, and its place for `receive`. Raises ArgumentError if it does not fit."""
        ...

    def receive(self, output: Any, target: Any, stream: StreamLike) -> Any:
        """Makes the second half on a stream. Returns the output."""
        ...
