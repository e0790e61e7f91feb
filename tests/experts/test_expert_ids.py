"""Expert ids: the types and values that a layer accepts, and tokens that choose an expert twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, CapacityError, Communicator, EPAll2AllLayer
from proxyccl.channels.expert_parallel import geometry
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks
from support.ranks import Ranks
from support.running import run_ranks

TOKENS, HIDDEN, PER_RANK, RANKS = 8, 128, 2, 2
EXPERTS = PER_RANK * RANKS


def layer_on(comm: Communicator, *, experts: int = EXPERTS, **options: Any) -> EPAll2AllLayer:
    ranks, local = comm.world_size, comm.local_world_size
    return EPAll2AllLayer(comm, TOKENS, HIDDEN, 2, comm.rank, experts, local, ranks, **{"dtype": "float32", **options})


def inputs(comm: Communicator) -> Any:
    return on_device(comm, np.full((TOKENS, HIDDEN), 1.0 + comm.rank, np.float32))


def dispatch_and_check(layer: EPAll2AllLayer, comm: Communicator, ids: Any) -> Any:
    """Makes a dispatch, raises its errors and its kernels' errors, and returns its descriptor."""
    desc = layer.dispatch(inputs(comm), on_device(comm, ids))[2]
    comm.synchronize()
    layer.check()
    return desc


def received_and_checked(layer: EPAll2AllLayer, comm: Communicator, pending: Any) -> None:
    layer.dispatch_recv(pending)
    comm.synchronize()
    layer.check()


@pytest.fixture(params=[True, False], ids=["announced", "counted"])
def announced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)
    return bool(request.param)


# -- ids of 64 bits ---

LAYOUTS: dict[str, dict[str, Any]] = {
    "expert": {"layout": "expert"},
    "aligned": {"layout": "expert", "expert_alignment": 4},
    "fixed": {"layout": "expert", "max_recv_tokens": 64},
    "padded": {"layout": "padded"},
    "rank": {"layout": "rank"},
    "rank, stored": {"layout": "rank", "output_buffers": 1, "max_recv_tokens": 32},
}
BAD = [-5, -2, EXPERTS, EXPERTS + 1, 2**31, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_minus_one_alone_drops_and_all_64_bits_count(pair: Ranks, announced: bool, layout: str) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, minus_one_drops=True, **LAYOUTS[layout]) as layer:
            for bad in BAD:
                ids = np.tile(np.array([0, 3], np.int64), (TOKENS, 1))
                if comm.rank == 1:
                    ids[5, 1] = bad
                with pytest.raises(ArgumentError, match=r"^exp_indices: \[5, 1\] on rank 1 .* 0 to 3, or -1,"):
                    dispatch_and_check(layer, comm, ids)
                comm.barrier()
            for dtype in (np.int32, np.int64):
                ids = np.tile(np.array([-1, 3], dtype), (TOKENS, 1))
                rows, _, desc = layer.dispatch(inputs(comm), on_device(comm, ids))
                assert (on_host(layer.combine(rows, desc)) == 1 + comm.rank).all()
                came = on_host(desc.counts).sum(axis=0)
                assert came.tolist() == ([0, 2 * TOKENS] if layer.layout == "rank" else [0, 0, 0, 2 * TOKENS])

    pair.run(body)


def test_a_bad_id_is_raised_once_whatever_comes_after_it(pair: Ranks, announced: bool) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, max_recv_tokens=64) as layer:
            layer.check()  # raises nothing before the first dispatch
            good = np.tile(np.array([0, 3], np.int32), (TOKENS, 1))
            bad = good.copy()
            if comm.rank == 1:
                bad[5, 1] = EXPERTS + 1
            stream = comm.runtime.create_stream()
            for ids in (bad, good):
                layer.dispatch(inputs(comm), on_device(comm, ids), stream=stream)
            comm.synchronize(stream)
            with pytest.raises(ArgumentError, match=r"^exp_indices: \[5, 1\] on rank 1"):
                layer.check()
            layer.check()

    pair.run(body)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "uint64", "float32", "bool"])
@pytest.mark.parametrize("options", [{}, {"layout": "rank"}, {"minus_one_drops": True}], ids=repr)
def test_ids_of_other_types_are_refused(pair: Ranks, options: dict[str, Any], dtype: str) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, **options) as layer:
            ids = on_device(comm, np.zeros((TOKENS, 2), dtype))
            with pytest.raises(ArgumentError, match=r"^exp_indices: "):
                layer.dispatch(inputs(comm), ids)

    pair.run(body)


@pytest.mark.parametrize("layout", ["expert", "padded", "rank"])
def test_minus_one_alone_drops_where_ranks_are_lost(layout: str) -> None:
    def body(comm: Communicator) -> None:
        options = {"layout": layout, "lost_ranks": [1], "experts": 3 * PER_RANK, "minus_one_drops": True}
        with layer_on(comm, **options) as layer:
            ids = np.tile(np.array([[-1, 5], [2, 0]], np.int64), (TOKENS // 2, 1))
            rows, _, desc = layer.dispatch(inputs(comm), on_device(comm, ids))
            assert (on_host(layer.combine(rows, desc)) == 1 + comm.rank).all()
            assert on_host(desc.lost_slots).tolist() == [[False, False], [True, False]] * (TOKENS // 2)
            for bad in (2 * PER_RANK + 2, 2**32 + 1, -2):
                ids[0, 1] = bad
                with pytest.raises(ArgumentError, match=r"^exp_indices: \[0, 1\] on rank 0"):
                    dispatch_and_check(layer, comm, ids)
                comm.barrier()

    run_ranks(2, body, make_runtime=runtime_with_blocks)


# -- tokens that choose an expert twice ---


@pytest.mark.parametrize("float8", [False, True], ids=["as they are", "float8"])
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_the_fullest_padded_expert_counts(pair: Ranks, announced: bool, expert: int, float8: bool) -> None:
    options = {"dispatch_dtype": "float8_e4m3fn"} if float8 else {}

    def body(comm: Communicator) -> None:
        with layer_on(comm, layout="padded", **options) as layer:
            ids = on_device(comm, np.full((TOKENS, 2), expert, np.int32))
            room = RANKS * TOKENS
            pending = layer.dispatch_send(inputs(comm), ids)
            told = rf"^an expert received {2 * room} rows.* room of {room} rows"
            with pytest.raises(CapacityError, match=told) as caught:
                received_and_checked(layer, comm, pending)
            assert caught.value.needed == 2 * room
            desc = pending.desc
            here = expert // PER_RANK == comm.rank
            assert on_host(desc.expert_rows).tolist() == [
                room * (here and e == expert % PER_RANK) for e in range(PER_RANK)
            ]
            assert on_host(desc.num_recv_tokens).tolist() == [room * here]
            # Rows of rank 0 come first and fill the expert's space.
            assert ((on_host(desc.token_dst_scatter_idx) >= 0) == (comm.rank == 0)).all()
            layer.check()  # The error is raised only once.
            # If each token chooses the expert once, all rows fit. The earlier error does not affect this dispatch.
            once = np.tile(np.array([expert, EXPERTS], np.int32), (TOKENS, 1))
            rows, _, desc = layer.dispatch(inputs(comm), on_device(comm, once))
            if not float8:
                assert (on_host(layer.combine(rows, desc)) == 1 + comm.rank).all()
            layer.check()

    pair.run(body)


@pytest.mark.host_only(reason="elsewhere a second half does not wait for its end")
def test_every_second_half_raises_that_rows_did_not_fit(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, layout="padded") as layer:
            for _ in range(2):  # the second iteration reuses the prepared calls
                pending = layer.dispatch_send(inputs(comm), np.zeros((TOKENS, 2), np.int32))
                with pytest.raises(CapacityError):
                    layer.dispatch_recv(pending)

    pair.run(body)


def test_an_expert_twice_is_two_rows_where_they_fit(pair: Ranks, announced: bool) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, layout="padded") as layer:
            ids = np.full((TOKENS, 2), EXPERTS, np.int32)
            ids[: TOKENS // 2] = 1
            rows, _, desc = layer.dispatch(inputs(comm), on_device(comm, ids))
            comm.synchronize()
            layer.check()
            assert on_host(desc.expert_rows).tolist() == ([0, 2 * TOKENS] if comm.rank == 0 else [0, 0])
            combined = on_host(layer.combine(rows, desc))
            assert (combined[: TOKENS // 2] == 2 * (1 + comm.rank)).all()
            assert (combined[TOKENS // 2 :] == 0).all()

    pair.run(body)


def test_padded_rows_have_no_indices_of_the_callers(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, layout="padded") as layer:
            ids = on_device(comm, np.zeros((TOKENS, 2), np.int32))
            indices = on_device(comm, np.arange(RANKS * TOKENS * 2, dtype=np.int32).reshape(-1, 2))
            with pytest.raises(ArgumentError, match=r"^full_scatter_indices: .*padded"):
                layer.dispatch(inputs(comm), ids, None, indices)

    pair.run(body)


def test_the_fullest_padded_expert_counts_across_nodes() -> None:
    def body(comm: Communicator) -> None:
        layer = layer_on(comm, layout="padded")
        with pytest.raises(CapacityError, match=f"^an expert received {4 * TOKENS} rows"):
            dispatch_and_check(layer, comm, np.full((TOKENS, 2), 3, np.int32))
        layer.finalize()

    run_ranks(2, body, make_runtime=runtime_with_blocks, local_world_size=1)
