"""A collective as an execution plan runs it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxyccl.channels.arguments import input_view, new_like, output_view, overlap, refuse_partial_overlap
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.execution_plans.executor import Reached
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group
from proxyccl.channels.launches import Launchable
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError


class Planned(Collective):
    """A collective that a plan runs. Arrays may be registered memory, which peers reach in place.

    Args:
        plan: the plan.
        collective: the collective that it implements.
    """

    copies_alone = False

    def __init__(self, plan: ExecutionPlan, collective: Collective) -> None:
        gpu = plan.document.gpus[0]
        self._plan = plan
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

    def check(
        self, collectives: Collectives, x: Any, out: Any, op: str | None, root: int | None, request: Request
    ) -> Call:
        """See `Collective.check`. An output may have any shape with as many elements as the plan writes."""
        group, given = collectives.group, _array(x)
        collectives.execution_plans.require_executable(self._plan)
        source = input_view(group, given, "x")
        result = new_like(group, source, self.shape(group, source)) if out is None else out
        _, target = output_view(group, _array(result), given, source, None)
        refuse_partial_overlap(group.rank, source, target)
        refusal = self._plan.refusal(source.size, target.size, source.dtype, op)
        if refusal is not None:
            raise refusal
        return Call(x, result, source, target, op, root, request)

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
        plan, x, out = self._plan, call.x, call.result
        if plan.in_place:
            whole = isinstance(x, RegisteredMemory) and (out is x or _array(out) is x.array)
            return {"i": x, "o": x} if plan.reached and whole else {}
        given: Reached = {}
        if isinstance(x, RegisteredMemory) and "i" in plan.reached and not overlap(call.source, call.target):
            given["i"] = x
        if isinstance(out, RegisteredMemory) and "o" in plan.reached:
            given["o"] = out
        return given


def _array(x: Any) -> Any:
    if isinstance(x, RegisteredMemory):
        x.require_current()
        return x.array
    return x


class _Execute(Collective):
    """A plan's own program, which is not one of the collectives."""

    name = "execute"

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        raise ArgumentError("plan", "expected an ExecutionPlan")


EXECUTE = _Execute()
"""See `Communicator.execute`."""

register_names(EXECUTE.name)
