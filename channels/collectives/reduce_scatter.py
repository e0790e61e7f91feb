"""reduce_scatter: each rank gets its share of the reduction."""

from __future__ import annotations

from proxyccl.channels.arguments import share_shape
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reduce_schedules import prepare_reduce_scatter
from proxyccl.channels.collectives.table import COLLECTIVES
from proxyccl.channels.group import Group
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.stream_operations import StreamOperations


class _ReduceScatter(Collective):
    name = "reduce_scatter"
    reduces = True

    def shape(self, group: Group, source: ArrayView) -> tuple[int, ...]:
        return share_shape(group, source)

    def lent(self, launchable: Launchable) -> int:
        # Kernels of other ranks touch neither array; proxies send from the input.
        return 0 if isinstance(launchable, StreamOperations) else -1

    def launch(self, collectives: Collectives, call: Call) -> Launchable:
        group, source, target, op = collectives.group, call.source, call.target, call.op
        assert op is not None
        algorithm = collectives.choose(self.name, call.request, source.dtype, call.nbytes)
        if collectives.goes_by_schedule(algorithm):
            return prepare_reduce_scatter(collectives.by_proxy(), source, target, op)
        team, kernel = collectives.team(), COLLECTIVES[self.name][0]
        blocks, parameter = team.scatter(target.size, source.dtype.itemsize, call.request.cta_policy)
        shipped = group.runtime.shipped(kernel.file, kernel.name, source.dtype.name, op)
        return shipped.prepare(blocks, team.threads, parameter, source.ptr, target.ptr, target.size)


REDUCE_SCATTER = _ReduceScatter()
"""See `Communicator.reduce_scatter`."""
