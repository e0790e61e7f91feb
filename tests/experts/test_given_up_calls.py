"""A dispatch that times out leaves its tables unfilled, so calls queued after the dispatch must not use the tables."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, CommunicatorError
from proxyccl.channels.expert_parallel.arrays import NumpyArrays
from proxyccl.device._native import ffi
from support.cases.expert_layer import Case, announce_by, plan_of, run_ranks
from support.running import TIMEOUT, impatient

pytestmark = pytest.mark.host_only(reason="fills tables with arbitrary numbers")

LAYOUTS: dict[str, dict[str, Any]] = {
    "expert": {"max_recv_tokens": 64},
    "padded": {"layout": "padded"},
    "rank": {"layout": "rank", "max_recv_tokens": 32},
    "rank, stored": {"layout": "rank", "max_recv_tokens": 32, "output_buffers": 1},
}


def wait_for_failure(comm: Communicator) -> None:
    end = time.monotonic() + TIMEOUT
    while not comm.group.failure.aborted:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("layout", "announces"),
    [
        ("expert", "counts"),
        ("expert", "ids"),
        ("padded", "counts"),
        ("padded", "ids"),
        ("rank", "counts"),
        ("rank", "masks"),
        ("rank, stored", "counts"),
        ("rank, stored", "masks"),
        ("rank, stored", "shared_masks"),
    ],
)
def test_calls_after_a_dispatch_that_gave_up_touch_no_row(
    monkeypatch: pytest.MonkeyPatch, layout: str, announces: str
) -> None:
    announce_by(announces, monkeypatch)
    plan = plan_of(Case((8, 8), hidden=16))
    make = NumpyArrays.maker

    def filled(arrays: NumpyArrays, shape: tuple[int, ...], strides: tuple[int, ...], native: Any) -> Any:
        new = make(arrays, shape, strides, native)
        if native != np.int32:
            return new

        def made() -> Any:
            table = new()
            table[...] = 0x3F3F3F3F  # an index that is out of range for rows and for ranks
            return table

        return made

    monkeypatch.setattr(NumpyArrays, "maker", filled)

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm, **LAYOUTS[layout])
        assert layer.ctx.workspace.announces == announces
        assert layer.ctx.workspace.experts.blocks > 1  # only the last of several blocks gathers counts
        impatient(comm, 0.5)
        if comm.rank == 1:
            wait_for_failure(comm)
            return
        stream = comm.runtime.create_stream()
        ids = plan.routing.ids[0]
        rows, _, desc = layer.dispatch(plan.inputs[0], ids, stream=stream)
        out = np.full((8, 16), 7, np.float32)
        layer.combine(rows, desc, out=out, stream=stream)
        with pytest.raises(CommunicatorError):
            comm.synchronize(stream)
        counters = ffi.cast("ProxycclExpertCounters *", layer.ctx.workspace.experts.counters)
        assert counters.has_failed == 1
        assert (out == 7).all()

    run_ranks(2, body)
