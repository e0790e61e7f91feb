"""The types of the extension module in call_issuer.c and queued_call.c."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

ADDED_BETWEEN: int
"""A period, in calls: one in this many synchronous calls records an event, and each time that this many calls with an
event have been logged, the calls that have ended are removed from the log of calls in progress.
"""

class StreamMark:
    """A point in a stream, marked by an event. The event is reused when the mark is freed. Calling a mark is the same
    as calling its `query`.
    """

    def __call__(self) -> bool: ...
    def query(self) -> bool:
        """Returns whether the stream has passed the mark. May be called even while a thread captures a graph."""
    def hold(self, stream: int, /) -> None:
        """Makes later work on the stream with the handle `stream` wait for the mark."""

class Owner(Protocol):
    """The state of a process group on a GPU (`GroupOnGpu`)."""

    device: torch.device
    current: Callable[[], int]
    check: Callable[[], None]

    def call_on(self, handle: int, function: Callable[..., object], *arguments: Any) -> None: ...
    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None: ...

class Gpu:
    """The state of a GPU for the calls of one process group. Streams are passed as handles.

    Args:
        order, idle, more, finish: from `StreamOrder.in_c`.
        owner: the group's state on the GPU.
    """

    owner: Owner

    def __new__(
        cls,
        order: int,
        idle: list[int],
        more: Callable[[], int],
        finish: Callable[[int, str, tuple[int, ...]], None],
        owner: Owner,
    ) -> Gpu: ...
    def mark(self, stream: int, /) -> StreamMark:
        """Returns a new mark after the work that is queued on the stream now. Raises DriverError, for example if the
        device's context is lost.
        """

class QueuedCall:
    """A call that is queued on a stream of a GPU. The object keeps the call's tensors alive; if it is freed before
    `hold`, torch's allocator is told that the stream uses the tensors' memory.

    Args:
        x, out: the input and the output: each a tensor or a sequence of tensors.
        captured: whether a graph captures the call.
        blocks: whether a wait for the call also blocks the CPU until the call has ended.
        source: the rank that a receive receives from; -1 for other calls.

    Attributes:
        mark: the mark at the call's end; None before `mark_end`.
        error: the error because of which the call was not queued or its end not marked; None without an error.
        future: the Work's future; None until the program asks for the future.
    """

    gpu: Gpu
    mark: StreamMark | None
    error: BaseException | None
    future: Any
    source: int
    stream: int
    blocks: bool

    def __new__(
        cls, gpu: Gpu, x: Any, out: Any, stream: int, captured: bool, blocks: bool, source: int
    ) -> QueuedCall: ...
    def mark_end(self) -> None:
        """Sets `mark` to a new mark after the work that is queued on the stream now, which is the call's end."""
    def check(self) -> None:
        """Raises `error` if it is set; otherwise raises the error that ended the group, if the group has failed."""
    def hold(self) -> None:
        """Makes torch's current stream wait for the call. Raises the errors of `check`."""
    def outputs(self) -> list[torch.Tensor]:
        """Returns the tensors that the call writes."""

class CallIssuer:
    """Issues calls of one process group on one GPU in C: those whose form (prepared launch) is kept.

    Args:
        make_call: `Calls.call_kept` or `FlowCalls.call_borrowed`.
        process: the id of the group's process; in a fork's child the issuer declines every call.
        own: the handle of the stream for asynchronous calls.
        numbers: yields the number of each call in its group.
        log: called as log((number, name, mark)) for each call outside graph capture. `mark` is the mark at the call's
            end, which is None for most calls on the current stream.
        forget: called after every ADDED_BETWEEN calls with a mark, to forget the calls that have ended.
        work: makes an empty Work. Its `_call` is then set to the `QueuedCall`, its `_unwaited` to None.
        hand_out: called with a call's Work; returns the Work that `issue` returns.
        source: the peer, if the calls are receives from one peer; -1 for other calls.
        blocks: whether even a synchronous call has a Work, and a wait for the Work blocks the CPU until the call has
            ended.

    Attributes:
        count: the number of calls issued.
    """

    count: int

    def __new__(
        cls,
        gpu: Gpu,
        make_call: Callable[..., bool],
        process: object,
        own: int,
        numbers: Iterator[int],
        log: Callable[[tuple[int, str, StreamMark | None]], object],
        forget: Callable[[], object],
        work: Callable[[], Any],
        hand_out: Callable[[Any], Any],
        source: int,
        blocks: bool,
    ) -> CallIssuer: ...
    def issue(self, x: Any, out: Any, opts: Any, attribute: str | None, named: Any, /) -> Any:
        """Issues a call, or one call for each tensor of a list. If torch's options say that the call is synchronous, it
        runs on the current stream; else it runs on the stream `own`, which first waits for the current stream.

        Args:
            x, out: the input and the output: two tensors, or two lists of equal length.
            opts: torch's options, or None.
            attribute: the name of an attribute of `opts`, whose value selects an entry of `named`; None if `named` is
                not a dict. The value is a number, or an operator, which stands for the number of its kind.
            named: the pair of the call's name and its options for `make_call`; with `attribute`, a dict of such pairs
                by the attribute's value.

        Returns:
            The Work; None for a synchronous call, unless `blocks` is set. If only the first calls of a list were
            issued, a tuple of their number and their Work. NotImplemented if no call was issued.
        """
