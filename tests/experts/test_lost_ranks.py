"""A layer on the ranks that remain after a loss: experts keep their numbers, and tokens' choices of lost experts are
dropped and reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator, EPAll2AllLayer
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.running import run_ranks

TOKENS, HIDDEN, TOPK, PER_RANK = 7, 16, 3, 2
LAYOUTS = ("expert", "rank", "padded")


def options_of(layout: str) -> dict[str, Any]:
    return {"dtype": "float32", "layout": layout, "num_sm": 3}


def layer_on(comm: Communicator, experts: int, **options: Any) -> EPAll2AllLayer:
    local, size = comm.local_world_size, comm.world_size
    return EPAll2AllLayer(comm, TOKENS, HIDDEN, TOPK, comm.rank, experts, local, size, **options)


def inputs_of(rank: int, all_ranks: int, layout: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns a rank's tokens, expert ids and weights. No token repeats an expert; some slots choose no expert."""
    rng = np.random.default_rng(rank)
    count, experts = TOKENS - rank % 2, all_ranks * PER_RANK
    ids = np.array([rng.permutation(experts + 1)[:TOPK] for _ in range(count)])
    if layout == "rank":
        ids[ids == experts] = rng.choice([-1, experts])
    dtype = np.int64 if layout == "rank" else np.int32
    return rng.random((count, HIDDEN), np.float32), ids.astype(dtype), rng.random((count, TOPK), np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "excluded"), [(3, (0,)), (4, (1, 2)), (4, (3,))], ids=str)
@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_it_gives_what_a_layer_gives_whose_lost_slots_choose_nothing(
    size: int, excluded: tuple[int, ...], layout: str
) -> None:
    left = [rank for rank in range(size) if rank not in excluded]

    def body(comm: Communicator) -> None:
        if comm.rank in excluded:
            return
        layer = layer_on(comm.shrink(exclude=excluded), size * PER_RANK, lost_ranks=excluded, **options_of(layout))
        group = layer.ctx.communicator
        plain = layer_on(group, len(left) * PER_RANK, **options_of(layout))
        tokens, ids, weights = inputs_of(comm.rank, size, layout)
        lost = np.isin(ids // PER_RANK, excluded) & (ids >= 0)
        number = np.searchsorted(left, ids // PER_RANK)
        kept = np.where(lost | (ids < 0) | (ids == size * PER_RANK), len(left) * PER_RANK, ids % PER_RANK)
        kept = (np.where(kept < PER_RANK, number * PER_RANK, 0) + kept).astype(ids.dtype)

        def results(layer: EPAll2AllLayer, ids: NDArray[Any]) -> tuple[Any, list[NDArray[Any]]]:
            rows, row_weights, desc = layer.dispatch(*(on_device(group, each) for each in (tokens, ids, weights)))
            count = int(on_host(desc.num_recv_tokens)[0]) if layout == "padded" else len(on_host(rows))
            combined = layer.combine(rows, desc)
            filled = [on_host(desc.counts), on_host(combined)]
            if layout != "padded":
                return desc, [on_host(rows), on_host(row_weights), *filled]
            rows = [on_host(rows)[e, :n] for e, n in enumerate(on_host(desc.expert_rows))]
            assert sum(map(len, rows)) == count
            return desc, [*rows, *filled]

        desc, got = results(layer, ids)
        np.testing.assert_array_equal(on_host(desc.lost_slots), lost)
        _, expected = results(plain, kept)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        plain.finalize()
        layer.finalize()
        group.close()

    run_ranks(size, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_padded_rows_keep_the_shape_that_they_had_with_all_ranks() -> None:
    def body(comm: Communicator) -> None:
        before = layer_on(comm, 3 * PER_RANK, **options_of("padded"))
        shape = (PER_RANK, 3 * TOKENS, HIDDEN)
        tokens, ids, _ = inputs_of(comm.rank, 3, "padded")
        assert before.dispatch(on_device(comm, tokens), on_device(comm, ids))[0].shape == shape
        if comm.rank == 2:
            return
        after = before.shrink(comm.shrink(exclude=[2]))
        assert after.lost_ranks == (2,)
        rows = after.dispatch(on_device(comm, tokens), on_device(comm, ids))[0]
        assert rows.shape == shape
        again = after.ctx.communicator
        again.close()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_ranks_can_be_lost_one_after_the_other() -> None:
    def body(comm: Communicator) -> None:
        layer = layer_on(comm, 4 * PER_RANK, dtype="float32")
        if comm.rank == 2:
            return
        first = comm.shrink(exclude=[2])
        layer = layer.shrink(first)
        if comm.rank == 0:
            first.close()
            return
        layer = layer.shrink(layer.ctx.communicator.shrink(exclude=[0]))
        assert layer.lost_ranks == (0, 2)
        group = layer.ctx.communicator
        tokens = np.full((TOKENS, HIDDEN), comm.rank + 1, np.float32)
        ids = np.tile(np.array([0, 2 * PER_RANK, 3 * PER_RANK], np.int32), (TOKENS, 1))
        rows, _, desc = layer.dispatch(on_device(group, tokens), on_device(group, ids))
        np.testing.assert_array_equal(on_host(desc.lost_slots), [[True, True, False]] * TOKENS)
        assert len(on_host(rows)) == (2 * TOKENS if comm.rank == 3 else 0)
        np.testing.assert_array_equal(on_host(layer.combine(rows, desc)), tokens)
        group.close()
        first.close()

    run_ranks(4, body, make_runtime=runtime_with_blocks)


@pytest.mark.parametrize("env", [{}, {"PROXYCCL_LOCAL_WORLD_SIZE": "2"}], ids=["one node", "two nodes"])
@pytest.mark.host_only(reason="more processes than most machines have GPUs")
def test_a_killed_ranks_experts_drop_out(env: dict[str, str]) -> None:
    for rank, ended in enumerate(run_processes(4, PROGRAMS / "lost_experts.py", env=env)):
        assert ended.returncode == (-9 if rank == 1 else 0), ended.stderr
        assert ended.stdout == ("" if rank == 1 else f"{rank} (1,) True\n")


def test_a_bad_id_is_refused_by_the_number_of_all_experts() -> None:
    def body(comm: Communicator) -> None:
        layer = layer_on(comm, 3 * PER_RANK, dtype="float32", lost_ranks=[1])
        ids = np.zeros((TOKENS, TOPK), np.int32)
        ids[2, 1] = 3 * PER_RANK + 1
        with pytest.raises(ArgumentError, match=r"^exp_indices: \[2, 1\] on rank 0 is out of range; expected 0 to 6"):
            layer.dispatch(on_device(comm, np.ones((TOKENS, HIDDEN), np.float32)), on_device(comm, ids))
        layer.finalize()

    with Ranks(2) as pair:
        pair.run(body)


@pytest.mark.parametrize(
    ("lost", "experts", "message"),
    [
        ([3], 6, r"^lost_ranks: 3 is not a rank; expected 0 to 2$"),
        ([-1], 6, r"^lost_ranks: -1 is not a rank"),
        (["a"], 6, r"^lost_ranks: 'a' is not a rank"),
        ([0, 0], 8, r"^lost_ranks: rank 0 is given twice"),
        ([1], 4, r"^num_tot_experts: must be a multiple of 3, the number of ranks including lost ranks, not 4$"),
    ],
)
def test_wrong_lost_ranks_are_refused(lost: list[Any], experts: int, message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=message):
            layer_on(comm, experts, lost_ranks=lost)

    with Ranks(2) as pair:
        pair.run(body)


def test_only_a_shrunk_communicator_gives_a_shrunk_layer() -> None:
    def body(comm: Communicator) -> None:
        with (
            layer_on(comm, 2 * PER_RANK) as layer,
            pytest.raises(ArgumentError, match=r"^communicator: must come from"),
        ):
            layer.shrink(comm)

    with Ranks(2) as pair:
        pair.run(body)
