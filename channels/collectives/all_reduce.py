"""all_reduce: the reduction on every rank, by one of several algorithms."""

from __future__ import annotations

from collections.abc import Sequence

from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reduce_schedules import all_reduce_steps, prepare_all_reduce
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.collectives.selection import PACKET_ALGORITHMS
from proxyccl.channels.collectives.table import ALL_REDUCE_KERNELS, COLLECTIVES, LINE_KERNELS
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.group import Group
from proxyccl.channels.launches import Launchable
from proxyccl.channels.schedules.rings import Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.kernel import Launch
from proxyccl.device.stream_operations import StreamOperations

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
            by_schedule = collectives.goes_by_schedule(chosen) and group.world_size <= _MOST_SCHEDULED_RANKS
            prepare = _prepare_levels_by_schedule if by_schedule else _prepare_by_levels
            return prepare(collectives, source, target, op, policy)
        team = collectives.team()
        if chosen in PACKET_ALGORITHMS and team.packets is None:
            chosen = "two_shot"
        if chosen in ("two_shot", "proxy") and collectives.goes_by_schedule(chosen):
            return prepare_all_reduce(collectives.by_proxy(), source, target, op)
        if chosen == "two_shot":
            arrays, reached_at = (source.ptr, target.ptr, source.size), group.symmetric.reached(target)
            return _prepare_two_shot(group, team, source.dtype, op, policy, *arrays, reached_at)
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
    reached_at: Sequence[int] | None = None,
) -> Launch:
    kernel = ALL_REDUCE_KERNELS["two_shot" if team.all_mapped else "proxy"]
    loadable = source == target and source % 16 == 0
    blocks, parameter = team.pipeline(count, dtype.itemsize, policy, reached_at, loadable=loadable)
    shipped = group.runtime.shipped(kernel.file, kernel.name, dtype.name, op)
    return shipped.prepare(blocks, team.threads, parameter, source, target, count)


def _part(view: ArrayView, first: int, count: int) -> ArrayView:
    """Some elements of an array."""
    ptr = view.ptr + first * view.dtype.itemsize
    return ArrayView(ptr, (count,), view.dtype, view.device, view.writable, view.owner)


def _prepare_levels_by_schedule(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Launchable:
    """As `_prepare_by_levels`, with schedules between the nodes: kernels that wait for a proxy's copies would hold them
    up.
    """
    group, topology, by_proxy = collectives.group, collectives.group.topology, collectives.by_proxy()
    inside, _ = collectives.levels()
    rails = [members[topology.local_rank] for members in topology.node_members()]
    partial = "sum" if op == "avg" else op  # the rank that has all parts divides
    shipped, dtype = group.runtime.shipped, source.dtype
    if inside.fits_one_round(source.nbytes) and source.nbytes <= by_proxy.memories.pinned_bytes:
        kernel = ALL_REDUCE_KERNELS["proxy"]
        reduction = shipped(kernel.file, kernel.name, dtype.name, partial)
        within = reduction.prepare(1, inside.threads, inside.parameter(), source.ptr, target.ptr, source.size)
        return by_proxy.rings.prepare([within, *all_reduce_steps(by_proxy, target, target, op, rails)])
    share = source.size // topology.local_world_size
    even = share * topology.local_world_size
    steps: list[Step] = []
    if share:
        scatter_kernel, gather_kernel = COLLECTIVES["reduce_scatter"][0], COLLECTIVES["all_gather"][0]
        own, team = _part(target, topology.local_rank * share, share), inside.parameter()
        scatter = shipped(scatter_kernel.file, scatter_kernel.name, dtype.name, partial)
        gather = shipped(gather_kernel.file, gather_kernel.name)
        steps += [
            scatter.prepare(
                inside.grid(even * dtype.itemsize, policy), inside.threads, team, source.ptr, own.ptr, share
            ),
            *all_reduce_steps(by_proxy, own, own, op, rails),
            gather.prepare(inside.grid(own.nbytes, policy), inside.threads, team, own.ptr, target.ptr, own.nbytes),
        ]
    if even < source.size:
        rest = (_part(source, even, source.size - even), _part(target, even, source.size - even))
        steps += all_reduce_steps(by_proxy, *rest, op, range(group.world_size))
    return by_proxy.rings.prepare(steps)


def _prepare_by_levels(
    collectives: Collectives, source: ArrayView, target: ArrayView, op: str, policy: CtaPolicy
) -> Launchable:
    """Each share is reduced inside the node, then between the ranks with the same number on all nodes, then gathered
    inside the node, so a node's data crosses to the others once.

    Data that fits one round is reduced whole by every rank, inside the node and then between nodes. That saves a
    crossing, and such short shares are not worth one. So are the elements that do not divide into even shares.
    """
    group, dtype = collectives.group, source.dtype
    topology = group.topology
    inside, across = collectives.levels()
    partial = "sum" if op == "avg" else op  # the rank that has all parts divides

    def whole(begin: int) -> list[Launch]:
        """The launches that reduce the elements from `begin` on in one round."""
        offset, kernel = begin * dtype.itemsize, ALL_REDUCE_KERNELS["proxy"]

        def one_round(team: Team, operator: str, ptr: int) -> Launch:
            shipped = group.runtime.shipped(kernel.file, kernel.name, dtype.name, operator)
            return shipped.prepare(1, team.threads, team.parameter(), ptr, target.ptr + offset, source.size - begin)

        return [one_round(inside, partial, source.ptr + offset), one_round(across, op, target.ptr + offset)]

    if inside.fits_one_round(source.nbytes) and across.fits_one_round(source.nbytes):
        return StreamOperations(group.runtime, whole(0))

    share = source.size // topology.local_world_size
    even, nbytes = share * topology.local_world_size, share * dtype.itemsize
    own = target.ptr + topology.local_rank * nbytes

    shipped = group.runtime.shipped
    scatter_kernel, gather_kernel = COLLECTIVES["reduce_scatter"][0], COLLECTIVES["all_gather"][0]
    scatter = shipped(scatter_kernel.file, scatter_kernel.name, dtype.name, partial)
    gather = shipped(gather_kernel.file, gather_kernel.name)
    team = inside.parameter()
    launches = [
        scatter.prepare(inside.grid(even * dtype.itemsize, policy), inside.threads, team, source.ptr, own, share),
        _prepare_two_shot(group, across, dtype, op, policy, own, own, share),
        gather.prepare(inside.grid(nbytes, policy), inside.threads, team, own, target.ptr, nbytes),
    ]
    if even < source.size:
        launches += whole(even)
    return StreamOperations(group.runtime, launches)
