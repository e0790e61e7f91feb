"""Layers that grow back: a new process takes the place of a lost rank, and has the experts of that rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, CommunicatorError, EPAll2AllLayer, ThreadBootstrap
from support.device_arrays import on_device, on_host
from support.running import TIMEOUT

TOKENS, HIDDEN, TOPK, PER_RANK, RANKS = 5, 16, 2, 2, 3

pytestmark = pytest.mark.host_only(reason="ranks are threads of one process that leave and join")


def layer_on(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    sizes = TOKENS, HIDDEN, TOPK, comm.rank, RANKS * PER_RANK, comm.local_world_size, comm.world_size
    return EPAll2AllLayer(comm, *sizes, dtype="float32", **options)


def require_sums(layer: EPAll2AllLayer, number: int) -> None:
    """Makes a step in which expert e multiplies its rows by e + 1. Checks the sums over the experts that are not lost.

    Args:
        layer: the layer.
        number: this rank's original number.
    """
    comm, rng = layer.ctx.communicator, np.random.default_rng(number)
    tokens = rng.integers(0, 50, (TOKENS, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, RANKS * PER_RANK, (TOKENS, TOPK)).astype(np.int32)
    rows, _, desc = layer.dispatch(on_device(comm, tokens), on_device(comm, ids))
    counts = on_host(desc.counts)[:, comm.rank * PER_RANK :][:, :PER_RANK].sum(axis=0)
    factors = np.repeat(number * PER_RANK + np.arange(PER_RANK) + 1, counts).astype(np.float32)
    got = on_host(layer.combine(on_device(comm, on_host(rows) * factors[:, None]), desc))
    left = ~np.isin(ids // PER_RANK, layer.lost_ranks)
    np.testing.assert_array_equal(got, tokens * ((ids + 1) * left).sum(axis=1, keepdims=True).astype(np.float32))


def run_with_joining(
    lost: tuple[int, ...], stays: Callable[[int, EPAll2AllLayer], None], *joins: Callable[[], None]
) -> None:
    """Makes a layer on RANKS ranks, shrinks it without the lost ranks, and calls `stays` with each remaining rank's
    original number and layer. Calls each of `joins` in another thread.
    """
    bootstraps = ThreadBootstrap.create(RANKS)

    def old(rank: int) -> None:
        with Communicator(bootstraps[rank], "host", timeout=TIMEOUT) as comm:
            layer = layer_on(comm)
            if rank in lost:
                return
            shrunk = comm.shrink(exclude=lost)
            layer = layer.shrink(shrunk)
            require_sums(layer, rank)
            stays(rank, layer)
            shrunk.close()

    with ThreadPoolExecutor(RANKS + len(joins)) as pool:
        futures = [*(pool.submit(old, rank) for rank in range(RANKS)), *(pool.submit(join) for join in joins)]
        for future in futures:
            future.result(4 * TIMEOUT)


def test_a_new_rank_has_the_experts_of_the_lost_rank() -> None:
    whole = ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        with layer.ctx.communicator.grow(whole[rank]) as comm, layer.grow(comm) as grown:
            assert (grown.lost_ranks, comm.rank) == ((), rank)
            require_sums(grown, rank)
            require_sums(layer, rank)  # the layer before the growth stays usable
            require_sums(grown, rank)

    def joins() -> None:
        with Communicator(whole[1], "host", timeout=TIMEOUT) as comm, layer_on(comm) as layer:
            require_sums(layer, 1)
            require_sums(layer, 1)

    run_with_joining((1,), stays, joins)


def test_one_of_two_lost_ranks_comes_back() -> None:
    part = ThreadBootstrap.create(2)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        with layer.ctx.communicator.grow(part[1]) as comm, layer.grow(comm, lost_ranks=[0]) as grown:
            assert (grown.lost_ranks, comm.rank) == ((0,), 1)
            require_sums(grown, rank)

    def joins() -> None:
        with Communicator(part[0], "host", timeout=TIMEOUT) as comm, layer_on(comm, lost_ranks=[0]) as layer:
            require_sums(layer, 1)

    run_with_joining((0, 1), stays, joins)


def test_every_rank_keeps_its_place_when_a_layer_grows() -> None:
    turned = ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        with layer.ctx.communicator.grow(turned[{0: 2, 2: 0}[rank]]) as comm:
            with pytest.raises(ArgumentError, match=rf"^communicator: gives this rank, {rank}, the place of rank"):
                layer.grow(comm)
            with pytest.raises(ArgumentError, match=r"^communicator: has 3 ranks; expected 2, with 1 still lost"):
                layer.grow(comm, lost_ranks=[1])
        require_sums(layer, rank)

    def joins() -> None:
        Communicator(turned[1], "host", timeout=TIMEOUT).close()

    run_with_joining((1,), stays, joins)


def test_a_rank_that_is_lost_before_a_new_rank_has_joined_ends_the_growth() -> None:
    """The other ranks wait for the new rank, which does not come, and learn at once that a rank was lost."""
    whole = ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        if rank == 2:
            comm.abort("of the test")
        else:
            with pytest.raises(CommunicatorError, match="of the test"):
                comm.grow(whole[rank])
            assert comm.group.failure.aborted

    run_with_joining((1,), stays)
