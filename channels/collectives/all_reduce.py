"""all_reduce: the reduction on every rank, by one of several algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.by_proxy import rounds
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import WIDE_PARTS_BYTES, Collectives
from proxyccl.channels.collectives.proxied_kernels import sends_through_pinned_memory
from proxyccl.channels.collectives.reduce_schedules import all_reduce_steps, prepare_all_reduce
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.collectives.selection import PACKET_ALGORITHMS
from proxyccl.channels.collectives.table import (
    ALL_REDUCE_KERNELS,
    COLLECTIVES,
    LINE_KERNELS,
    NARROW_FLOAT16,
    WIDEN_FLOAT16,
)
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.group import Group
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DTYPES, DType
from proxyccl.device.kernel import Launch
from proxyccl.device.stream_operations import StreamOperations

_BetweenStep = TypeVar("_BetweenStep")
_MOST_SCHEDULED_RANKS = 128
"""Schedules have channels to all ranks and ids of their memory, of which a proxy has enough for some 170 ranks."""


class AllReduce(Collective):
    """The reduction on every rank."""

    name = "all_reduce"
    reduces = in_place = True

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        """See `Collective.launch`."""
        group, source, target, op = collectives.group, call.source, call.target, call.op
        assert op is not None
        policy = call.request.cta_policy
        chosen = collectives.choose(self.table, call.request, source.dtype, call.nbytes)
        if chosen == "hierarchical":
            return _prepare_hierarchy(collectives, source, target, op, policy)
        team = collectives.team()
        if chosen in PACKET_ALGORITHMS and team.packets is None:
            chosen = "two_shot"
        if chosen in ("two_shot", "proxy") and collectives.goes_by_schedule(chosen):
            return prepare_all_reduce(collectives.by_proxy(), source, target, op)
        if chosen == "two_shot":
            arrays = source.ptr, target.ptr, source.size
            return _prepare_two_shot(group, team, source.dtype, op, policy, *arrays, reached=call.reached)
        kernel, arrays = ALL_REDUCE_KERNELS[chosen], (source.ptr, target.ptr, source.size)
        if chosen in PACKET_ALGORITHMS and team.packets is not None:
            launch = team.packets.launch(chosen, source.dtype, source.size, policy)
            kernel = LINE_KERNELS[chosen] if launch.lines else kernel
            shipped = group.runtime.shipped(kernel.file, kernel.name, source.dtype.name, op)
            return shipped.prepare(launch.blocks, launch.threads, launch.parameter, *arrays)
        shipped = group.runtime.shipped(kernel.file, kernel.name, source.dtype.name, op)
        return shipped.prepare(team.grid(source.nbytes, policy), team.threads, team.parameter(), *arrays)


ALL_REDUCE = AllReduce()
"""See `Communicator.all_reduce`."""


def _prepare_two_shot(
    group: Group,
    team: Team,
    dtype: DType,
    op: str,
    policy: CtaPolicy,
    source: int,
    target: int,
    count: int,
    *,
    reached: bool = False,
    divisor: int | None = None,
) -> Launch:
    kernel = ALL_REDUCE_KERNELS["two_shot" if team.all_mapped else "proxy"]
    loadable = source == target and source % 16 == 0
    blocks, parameter = team.pipeline(
        count, dtype.itemsize, policy, reached=reached, loadable=loadable, divisor=divisor
    )
    shipped = group.runtime.shipped(kernel.file, kernel.name, dtype.name, op)
    return shipped.prepare(blocks, team.threads, parameter, source, target, count)


def _part(view: ArrayView, first: int, count: int) -> ArrayView:
    """Some elements of an array."""
    ptr = view.ptr + first * view.dtype.itemsize
    return ArrayView(ptr, (count,), view.dtype, view.device, view.writable, view.owner)


def _travels_in_float32(dtype: DType, op: str) -> bool:
    """Whether a hierarchy reduces elements in float32: a node's sum or product may be outside their range although the
    whole is not. An average's parts are averages, and bfloat16 has float32's range.
    """
    return dtype.name == "float16" and op in ("sum", "prod")


def _averages_parts(dtype: DType, op: str) -> bool:
    """Whether a hierarchy's parts of an average are averages, which fit where a sum may not; else they are sums."""
    return op == "avg" and dtype.accumulator_itemsize > dtype.itemsize


def _prepare_hierarchy(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Launchable:
    wide = _travels_in_float32(source.dtype, op)
    by_schedule = _reduces_by_schedule(collectives, source.size * DTYPES["float32"].itemsize if wide else source.nbytes)
    prepare = _prepare_levels_by_schedule if by_schedule else _prepare_levels_by_kernels
    return prepare(collectives, source, target, op, policy)


def _reduces_by_schedule(collectives: Collectives, nbytes: int) -> bool:
    """Whether a hierarchy of this many bytes has schedules between the nodes. Kernels that wait for a proxy's copies
    would hold them up; kernels that send through pinned memory are faster while the data is short.
    """
    group, topology = collectives.group, collectives.group.topology
    if group.world_size > _MOST_SCHEDULED_RANKS:
        return False
    sent = nbytes // topology.local_world_size * (topology.node_count - 1)
    through_pinned = sends_through_pinned_memory(group)
    too_long = through_pinned and sent > group.runtime.launch_defaults.pinned_kernel_bytes
    return too_long or collectives.goes_by_schedule("hierarchical")


def _divisor_between(collectives: Collectives, dtype: DType, op: str) -> int:
    """By which an average is divided where the nodes' parts meet."""
    topology = collectives.group.topology
    return topology.node_count if _averages_parts(dtype, op) else collectives.group.world_size


def _prepare_levels_by_schedule(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Launchable:
    """By `_levels`, with schedules between the nodes."""
    topology, by_proxy = collectives.group.topology, collectives.by_proxy()
    rails = [members[topology.local_rank] for members in topology.node_members()]
    divisor = _divisor_between(collectives, source.dtype, op)

    def between(part: ArrayView) -> Sequence[Step]:
        return all_reduce_steps(by_proxy, part, part, op, rails, divisor)

    def is_short(nbytes: int) -> bool:
        return nbytes <= by_proxy.memories.pinned_bytes

    return by_proxy.rings.prepare(_all_levels(collectives, source, target, op, policy, is_short, between, between))


def _prepare_levels_by_kernels(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Launchable:
    """By `_levels`, with kernels through the proxy between the nodes."""
    group, (_, across) = collectives.group, collectives.levels()
    divisor = _divisor_between(collectives, source.dtype, op)

    def between_whole(part: ArrayView) -> Sequence[Launch]:
        return [_one_round(group, across, op, part.ptr, part, divisor)]

    def between(part: ArrayView) -> Sequence[Launch]:
        arrays = (part.ptr, part.ptr, part.size)
        return [_prepare_two_shot(group, across, part.dtype, op, policy, *arrays, divisor=divisor)]

    steps = _all_levels(collectives, source, target, op, policy, across.takes_one_crossing, between_whole, between)
    return StreamOperations(group.runtime, steps)


def _one_round(group: Group, team: Team, op: str, source: int, target: ArrayView, divisor: int | None = None) -> Launch:
    """The launch that reduces an array among a team's ranks in one crossing."""
    kernel = ALL_REDUCE_KERNELS["proxy"]
    shipped = group.runtime.shipped(kernel.file, kernel.name, target.dtype.name, op)
    return shipped.prepare(1, team.threads, team.parameter(divisor=divisor), source, target.ptr, target.size)


def _all_levels(
    collectives: Collectives,
    source: ArrayView,
    target: ArrayView,
    op: str,
    policy: CtaPolicy,
    is_short: Callable[[int], bool],
    between_whole: Callable[[ArrayView], Sequence[_BetweenStep]],
    between: Callable[[ArrayView], Sequence[_BetweenStep]],
) -> list[Launch | _BetweenStep]:
    """By `_levels`: the call's elements, or piece by piece the same in float32, from which they are rounded once."""
    if not _travels_in_float32(source.dtype, op):
        return _levels(collectives, source, target, op, policy, is_short(source.nbytes), between_whole, between)
    shipped, (inside, _) = collectives.group.runtime.shipped, collectives.levels()
    widen, narrow = (shipped(kernel.file, kernel.name) for kernel in (WIDEN_FLOAT16, NARROW_FLOAT16))
    memory, float32 = collectives.wide_parts(), DTYPES["float32"]
    steps: list[Launch | _BetweenStep] = []
    for begin, count in rounds(source.size, WIDE_PARTS_BYTES // float32.itemsize):
        wide = ArrayView(memory.ptr, (count,), float32, source.device, True, memory)
        grid, ends = inside.grid(wide.nbytes, policy), (_part(source, begin, count), _part(target, begin, count))
        steps += [
            widen.prepare(grid, inside.threads, ends[0].ptr, wide.ptr, count),
            *_levels(collectives, wide, wide, op, policy, is_short(wide.nbytes), between_whole, between),
            narrow.prepare(grid, inside.threads, wide.ptr, ends[1].ptr, count),
        ]
    return steps


def _levels(
    collectives: Collectives,
    source: ArrayView,
    target: ArrayView,
    op: str,
    policy: CtaPolicy,
    short: bool,
    between_whole: Callable[[ArrayView], Sequence[_BetweenStep]],
    between: Callable[[ArrayView], Sequence[_BetweenStep]],
) -> list[Launch | _BetweenStep]:
    """Each share is reduced inside the node, then between the ranks with the same number on all nodes, then gathered
    inside the node, so a node's data crosses to the others once.

    Data that fits one round is reduced whole by every rank, inside the node and then between nodes. That saves a
    crossing, and such short shares are not worth one. So are the elements that do not divide into even shares.

    Args:
        collectives: of all ranks.
        source, target, op, policy: of the call.
        short: whether the data fits one round between the nodes.
        between_whole: the steps that reduce, in place, an array that each rank of a node has.
        between: the same for the rank's share.
    """
    topology, shipped, dtype = collectives.group.topology, collectives.group.runtime.shipped, source.dtype
    inside, _ = collectives.levels()
    partial = "sum" if op == "avg" and not _averages_parts(dtype, op) else op

    def whole(begin: int) -> list[Launch | _BetweenStep]:
        """The steps that reduce the elements from `begin` on in one round."""
        part, ptr = _part(target, begin, source.size - begin), source.ptr + begin * dtype.itemsize
        return [_one_round(collectives.group, inside, partial, ptr, part), *between_whole(part)]

    if short and inside.takes_one_crossing(source.nbytes):
        return whole(0)

    share = source.size // topology.local_world_size
    even = share * topology.local_world_size
    steps: list[Launch | _BetweenStep] = []
    if share:
        own, team = _part(target, topology.local_rank * share, share), inside.parameter()
        scatter_kernel, gather_kernel = COLLECTIVES["reduce_scatter"][0], COLLECTIVES["all_gather"][0]
        scatter = shipped(scatter_kernel.file, scatter_kernel.name, dtype.name, partial)
        gather = shipped(gather_kernel.file, gather_kernel.name)
        grid = inside.grid(even * dtype.itemsize, policy)
        steps += [
            scatter.prepare(grid, inside.threads, team, source.ptr, own.ptr, share),
            *between(own),
            gather.prepare(inside.grid(own.nbytes, policy), inside.threads, team, own.ptr, target.ptr, own.nbytes),
        ]
    if even < source.size:
        steps += whole(even)
    return steps
