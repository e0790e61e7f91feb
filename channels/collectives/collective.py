"""The description of a collective: its checks, the shape of its result, and its launches. `run.py` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from msgspec import Struct

from proxyccl.channels.arguments import input_view, output_view, refuse_partial_overlap
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reductions import require_reducible
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.group import Group
from proxyccl.channels.launches import Launchable
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView


class Call(Struct, frozen=True):
    """A call whose arguments were checked.

    Attributes:
        x, result: the caller's input, and the array that holds the result, which may be new.
        source, target: their views.
        op: the operator; None if the collective does not reduce.
        root: the rank; None if the collective has no root.
        request: the callers' request for an algorithm.
    """

    x: Any
    result: Any
    source: ArrayView
    target: ArrayView
    op: str | None
    root: int | None
    request: Request

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
    """

    name: str
    reduces = False
    rooted = False
    in_place = False
    copies_alone = True

    @property
    def table(self) -> str:
        """The name of the collective whose algorithms it uses."""
        return self.name

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        """The shape of the result; by default that of the input. Raises ArgumentError if the input's shape is wrong."""
        return source.shape

    @abstractmethod
    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """Prepares this rank's part of a call. It is kept for the next call with the same arrays."""

    def check(
        self, collectives: Collectives, x: Any, out: Any, op: str | None, root: int | None, request: Request
    ) -> Call:
        """Checks a call's arrays. Makes an array for the result if there is no `out`.

        Raises:
            ArgumentError: an array can't be used, or does not fit.
        """
        group = collectives.group
        source = input_view(group, x, "x")
        if op is not None:
            require_reducible(source, op)
        result, target = output_view(group, out, x, source, self.shape(group, source))
        refuse_partial_overlap(group.rank, source, target)
        return Call(x, result, source, target, op, root, request)

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
