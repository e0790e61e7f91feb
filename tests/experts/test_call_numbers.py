"""When the call numbers in flags wrap around, results must stay right, and calls must still wait for peers' rows."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, EPAll2AllLayer
from proxyccl.channels.expert_parallel import geometry
from proxyccl.device._native import ffi
from support.cases.expert_layer import Case, check_layer, dispatch_of, plan_of, run_ranks, same_rows
from support.running import TIMEOUT

pytestmark = pytest.mark.host_only(reason="writes flags and counters, which only the host runtime's CPU can")

ITEM_BITS = 27
STARTS = [2**32 - 3, 2**37 - 3, 2**63 - 3, 2**64 - 3]


def start_at(layer: EPAll2AllLayer, calls: int) -> None:
    """Sets a new layer's memory to its state after `calls` dispatches and combines."""
    experts = layer.ctx.workspace.experts
    counters = ffi.cast("ProxycclExpertCounters *", experts.counters)
    counters.dispatches = counters.combines = calls

    def fill(begin: int, end: int, value: int) -> None:
        words = ffi.buffer(experts.workspace + begin, end - begin)
        np.frombuffer(words, np.uint64)[:] = value % 2**64

    fill(experts.routed, experts.sent, calls)
    fill(experts.sent, experts.read, (calls + 1 << ITEM_BITS) - 1)
    fill(experts.read, experts.announced, calls)


@pytest.mark.parametrize("local_world_size", [3, 1])
@pytest.mark.parametrize("slots", [0, geometry.ANNOUNCED_SLOTS], ids=["counted", "announced"])
@pytest.mark.parametrize("start", STARTS)
def test_results_stay_right_when_the_numbers_of_calls_wrap(
    monkeypatch: pytest.MonkeyPatch, start: int, slots: int, local_world_size: int
) -> None:
    monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", slots)
    plans = [plan_of(Case((9, 0, 14), topk=3, local_world_size=local_world_size, seed=seed)) for seed in range(4)]

    def body(comm: Communicator) -> int:
        with plans[0].case.layer(comm) as layer:
            start_at(layer, start)
            comm.barrier()
            for plan in plans:
                check_layer(comm, plan, layer)
            return int(ffi.cast("ProxycclExpertCounters *", layer.ctx.workspace.experts.counters).dispatches)

    assert run_ranks(3, body, local_world_size=local_world_size) == [(start + 2 * len(plans)) % 2**64] * 3


@pytest.mark.parametrize("end", [2**32, 2**37, 2**64])
def test_rows_of_the_call_whose_number_is_zero_again_are_awaited(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)
    plan = plan_of(Case((8, 8)))
    goes_on = threading.Event()

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm) as layer:
            start_at(layer, end - 2)
            comm.barrier()
            desc = dispatch_of(layer, plan, comm)[2]
            if rank == 1:  # rank 1 sends its rows late; only the rows' flags tell rank 0 whether they have arrived
                assert goes_on.wait(TIMEOUT)
                return layer.redispatch(plan.others[rank], desc)
            threading.Timer(0.2, goes_on.set).start()
            return layer.redispatch(plan.others[rank], desc)

    rows: list[Any] = run_ranks(2, body)
    for rank in range(2):
        same_rows(rows[rank], plan.other_rows[rank], None, "redispatch", plan.routing.filled(rank))
