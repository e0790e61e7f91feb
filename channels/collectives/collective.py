"""The classes that describe collectives: their checks, the shapes of their results, and their launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.channels.arguments import flat_view, input_view, new_like, output_view, overlap, refuse_partial_overlap
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.collectives.table import require_reducible
from proxyccl.channels.execution_plans.executor import Reached
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError


class Options(NamedTuple):
    """The options of a call. `Calls` (_calls.pyi) distinguishes prepared calls by their options and their arrays."""

    prepare: Callable[..., Any]  # prepares a call of the collective
    op: Any  # the operator; None if the collective does not reduce
    root: int | None  # the rank; None if the collective has no root
    # `algorithm`, `cta_policy`, `symmetric`: the caller's arguments.
    algorithm: Any
    cta_policy: Any
    symmetric: Any
    # Whether ranks ignore shapes when they compare their calls, as torch.distributed does, and also ignore element
    # types unless the collective reduces.
    flat: bool
    # `registered_x`, `registered_out`: the input and output of an execution plan's call, if they are registered memory.
    registered_x: Any
    registered_out: Any


class Call(Struct, frozen=True):
    """A call whose arguments were checked.

    Attributes:
        x, result: the caller's input, and the array that holds the result.
        source, target: views of `x` and `result`.
        op: the operator; None if the collective does not reduce.
        root: the rank; None if the collective has no root.
        request: the algorithm or policy that the callers request.
        reached: whether the kernels of all ranks can access the memory of the result.
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
        """The size in bytes of the input or of the output, whichever is larger; algorithms are chosen by this size."""
        return max(self.source.nbytes, self.target.nbytes)


class Collective(ABC):
    """The base class of collectives. To add a collective, derive a class with a name, `shape` and `launch`, and add a
    row in `table.py`.
    """

    name: str  # the name that the call log shows
    reduces = False  # whether callers pass an operator
    rooted = False  # whether callers pass a root
    in_place = False  # whether a call without an output overwrites its input
    copies_alone = True  # whether a call on a communicator of one rank only copies the input to the output
    # Start and end addresses of registered memory; deregistering it drops the prepared calls that use it.
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def table(self) -> str:
        """The name of the collective whose tables choose this collective's algorithms."""
        return self.name

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        """Returns the result's shape, by default the input's. Raises ArgumentError if the input's shape is wrong."""
        return source.shape

    @abstractmethod
    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """Prepares this rank's part of a call. The launchable must also work for other arrays with the same signature
        (calls/kept_forms.h).
        """

    def new_output(self, collectives: Collectives, x: Any) -> Any:
        """Returns a new array for the result. Raises ArgumentError if `x` can't be used, or has a wrong shape."""
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
            target = output_view(group, given, source, source, self.shape(group, source))
        else:
            source = input_view(group, x, "x")
            target = output_view(group, out, x, source, self.shape(group, source))
        if op is not None:
            require_reducible(source, op)
        refuse_partial_overlap(group.rank, source, target)
        return Call(x, out, source, target, op, options.root, request)

    def lent(self, launchable: Launchable) -> int:
        """Returns the array that peers access: 0 for the input, 1 for the output, -1 for neither."""
        return 1

    def share(self, ranks: int, call: Call) -> int:
        """Returns the number of elements that each rank contributes or gets; the same on all ranks."""
        return min(call.source.size, call.target.size)

    def entry(self, ranks: int, call: Call) -> CollectiveCall:
        """Returns the fields on which the ranks must agree."""
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


class Planned(Collective):
    """A collective that an execution plan runs. Peers access registered memory in place.

    Args:
        registered_x, registered_out: the caller's input and output, if they are registered memory.
    """

    copies_alone = False

    def __init__(
        self,
        plan: ExecutionPlan,
        collective: Collective,
        registered_x: RegisteredMemory | None = None,
        registered_out: RegisteredMemory | None = None,
    ) -> None:
        gpu = plan.document.gpus[0]
        self._plan = plan
        self._registered = registered_x, registered_out
        self.ranges = tuple(
            (memory.ptr, memory.ptr + memory.nbytes) for memory in self._registered if memory is not None
        )
        self.name, self.reduces, self.rooted = collective.name, collective.reduces, collective.rooted
        self.in_place = collective.in_place or (plan.in_place and gpu.input_chunks == gpu.output_chunks)

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        gpu, lead = self._plan.document.gpus[0], source.shape[0] if source.shape else 1
        if lead * gpu.output_chunks % gpu.input_chunks:
            raise ArgumentError(
                "out", f"expected an array: {gpu.output_chunks}/{gpu.input_chunks} of {lead} rows are not whole rows"
            )
        return (lead * gpu.output_chunks // gpu.input_chunks, *source.shape[1:])

    def new_output(self, collectives: Collectives, x: Any) -> Any:
        (array, _), _ = plain_arrays(x, None)
        return super().new_output(collectives, array)

    def check(self, collectives: Collectives, x: Any, out: Any, options: Options, request: Request) -> Call:
        """See `Collective.check`. An output may have any shape with as many elements as the plan writes."""
        group = collectives.group
        collectives.execution_plans.require_executable(self._plan)
        source = input_view(group, x, "x")
        target = output_view(group, out, x, source, None)
        refuse_partial_overlap(group.rank, source, target)
        refusal = self._plan.refusal(source.size, target.size, source.dtype, options.op)
        if refusal is not None:
            raise refusal
        return Call(x, out, source, target, options.op, options.root, request)

    def share(self, ranks: int, call: Call) -> int:
        return call.source.size

    def entry(self, ranks: int, call: Call) -> CollectiveCall:
        registered = tuple(memory.digest for memory in self._reached(call).values())
        return replace(super().entry(ranks, call), shape=call.source.shape, registered=registered)

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """See `Collective.launch`. All ranks call this together."""
        return collectives.execution_plans.prepare(self._plan, call.source, call.target, self._reached(call))

    def _reached(self, call: Call) -> Reached:
        """Returns the registered arrays that peers access in place. The result is the same on all ranks, because the
        call log compares the registrations. For an in-place plan, only an array that holds both input and output is
        returned. For other plans an input that overlaps the output is excluded, because the plan would overwrite the
        input.
        """
        plan, (x, out) = self._plan, self._registered
        if plan.in_place:
            whole = x is not None and (out is x or call.result is x.array)
            return {"i": x, "o": x} if plan.reached and x is not None and whole else {}
        given: Reached = {}
        if x is not None and "i" in plan.reached and not overlap(call.source, call.target):
            given["i"] = x
        if out is not None and "o" in plan.reached:
            given["o"] = out
        return given


def plain_arrays(x: Any, out: Any) -> tuple[tuple[Any, Any], tuple[RegisteredMemory | None, RegisteredMemory | None]]:
    """Returns the arrays of a plan's call, and for each array its registered memory or None.

    Raises as `RegisteredMemory.require_current`.
    """
    registered = tuple(each if isinstance(each, RegisteredMemory) else None for each in (x, out))
    for memory in registered:
        if memory is not None:
            memory.require_current()
    arrays = (each if memory is None else memory.array for each, memory in zip((x, out), registered, strict=True))
    return tuple(arrays), registered  # type: ignore[return-value]  # both tuples have two items


class _Execute(Collective):
    """An execution plan that the user runs by `Communicator.execute`, not as a collective's algorithm."""

    name = "execute"

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        raise ArgumentError("plan", "expected an ExecutionPlan")


EXECUTE = _Execute()
"""See `Communicator.execute`."""

register_names(EXECUTE.name)
