"""Weights that move between ranks by `EPAll2AllLayer.place`, while the layer continues to work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator, EPAll2AllLayer, PeerLostError, ThreadBootstrap
from proxyccl.transfer import Agent, DisconnectedError, Transfer, TransferError
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks
from support.paths import PROGRAMS
from support.processes import run_processes
from support.running import TIMEOUT, run_ranks

TOKENS, HIDDEN, TOPK, PER_RANK = 5, 16, 2, 2
# Experts 0 and 1 have two places on different ranks.
TWICE = (0, 1, 2, 0, 3, 1)
# Rank 0 gets an expert that it has already, and two ranks exchange experts.
TURNED = (0, 3, 2, 0, 1, 0)
SPARSE = (0, 3, 2, -1, 1, -1)


def layer_on(comm: Communicator, placement: Sequence[int], **options: Any) -> EPAll2AllLayer:
    sizes = TOKENS, HIDDEN, TOPK, comm.rank, len(placement), comm.local_world_size, comm.world_size
    return EPAll2AllLayer(comm, *sizes, dtype="float32", placement=placement, **options)


def factors_of(expert: int) -> NDArray[np.float32]:
    return np.random.default_rng(expert + 1).integers(1, 9, HIDDEN).astype(np.float32)


class Weights:
    """The weights of a rank's places: an array of factors for each element of a token, and a larger array.

    Args:
        comm: the communicator, whose device has the arrays.
        number: the rank's original number.
        placement: the first placement.
    """

    def __init__(self, comm: Communicator, number: int, placement: Sequence[int]) -> None:
        self._comm, self._own = comm, slice(number * PER_RANK, (number + 1) * PER_RANK)
        own = placement[self._own]
        self.factors = on_device(comm, np.stack([factors_of(expert) for expert in own]))
        self.large = on_device(comm, np.repeat(np.array(own, np.int8), 1 << 20).reshape(PER_RANK, 1 << 10, 1 << 10))
        self.arrays = [self.factors, self.large]

    def step(self, layer: EPAll2AllLayer) -> None:
        """Makes a step of the layer with these weights, and checks the results and the weights."""
        comm, placement = layer.ctx.communicator, np.array(layer.placement)
        rng = np.random.default_rng(comm.rank)
        tokens = rng.integers(0, 50, (TOKENS, HIDDEN)).astype(np.float32)
        ids = rng.integers(0, placement.max() + 1, (TOKENS, TOPK)).astype(np.int32)
        rows, _, desc = layer.dispatch(on_device(comm, tokens), on_device(comm, ids))
        counts = on_host(desc.counts)[:, comm.rank * PER_RANK :][:, :PER_RANK].sum(axis=0)
        results = on_host(rows) * np.repeat(on_host(self.factors), counts, axis=0)
        got = on_host(layer.combine(on_device(comm, results), desc))
        left = [e for place, e in enumerate(placement) if place // PER_RANK not in layer.lost_ranks]
        factors = np.stack([factors_of(e) * (e in left) for e in range(placement.max() + 1)])
        np.testing.assert_array_equal(got, tokens * factors[ids].sum(axis=1))
        for local, expert in enumerate(placement[self._own]):
            assert expert < 0 or (on_host(self.large)[local] == expert).all()


def move(layer: EPAll2AllLayer, weights: Weights, placement: Sequence[int]) -> int:
    """Moves weights and makes a step after each call. Returns the number of calls."""
    before, calls = layer.placement, 0
    while True:
        calls += 1
        moved = layer.place(placement, weights.arrays)
        assert layer.placement == (tuple(placement) if moved else before)
        weights.step(layer)
        if moved:
            return calls


@pytest.mark.hip
def test_every_step_is_exact_while_weights_move() -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, TWICE) as layer:
            weights = Weights(comm, comm.rank, TWICE)
            for placement in (TURNED, SPARSE, TWICE, TURNED):
                assert move(layer, weights, placement) > 1
            layer.place(SPARSE)  # now no rank sends tokens to the empty places
            assert move(layer, weights, SPARSE) == 2

    run_ranks(3, body, make_runtime=runtime_with_blocks)


def test_all_ranks_change_their_placement_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of one rank arrive later than those of the others."""
    done, early = Transfer.done, iter(range(5))

    def late(transfer: Transfer) -> bool:
        return done(transfer) and (threading.current_thread().name != "rank-2" or next(early, None) is None)

    monkeypatch.setattr(Transfer, "done", late)

    def body(comm: Communicator) -> int:
        with layer_on(comm, TWICE) as layer:
            return move(layer, Weights(comm, comm.rank, TWICE), TURNED)

    calls = run_ranks(3, body, make_runtime=runtime_with_blocks)
    assert len(set(calls)) == 1
    assert next(early, None) is None


@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (4, 2)])
def test_weights_come_from_near_and_from_distant_ranks(ranks: int, local: int) -> None:
    before = (*range(2 * ranks - 1), 0)
    after = (*before[1:], before[0])

    def body(comm: Communicator) -> None:
        with layer_on(comm, before) as layer:
            weights = Weights(comm, comm.rank, before)
            move(layer, weights, after)
            move(layer, weights, before)

    run_ranks(ranks, body, make_runtime=runtime_with_blocks, local_world_size=local)


def test_a_move_may_be_replaced_or_left() -> None:
    def body(comm: Communicator) -> None:
        layer, weights = layer_on(comm, TWICE), Weights(comm, comm.rank, TWICE)
        assert not layer.place(TURNED, weights.arrays)
        weights.step(layer)
        move(layer, weights, SPARSE)
        assert not layer.place(TWICE, weights.arrays)
        weights.step(layer)
        assert layer.place(SPARSE)
        weights.step(layer)
        assert not layer.place(TWICE, weights.arrays)
        layer.finalize()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


def test_wrong_weights_are_refused_on_all_ranks_and_change_nothing() -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, TWICE) as layer:
            weights = Weights(comm, comm.rank, TWICE)
            read_only = np.zeros((PER_RANK, 3))
            read_only.flags.writeable = False
            of_rank_1 = (
                (5, "expected a sequence of arrays, not 5"),
                ([], r"expected a sequence of arrays, not \[\]"),
                ([5], "expected an array"),
                ([np.zeros(PER_RANK + 1)], r"expected arrays with 2 rows, one for .*, not of shape \(3,\)"),
                ([np.zeros(())], r"not of shape \(\)"),
                ([np.zeros((PER_RANK, 4))[:, :3]], "contiguous"),
                ([read_only], "the array is read-only"),
            )
            for wrong, message in of_rank_1:
                error: Any = ArgumentError if comm.rank == 1 else TransferError
                start = "" if comm.rank == 1 else "rank 1 could not move weights of experts: ArgumentError: "
                with pytest.raises(error, match=f"^{start}weights: .*{message}"):
                    layer.place(TURNED, wrong if comm.rank == 1 else weights.arrays)
            sizes = r"^weights: rank \d has rows of \[.*\] bytes, and rank \d of \["
            for theirs in (weights.arrays[:1], None):
                with pytest.raises(ArgumentError, match=sizes):
                    layer.place(TURNED, theirs if comm.rank else weights.arrays)
            with pytest.raises(ArgumentError, match=r"^placement: differs between ranks"):
                layer.place(TURNED if comm.rank else SPARSE, weights.arrays)
            weights.step(layer)
            move(layer, weights, TURNED)

    run_ranks(3, body, make_runtime=runtime_with_blocks)


def test_a_move_ends_on_all_ranks_if_one_passes_other_arrays_or_another_placement() -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, TWICE) as layer:
            weights = Weights(comm, comm.rank, TWICE)
            other = on_device(comm, on_host(weights.factors).copy())
            assert not layer.place(TURNED, weights.arrays)
            with pytest.raises(ArgumentError if comm.rank == 2 else TransferError, match="differ from those with"):
                layer.place(TURNED, [other if comm.rank == 2 else weights.factors, weights.large])
            assert not layer.place(TURNED, weights.arrays)
            with pytest.raises(ArgumentError, match=r"^placement: differs between ranks"):
                layer.place(TURNED if comm.rank else SPARSE, weights.arrays)
            weights.step(layer)
            move(layer, weights, TURNED)

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.parametrize(("of", "name"), [(Agent, "prepare"), (Transfer, "done")])
def test_a_failed_transfer_of_one_rank_ends_the_move_on_all(
    monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    failing, whole = iter([True]), getattr(of, name)

    def fails(*given: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rank-2" and next(failing, False):
            raise DisconnectedError("of the test")
        return whole(*given, **options)

    monkeypatch.setattr(of, name, fails)

    def body(comm: Communicator) -> None:
        with layer_on(comm, TWICE) as layer:
            weights = Weights(comm, comm.rank, TWICE)
            assert not layer.place(TURNED, weights.arrays)
            weights.step(layer)
            message = "" if comm.rank == 2 else "rank 2 could not move weights of experts: DisconnectedError: "
            with pytest.raises(TransferError, match=f"^{message}of the test$"):
                layer.place(TURNED, weights.arrays)
            assert layer.placement == TWICE
            weights.step(layer)
            move(layer, weights, TURNED)

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="the memory of a killed rank is that of a process")
def test_a_source_that_is_killed_in_a_move_leaves_the_former_placement() -> None:
    for rank, ended in enumerate(run_processes(4, PROGRAMS / "moved_experts.py")):
        if rank == 1:
            assert ended.returncode == -signal.SIGKILL
        else:
            assert ended.stdout.split("\n")[:2] == ["PeerLostError", "exact"], ended.stdout + ended.stderr


def test_the_weights_of_an_expert_that_no_remaining_rank_has_are_refused() -> None:
    def body(comm: Communicator) -> None:
        layer, weights = layer_on(comm, TWICE), Weights(comm, comm.rank, TWICE)
        with comm.shrink(exclude=[1]) if comm.rank != 1 else comm as left:
            if comm.rank == 1:
                return
            shrunk = layer.shrink(left)
            with pytest.raises(ArgumentError, match=r"^placement: no remaining rank has the weights of expert 2$"):
                shrunk.place((0, 2, 2, 0, 3, 1), weights.arrays)
            weights.step(shrunk)
            move(shrunk, weights, (0, 3, 2, 0, 0, 1))

    run_ranks(3, body)


@pytest.mark.host_only(reason="ranks are threads of one process that leave and join")
def test_a_move_ends_when_the_layer_shrinks_or_grows() -> None:
    whole, again = ThreadBootstrap.create(3), ThreadBootstrap.create(3)

    def stays(rank: int) -> None:
        with Communicator(whole[rank], "host", timeout=TIMEOUT) as comm:
            layer, weights = layer_on(comm, TWICE), Weights(comm, rank, TWICE)
            assert not layer.place(TURNED, weights.arrays)
            if rank == 1:
                return
            with comm.shrink(exclude=[1]) as left:
                shrunk = layer.shrink(left)
                assert shrunk.placement == TWICE
                weights.step(shrunk)
                assert not shrunk.place((0, 3, 2, 0, 3, 1), weights.arrays)
                with left.grow(again[rank]) as grown_comm, shrunk.grow(grown_comm) as grown:
                    assert grown.placement == TWICE
                    weights.step(grown)
                    move(grown, weights, TURNED)

    def joins() -> None:
        with Communicator(again[1], "host", timeout=TIMEOUT) as comm, layer_on(comm, TWICE) as layer:
            weights = Weights(comm, 1, TWICE)
            weights.step(layer)
            move(layer, weights, TURNED)

    with ThreadPoolExecutor(4) as pool:
        for future in [*(pool.submit(stays, rank) for rank in range(3)), pool.submit(joins)]:
            future.result(4 * TIMEOUT)


def test_all_remaining_ranks_have_the_weights_if_one_is_lost_in_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 learns of a loss in the last call of a move, in which the other ranks change their placement."""

    def body(comm: Communicator) -> None:
        layer, weights = layer_on(comm, TWICE), Weights(comm, comm.rank, TWICE)
        exchange, failed = comm.group.exchange, []
        gather = exchange.all_gather

        def fails(value: Any, codec: Any, purpose: str) -> Any:
            everyone = gather(value, codec, purpose)
            if all(getattr(theirs, "arrived", False) for theirs in everyone):
                failed.append(1)
                raise PeerLostError("of the test")
            return everyone

        if comm.rank == 2:
            monkeypatch.setattr(exchange, "all_gather", fails)
            with pytest.raises(PeerLostError, match="of the test"):
                move(layer, weights, TURNED)
            assert layer.placement == TWICE
        else:
            while not layer.place(TURNED, weights.arrays):
                weights.step(layer)
        with layer.shrink() as left:
            assert left.placement == TURNED
            weights.step(left)
            move(left, weights, SPARSE)

    run_ranks(3, body)
