"""A collective as an execution plan runs it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxyccl.channels.arguments import input_view, output_view, overlap, refuse_partial_overlap
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import Call, Collective, Options
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.execution_plans.executor import Reached
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError


class Planned(Collective):
    """A collective that a plan runs. Arrays may be registered memory, which peers reach in place.

    Args:
        plan: the plan.
        collective: the collective that it implements.
        registered_x, registered_out: the caller's input and output where these are registered memory.
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
        """The shape of a new array for the result."""
        gpu, lead = self._plan.document.gpus[0], source.shape[0] if source.shape else 1
        if lead * gpu.output_chunks % gpu.input_chunks:
            raise ArgumentError(
                "out", f"expected an array: {gpu.output_chunks}/{gpu.input_chunks} of {lead} rows are not whole rows"
            )
        return (lead * gpu.output_chunks // gpu.input_chunks, *source.shape[1:])

    def new_output(self, collectives: Collectives, x: Any) -> Any:
        """See `Collective.new_output`."""
        (array, _), _ = plain_arrays(x, None)
        return super().new_output(collectives, array)

    def check(self, collectives: Collectives, x: Any, out: Any, options: Options, request: Request) -> Call:
        """See `Collective.check`. An output may have any shape with as many elements as the plan writes."""
        group = collectives.group
        collectives.execution_plans.require_executable(self._plan)
        source = input_view(group, x, "x")
        _, target = output_view(group, out, x, source, None)
        refuse_partial_overlap(group.rank, source, target)
        refusal = self._plan.refusal(source.size, target.size, source.dtype, options.op)
        if refusal is not None:
            raise refusal
        return Call(x, out, source, target, options.op, options.root, request)

    def share(self, ranks: int, call: Call) -> int:
        """See `Collective.share`."""
        return call.source.size

    def entry(self, ranks: int, call: Call) -> CollectiveCall:
        """See `Collective.entry`."""
        registered = tuple(memory.digest for memory in self._reached(call).values())
        return replace(super().entry(ranks, call), shape=call.source.shape, registered=registered)

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """See `Collective.launch`. All ranks call it together."""
        return collectives.execution_plans.prepare(self._plan, call.source, call.target, self._reached(call))

    def _reached(self, call: Call) -> Reached:
        """The registered arrays that peers reach in place; the same on all ranks, because the call log compares them.

        Where a plan works in place, that is one array which holds input and output. Where it does not, an input inside
        the output is not one of them: the plan would overwrite it.
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
    """The arrays of a plan's call, and the registered memory among them, whose arrays take its places.

    Raises as `RegisteredMemory.require_current`.
    """
    registered = tuple(each if isinstance(each, RegisteredMemory) else None for each in (x, out))
    for memory in registered:
        if memory is not None:
            memory.require_current()
    arrays = (each if memory is None else memory.array for each, memory in zip((x, out), registered, strict=True))
    return tuple(arrays), registered  # type: ignore[return-value]  # of two each


def planned(plan: ExecutionPlan, collective: Collective) -> Planned:
    """A collective as a plan runs it. Raises ArgumentError if it is a plan of another collective."""
    if collective is not EXECUTE:
        plan.require_collective(collective.name, "algorithm")
    return Planned(plan, collective)


class _Execute(Collective):
    """A plan's own program, which is not one of the collectives."""

    name = "execute"

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        raise ArgumentError("plan", "expected an ExecutionPlan")


EXECUTE = _Execute()
"""See `Communicator.execute`."""

register_names(EXECUTE.name)
