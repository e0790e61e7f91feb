"""The reductions all_reduce, reduce and reduce_scatter. A reduce is an all_reduce whose result only the root keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct

from proxyccl.channels.arguments import flat_view, input_view, share_shape
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.by_proxy import rounds
from proxyccl.channels.collectives.collective import Call, Collective, Options
from proxyccl.channels.collectives.collectives import WIDE_PARTS_BYTES, Collectives
from proxyccl.channels.collectives.reduce_schedules import all_reduce_steps, reduce_scatter_steps
from proxyccl.channels.collectives.request import CtaPolicy, Request
from proxyccl.channels.collectives.selection import PACKET_ALGORITHMS, sends_through_pinned_memory
from proxyccl.channels.collectives.table import (
    ALL_REDUCE_KERNELS,
    COLLECTIVES,
    LINE_KERNELS,
    NARROW_FLOAT16,
    WIDEN_FLOAT16,
    require_reducible,
)
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.group import Group
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DTYPES
from proxyccl.device.kernel import Launch
from proxyccl.device.stream_operations import StreamOperations

_BetweenStep = TypeVar("_BetweenStep")
_MOST_SCHEDULED_RANKS = 128
"""The most ranks for which schedules are used. Schedules need channels to all ranks and ids for all ranks' memory, and
a proxy has enough channels and ids for about 170 ranks.
"""


class _AllReduce(Collective):
    name = "all_reduce"
    reduces = in_place = True

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        chosen = collectives.choose(self.table, call.request, call.source.dtype, call.nbytes)
        return collectives.launchable(steps_of_all_reduce(collectives, call, chosen))


ALL_REDUCE = _AllReduce()
"""See `Communicator.all_reduce`."""


def steps_of_all_reduce(collectives: Collectives, call: Call, chosen: str) -> Sequence[Step]:
    """Returns the steps that a stream takes for an all_reduce by the algorithm `chosen`."""
    group, source, target, op = collectives.group, call.source, call.target, call.op
    assert op is not None
    policy = call.request.cta_policy
    if chosen == "hierarchical":
        return _steps_of_hierarchy(collectives, source, target, op, policy)
    team = collectives.team()
    if chosen in PACKET_ALGORITHMS and team.packets is None:
        chosen = "two_shot"
    if chosen in ("two_shot", "proxy") and collectives.goes_by_schedule(chosen):
        by_proxy, ranks = collectives.by_proxy(), range(group.world_size)
        return all_reduce_steps(by_proxy, source, target, op, ranks, len(ranks))
    if chosen == "two_shot":
        return [_prepare_two_shot(group, team, source, target, op, policy, reached=call.reached)]
    kernel, arrays = ALL_REDUCE_KERNELS[chosen], (source.ptr, target.ptr, source.size)
    if chosen in PACKET_ALGORITHMS and team.packets is not None:
        launch = team.packets.launch(chosen, source.dtype, source.size, policy)
        kernel = LINE_KERNELS[chosen] if launch.lines else kernel
        shipped = kernel.load(group.runtime, source.dtype.name, op)
        return [shipped.prepare(launch.blocks, launch.threads, launch.parameter, *arrays)]
    shipped = kernel.load(group.runtime, source.dtype.name, op)
    return [shipped.prepare(team.grid(source.nbytes, policy), team.threads, team.parameter(), *arrays)]


def _prepare_two_shot(
    group: Group,
    team: Team,
    source: ArrayView,
    target: ArrayView,
    op: str,
    policy: CtaPolicy,
    *,
    reached: bool = False,
    divisor: int | None = None,
) -> Launch:
    kernel, dtype = ALL_REDUCE_KERNELS["two_shot" if team.all_mapped else "proxy"], source.dtype
    loadable = source.ptr == target.ptr and source.ptr % 16 == 0
    blocks, parameter = team.pipeline(
        source.size, dtype.itemsize, policy, reached=reached, loadable=loadable, divisor=divisor
    )
    shipped = kernel.load(group.runtime, dtype.name, op)
    return shipped.prepare(blocks, team.threads, parameter, source.ptr, target.ptr, source.size)


def _one_round(
    group: Group, team: Team, op: str, source: ArrayView, target: ArrayView, divisor: int | None = None
) -> Launch:
    """Returns the launch that reduces an array among a team's ranks by one exchange of data."""
    shipped = ALL_REDUCE_KERNELS["proxy"].load(group.runtime, target.dtype.name, op)
    return shipped.prepare(1, team.threads, team.parameter(divisor=divisor), source.ptr, target.ptr, target.size)


def part_of(view: ArrayView, first: int, count: int) -> ArrayView:
    """Returns a view of `count` elements of an array, from the element `first` on."""
    ptr = view.ptr + first * view.dtype.itemsize
    return ArrayView(ptr, (count,), view.dtype, view.device, view.writable, view.owner)


def _steps_of_hierarchy(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Sequence[Step]:
    group, topology, dtype = collectives.group, collectives.group.topology, source.dtype
    # A node's sum or product of float16 may be outside the range of float16 even if the sum or product of all nodes is
    # not. An average does not overflow, because nodes compute averages instead of sums if a sum may not fit. bfloat16
    # does not overflow early, because it has the range of float32.
    wide = dtype.name == "float16" and op in ("sum", "prod")
    averages_parts = op == "avg" and dtype.accumulator_itemsize > dtype.itemsize
    divisor = topology.node_count if averages_parts else group.world_size
    partial = "sum" if op == "avg" and not averages_parts else op
    if _reduces_by_schedule(collectives, source.size * DTYPES["float32"].itemsize if wide else source.nbytes):
        by_proxy = collectives.by_proxy()
        rails = [members[topology.local_rank] for members in topology.node_members()]

        def reduce_rails(part: ArrayView) -> Sequence[Step]:
            return all_reduce_steps(by_proxy, part, part, op, rails, divisor)

        def is_short(nbytes: int) -> bool:
            return nbytes <= by_proxy.memories.pinned_bytes

        by_schedule = _Levels[Step](collectives, partial, policy, is_short, reduce_rails, reduce_rails)
        return by_schedule.steps(source, target, wide=wide)
    _, across = collectives.levels()

    def reduce_whole(part: ArrayView) -> Sequence[Launch]:
        return [_one_round(group, across, op, part, part, divisor)]

    def reduce_share(part: ArrayView) -> Sequence[Launch]:
        return [_prepare_two_shot(group, across, part, part, op, policy, divisor=divisor)]

    levels = _Levels[Launch](collectives, partial, policy, across.takes_one_crossing, reduce_whole, reduce_share)
    return levels.steps(source, target, wide=wide)


def _reduces_by_schedule(collectives: Collectives, nbytes: int) -> bool:
    """Returns whether a hierarchical all_reduce of this many bytes uses schedules, instead of kernels, between the
    nodes. A kernel that waits for a proxy's copies would delay these copies. Kernels that send short data through
    pinned memory are faster than schedules.
    """
    group, topology = collectives.group, collectives.group.topology
    if group.world_size > _MOST_SCHEDULED_RANKS:
        return False
    sent = nbytes // topology.local_world_size * (topology.node_count - 1)
    through_pinned = sends_through_pinned_memory(group)
    too_long = through_pinned and sent > group.runtime.launch_defaults.pinned_kernel_bytes
    return too_long or collectives.goes_by_schedule("hierarchical")


class _Levels(Struct, Generic[_BetweenStep], frozen=True):
    """The levels of a hierarchy. Each share is reduced inside the node, then between the ranks with the same local rank
    on all nodes, then gathered inside the node, so the data of a node crosses to the other nodes only once.

    If the data fits one round, every rank reduces all of it, inside the node and then between nodes. Reducing all data
    saves a second exchange, which would take longer than the transfer of such short data. If longer data can't be
    divided evenly, every rank also reduces all elements that are left over.
    """

    collectives: Collectives
    partial: str  # the operator inside a node
    policy: CtaPolicy
    is_short: Callable[[int], bool]  # tells whether a number of bytes fits one round between the nodes
    # Returns the steps that reduce an array between the nodes, in place; all ranks of a node have the same array.
    reduce_whole: Callable[[ArrayView], Sequence[_BetweenStep]]
    # Returns the steps that reduce this rank's share between the nodes, in place.
    reduce_share: Callable[[ArrayView], Sequence[_BetweenStep]]

    def steps(self, source: ArrayView, target: ArrayView, *, wide: bool) -> list[Launch | _BetweenStep]:
        """Returns the steps for a call's elements. If `wide`, pieces are reduced in float32 and rounded once."""
        if not wide:
            return self._steps(source, target)
        runtime, (inside, _) = self.collectives.group.runtime, self.collectives.levels()
        widen, narrow = (kernel.load(runtime) for kernel in (WIDEN_FLOAT16, NARROW_FLOAT16))
        memory, float32 = self.collectives.wide_parts(), DTYPES["float32"]
        steps: list[Launch | _BetweenStep] = []
        for begin, count in rounds(source.size, WIDE_PARTS_BYTES // float32.itemsize):
            part = ArrayView(memory.ptr, (count,), float32, source.device, True, memory)
            grid = inside.grid(part.nbytes, self.policy)
            first, last = part_of(source, begin, count).ptr, part_of(target, begin, count).ptr
            steps += [
                widen.prepare(grid, inside.threads, first, part.ptr, count),
                *self._steps(part, part),
                narrow.prepare(grid, inside.threads, part.ptr, last, count),
            ]
        return steps

    def _steps(self, source: ArrayView, target: ArrayView) -> list[Launch | _BetweenStep]:
        group, topology, dtype = self.collectives.group, self.collectives.group.topology, source.dtype
        inside, _ = self.collectives.levels()

        def whole(begin: int) -> list[Launch | _BetweenStep]:
            count = source.size - begin
            part = part_of(target, begin, count)
            return [
                _one_round(group, inside, self.partial, part_of(source, begin, count), part),
                *self.reduce_whole(part),
            ]

        if self.is_short(source.nbytes) and inside.takes_one_crossing(source.nbytes):
            return whole(0)
        share = source.size // topology.local_world_size
        even = share * topology.local_world_size
        steps: list[Launch | _BetweenStep] = []
        if share:
            own, team = part_of(target, topology.local_rank * share, share), inside.parameter()
            scatter = COLLECTIVES["reduce_scatter"][0].load(group.runtime, dtype.name, self.partial)
            gather = COLLECTIVES["all_gather"][0].load(group.runtime)
            grids = inside.grid(even * dtype.itemsize, self.policy), inside.grid(own.nbytes, self.policy)
            steps += [
                scatter.prepare(grids[0], inside.threads, team, source.ptr, own.ptr, share),
                *self.reduce_share(own),
                gather.prepare(grids[1], inside.threads, team, own.ptr, target.ptr, own.nbytes),
            ]
        return steps + whole(even) if even < source.size else steps


DROPPED = ()
"""Passed as the output on the ranks that drop the result of a reduce."""


class _Reduce(_AllReduce):
    name = "reduce"
    table = "all_reduce"
    rooted = True

    def lent(self, launchable: Launchable) -> int:
        return -1  # ranks that drop the result have no output array

    def check(self, collectives: Collectives, x: Any, out: Any, options: Options, request: Request) -> Call:
        if not isinstance(out, tuple):
            return super().check(collectives, x, out, options, request)
        read = flat_view(collectives.group, x, "x", in_bytes=False) if options.flat else None
        source = read or input_view(collectives.group, x, "x")
        require_reducible(source, options.op)
        scratch = collectives.scratch(source.nbytes)
        target = ArrayView(scratch.ptr, source.shape, source.dtype, source.device, True, scratch)
        return Call(x, out, source, target, options.op, options.root, request)


REDUCE = _Reduce()
"""See `Communicator.reduce`. For short arrays, no shipped kernel sends less data than an all_reduce."""


class _ReduceScatter(Collective):
    name = "reduce_scatter"
    reduces = True

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        return share_shape(group, source)

    def lent(self, launchable: Launchable) -> int:
        # Peers' kernels access neither the input nor the output. If the call is a schedule, proxies send from the
        # input.
        return 0 if isinstance(launchable, StreamOperations) else -1

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        return collectives.launchable(self.steps(collectives, call))

    def steps(self, collectives: Collectives, call: Call) -> Sequence[Step]:
        """Returns the steps that a stream takes for a call."""
        group, source, target, op = collectives.group, call.source, call.target, call.op
        assert op is not None
        algorithm = collectives.choose(self.name, call.request, source.dtype, call.nbytes)
        if collectives.goes_by_schedule(algorithm):
            return reduce_scatter_steps(collectives.by_proxy(), source, target, op)
        team, kernel = collectives.team(), COLLECTIVES[self.name][0]
        blocks, parameter = team.scatter(target.size, source.dtype.itemsize, call.request.cta_policy)
        shipped = kernel.load(group.runtime, source.dtype.name, op)
        return [shipped.prepare(blocks, team.threads, parameter, source.ptr, target.ptr, target.size)]


REDUCE_SCATTER = _ReduceScatter()
"""See `Communicator.reduce_scatter`."""
