"""The extension that call_issuer.c and queued_call.c make."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

ADDED_BETWEEN: int
"""Calls of a flow with marks that are recorded as in progress before those that have ended are forgotten; and calls on
the current stream of which one has a mark."""

class StreamMark:
    """The point in a stream that an event marks. The event is used again when the mark is freed.

    Called, it is `query`.
    """

    def __call__(self) -> bool: ...
    def query(self) -> bool:
        """Whether the stream has got past it. May be asked while any thread captures a graph."""
    def hold(self, stream: int, /) -> None:
        """Makes later work of the stream with this handle wait for it."""

class Owner(Protocol):
    """One process group's part on a GPU (`GroupOnGpu`)."""

    device: torch.device
    current: Callable[[], int]
    check: Callable[[], None]

    def torch_stream(self, handle: int) -> Any: ...
    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None: ...

class Gpu:
    """A GPU as the calls of one process group use it. Streams are known by their handles.

    Args:
        order, idle, more, finish: of `StreamOrder.in_c`.
        owner: the group's part there.
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
        """Marks the stream's current end. Raises DriverError, among others once the device's context is lost."""

class QueuedCall:
    """A call that is queued on a stream of a GPU. With it go the tensors that it uses; if it is freed before `hold`,
    their memory is marked as used by the stream.

    Args:
        x, out: input and output: a tensor each, or a sequence of them.
        keeps: whether to mark the memory as used.
        blocks: whether a wait for it waits for its end on the CPU, too.
        source: the rank that sends to it; -1 for none.

    Attributes:
        mark: the call's end; None before `mark_end`.
        error: the error that kept it from its stream, or `mark_end` from marking; None without one.
        future: for the Work.
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
        """Marks the end of the stream as the call's."""
    def check(self) -> None:
        """Raises `error`, or the error that ended the group."""
    def hold(self) -> None:
        """Makes torch's current stream wait for the call. Raises as `check`."""
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that it writes."""

class CallIssuer:
    """Issues one group's calls on one GPU, as far as their forms are kept.

    Args:
        make_call: `Calls.call_kept` or `FlowCalls.call_borrowed`.
        process: of the group: a fork's child issues nothing.
        own: the group's own stream.
        log: called as log((number, name, mark)) for a call that no graph captures: the mark of its end, or None for
            most calls on the current stream.
        forget: called once in several calls with marks, to forget those that have ended.
        work: makes an empty Work for a `QueuedCall`, which is then stored as its `_call`; its `_unwaited` is None.
        hand_out: called with the Work of a call; it returns that, for torch.
        source: the rank that sends to the calls; -1 for none.
        blocks: whether every call has a Work, and a wait for it waits for its end on the CPU, too.

    Attributes:
        count: how many calls were issued.
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
        """Issues a call, or one for each of a list's tensors: on the current stream if torch's options say that it is
        synchronous, else on the group's own, which first follows the current one.

        Args:
            x, out: input and output: tensors, or lists of as many.
            attribute: of torch's options, that tells calls apart: an operator or a number; None if nothing does.
            named: the call's name and the options for `make_call`; with `attribute` a dict of such pairs, by the number
                of the operator's kind, or by the number.

        Returns:
            The Work, which is None for a synchronous call unless that `blocks`. If only the first calls of a list were
            issued, their number and their Work. NotImplemented if none was.
        """
