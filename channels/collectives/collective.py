"""The description of a collective: its checks, the shape of its result, and its launches. `run.py` makes its calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct

from proxyccl.channels.arguments import flat_view, input_view, new_like, output_view, refuse_partial_overlap
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reductions import require_reducible
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.group import Group
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView


class Options(NamedTuple):
    """The options that tell calls apart besides their arrays, as `Calls` (_calls.pyi) takes them.

    Attributes:
        prepare: prepares a form of the collective.
        op: the operator; None if the collective does not reduce.
        root: the rank; None if the collective has no root.
        algorithm, cta_policy, symmetric: the caller's arguments.
        flat: whether shapes and, unless it reduces, element types do not count, as for torch.distributed.
        registered_x, registered_out: the arrays of an execution plan's call that are registered memory, or None.
    """

    prepare: Callable[..., Any]
    op: Any
    root: int | None
    algorithm: Any
    cta_policy: Any
    symmetric: Any
    flat: bool
    registered_x: Any
    registered_out: Any


class Call(Struct, frozen=True):
    """A call whose arguments were checked.

    Attributes:
        x, result: the caller's input, and the array that holds the result.
        source, target: their views.
        op: the operator; None if the collective does not reduce.
        root: the rank; None if the collective has no root.
        request: the callers' request for an algorithm.
        reached: whether the kernels of all ranks reach the result where it lies.
    """

    x: Any
    result: Any
    source: ArrayView
    target: ArrayView
    op: str | None
    root: int | None
    request: Request
    reached: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the larger of input and output, by which algorithms are chosen."""
        return max(self.source.nbytes, self.target.nbytes)


class Collective(ABC):
    """A collective. A new one has a name, `shape` and `launch`, and a row in `table.py`.

    Attributes:
        name: registered for the call log.
        reduces: whether callers give an operator.
        rooted: whether callers name a root.
        in_place: whether a call without an output overwrites its input.
        copies_alone: whether a single rank only copies the input to the output.
        ranges: start and end of registered memory whose end also ends the forms.
    """

    name: str
    reduces = False
    rooted = False
    in_place = False
    copies_alone = True
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def table(self) -> str:
        """The name of the collective whose algorithms it uses."""
        return self.name

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        """The shape of the result; by default that of the input. Raises ArgumentError if the input's shape is wrong."""
        return source.shape

    @abstractmethod
    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """Prepares this rank's part of a call. Other arrays with the same signature (calls/table.c) may take the places
        of the call's arrays."""

    def new_output(self, collectives: Collectives, x: Any) -> Any:
        """A new array for the result. Raises ArgumentError for an `x` that can't be used, or has a wrong shape."""
        source = input_view(collectives.group, x, "x")
        return new_like(collectives.group, source, self.shape(collectives.group, source))

    def check(self, collectives: Collectives, x: Any, out: Any, options: Options, request: Request) -> Call:
        """Checks a call's arrays.

        Raises:
            ArgumentError: an array can't be used, or does not fit.
        """
        group, op = collectives.group, options.op
        if options.flat:
            source = flat_view(group, x, "x", in_bytes=not self.reduces)
            given = source if out is x else flat_view(group, out, "out", in_bytes=not self.reduces)
            _, target = output_view(group, given, source, source, self.shape(group, source))
        else:
            source = input_view(group, x, "x")
            _, target = output_view(group, out, x, source, self.shape(group, source))
        if op is not None:
            require_reducible(source, op)
        refuse_partial_overlap(group.rank, source, target)
        return Call(x, out, source, target, op, options.root, request)

    def lent(self, launchable: Launchable) -> int:
        """The number of the array that peers store to or load from; -1 if there is none."""
        return 1

    def share(self, ranks: int, call: Call) -> int:
        """Elements that each rank contributes, or that each gets; the same on all ranks."""
        return min(call.source.size, call.target.size)

    def entry(self, ranks: int, call: Call) -> CollectiveCall:
        """The fields on which the ranks must agree."""
        smaller = call.target if call.target.nbytes < call.source.nbytes else call.source
        return CollectiveCall(
            self.name,
            smaller.dtype.name,
            call.op or "sum",
            call.request.name,
            root=call.root or 0,
            count=self.share(ranks, call),
            shape=smaller.shape,
        )
