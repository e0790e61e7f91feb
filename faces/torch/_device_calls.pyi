"""The types of the extension module in call_issuer.c and queued_call.c."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

ADDED_BETWEEN: int
"""The number of marked calls that a flow records before it forgets the calls that have ended; also the number of calls
on the current stream that share one mark.
"""

class StreamMark:
    """A point in a stream, marked by an event. The event is reused when the mark is freed. Calling a mark calls
    `query`.
    """

    def __call__(self) -> bool: ...
    def query(self) -> bool:
        """Whether the stream has passed the mark. May be called while any thread captures a graph."""
    def hold(self, stream: int, /) -> None:
        """Makes later work of the stream with this handle wait for the mark."""

class Owner(Protocol):
    """The state of a process group on a GPU (`GroupOnGpu`)."""

    device: torch.device
    current: Callable[[], int]
    check: Callable[[], None]

    def torch_stream(self, handle: int) -> Any: ...
    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None: ...

class Gpu:
    """A GPU for the calls of one process group. Streams are passed as handles.

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
        """Marks the stream's current end. Raises DriverError, for example after the device's context is lost."""

class QueuedCall:
    """A call that is queued on a stream of a GPU. The object keeps the call's tensors alive; if it is freed before
    `hold`, torch's allocator is told that the stream uses the tensors' memory.

    Args:
        x, out: the input and the output: each a tensor or a sequence of tensors.
        keeps: whether torch's allocator is told that the stream uses the tensors' memory.
        blocks: whether a wait for the call also blocks the CPU until the call has ended.
        source: the rank that a receive receives from; -1 for other calls.

    Attributes:
        mark: the call's end; None before `mark_end`.
        error: the error that kept the call from being queued, or its end from being marked; None without an error.
        future: the Work's future.
    """

    gpu: Gpu
    mark: StreamMark | None
    error: BaseException | None
    future: Any
    source: int
    stream: int
    blocks: bool

    def __new__(cls, gpu: Gpu, x: Any, out: Any, stream: int, keeps: bool, blocks: bool, source: int) -> QueuedCall: ...
    def mark_end(self) -> None:
        """Marks the stream's current end as the end of the call."""
    def check(self) -> None:
        """Raises `error` if it is set, or the error that ended the group."""
    def hold(self) -> None:
        """Makes torch's current stream wait for the call. Raises the errors of `check`."""
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""

class CallIssuer:
    """Issues the calls of one group on one GPU that have a kept form.

    Args:
        make_call: `Calls.call_kept` or `FlowCalls.call_borrowed`.
        process: the group's process id; a fork's child issues nothing.
        own: the group's own stream.
        log: called as log((number, name, mark)) for a call outside graph capture. The mark is at the call's end; None
            for most calls on the current stream.
        forget: called once in several calls with marks, to forget the calls that have ended.
        work: makes an empty Work, whose `_unwaited` is None; its `_call` is then set to the `QueuedCall`.
        hand_out: called with a call's Work; returns the Work for torch.
        source: the rank that receives receive from; -1 for other calls.
        blocks: whether every call has a Work, and a wait for the Work also blocks the CPU until the call has ended.

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
        """Issues a call, or one call for each tensor of a list: on the current stream if torch's options say that the
        call is synchronous, else on the group's own stream, which first waits for the current stream.

        Args:
            x, out: the input and the output: two tensors, or two lists of equal length.
            attribute: the name of the attribute of torch's options, an operator or a number, that selects an entry of
                `named`; None if `named` is not a dict.
            named: the call's name and its options for `make_call`; with `attribute`, a dict of such pairs, by the
                number or by the number of the operator's kind.

        Returns:
            The Work, or None for a synchronous call, unless `blocks` is set. If only the first calls of a list were
            issued, their number and their Work. NotImplemented if none was issued.
        """
