"""Layers that grow back, and layers whose experts move: a new process takes the place of a lost rank, and experts with
several places survive a loss.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import (
    ArgumentError,
    Communicator,
    CommunicatorError,
    EPAll2AllLayer,
    FileBootstrap,
    PeerLostError,
    ProxyCCLError,
    ResourceError,
    ThreadBootstrap,
    WaitTimeoutError,
)
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.expert_parallel import layer as layer_module
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.members import Members
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.group import Group
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks
from support.running import TIMEOUT, run_ranks

TOKENS, HIDDEN, TOPK, PER_RANK, RANKS = 5, 16, 2, 2, 3

pytestmark = pytest.mark.host_only(reason="ranks are threads of one process that leave and join")


def layer_on(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    sizes = TOKENS, HIDDEN, TOPK, comm.rank, RANKS * PER_RANK, comm.local_world_size, comm.world_size
    return EPAll2AllLayer(comm, *sizes, dtype="float32", **options)


def require_sums(layer: EPAll2AllLayer, number: int, of_place: Sequence[int] | None = None) -> NDArray[Any]:
    """Makes a step in which expert e multiplies its rows by e + 1. Checks the sums over the experts that are not lost.
    Returns the number of rows of each place of this rank.

    Args:
        layer: the layer.
        number: this rank's original number.
        of_place: the expert that each place holds; None for the layer's placement.
    """
    comm, rng = layer.ctx.communicator, np.random.default_rng(number)
    held = np.array(of_place or layer.placement or range(RANKS * PER_RANK))
    left = [held[place] for place in range(len(held)) if place // PER_RANK not in layer.lost_ranks]
    tokens = rng.integers(0, 50, (TOKENS, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, held.max() + 1, (TOKENS, TOPK)).astype(np.int32)
    rows, _, desc = layer.dispatch(on_device(comm, tokens), on_device(comm, ids))
    counts = on_host(desc.counts)[:, comm.rank * PER_RANK :][:, :PER_RANK].sum(axis=0)
    factors = np.repeat(held[number * PER_RANK :][:PER_RANK] + 1, counts).astype(np.float32)
    got = on_host(layer.combine(on_device(comm, on_host(rows) * factors[:, None]), desc))
    sums = ((ids + 1) * np.isin(ids, left)).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(got, tokens * sums.astype(np.float32))
    if desc.lost_slots is not None:
        np.testing.assert_array_equal(on_host(desc.lost_slots), ~np.isin(ids, left))
    return counts


def run_with_joining(
    lost: tuple[int, ...],
    stays: Callable[[int, EPAll2AllLayer], None],
    *joins: Callable[[], None],
    **options: Any,
) -> None:
    """Makes a layer on RANKS ranks, shrinks it without the lost ranks, and calls `stays` with each remaining rank's
    original number and layer. Calls each of `joins` in another thread.
    """
    bootstraps = ThreadBootstrap.create(RANKS)

    def old(rank: int) -> None:
        with Communicator(bootstraps[rank], "host", timeout=TIMEOUT) as comm:
            layer = layer_on(comm, **options)
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
    """The other ranks wait for a new rank that never joins, and learn immediately that a rank was lost."""
    whole, both = ThreadBootstrap.create(RANKS), threading.Barrier(2)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        both.wait(TIMEOUT)  # no rank is in a step any longer
        if rank == 2:
            comm.abort("of the test")
        else:
            with pytest.raises(CommunicatorError, match="of the test"):
                comm.grow(whole[rank])
            assert comm.group.failure.aborted

    run_with_joining((1,), stays)


def test_ranks_keep_their_communicator_if_a_new_rank_does_not_come() -> None:
    whole, again = ThreadBootstrap.create(RANKS), ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        with pytest.raises(WaitTimeoutError):
            comm.grow(whole[rank], timeout=0.5)
        require_sums(layer, rank)
        with comm.grow(again[rank]) as grown_comm, layer.grow(grown_comm) as grown:
            require_sums(grown, rank)

    def joins() -> None:
        with Communicator(again[1], "host", timeout=TIMEOUT) as comm, layer_on(comm) as layer:
            require_sums(layer, 1)

    run_with_joining((1,), stays, joins)


DIES_WHILE_IT_JOINS = """
import os, signal, sys
from proxyccl import Communicator, FileBootstrap
from proxyccl.channels.joining import meeting

meeting.open_runtime = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
Communicator(FileBootstrap(sys.argv[1], 1, 3), "host")
"""


def test_a_growth_ends_as_soon_as_a_new_process_has_ended(tmp_path: Path) -> None:
    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        with pytest.raises(PeerLostError, match="the process of rank 1 has ended"):
            comm.grow(FileBootstrap(tmp_path / "group", rank, RANKS))
        require_sums(layer, rank)

    def joins() -> None:
        ended = subprocess.run([sys.executable, "-c", DIES_WHILE_IT_JOINS, str(tmp_path / "group")], check=False)
        assert ended.returncode == -signal.SIGKILL

    run_with_joining((1,), stays, joins)


def test_a_growth_may_wait_longer_than_the_communicator() -> None:
    """Rank 0 leaves the growth at once, and rank 2 waits for a new rank for longer than the communicator's time-out."""

    class Broken:
        rank, world_size = 0, RANKS

        def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
            raise WaitTimeoutError("of the test")

    whole = ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        comm.timeout = 0.3
        with pytest.raises(WaitTimeoutError, match="did not come in time" if rank else "of the test"):
            comm.grow(whole[rank] if rank else Broken(), timeout=1)
        require_sums(layer, rank)

    run_with_joining((1,), stays)


@pytest.mark.parametrize("fails", [0, 2])
def test_all_ranks_or_none_get_the_grown_communicator(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """One rank can't open its part of the new communicator after all ranks have met."""
    whole = ThreadBootstrap.create(RANKS)
    opened = Collectives.start

    def start(collectives: Collectives) -> None:
        opened(collectives)
        if collectives.group is failing.get("group"):
            raise ResourceError("of the test")

    failing: dict[str, Any] = {}
    monkeypatch.setattr(Collectives, "start", start)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        comm = layer.ctx.communicator
        grow = comm.group.grow

        def watched(*given: Any, **options: Any) -> Any:
            group = grow(*given, **options)
            if rank == fails:
                failing["group"] = group
            return group

        monkeypatch.setattr(comm.group, "grow", watched)
        with pytest.raises(ProxyCCLError):
            comm.grow(whole[rank])
        require_sums(layer, rank)

    def joins() -> None:
        with pytest.raises(CommunicatorError), Communicator(whole[1], "host", timeout=TIMEOUT) as comm:
            comm.barrier()

    run_with_joining((1,), stays, joins)


# Experts 0 and 1 have two places, on different ranks.
TWICE = (0, 1, 2, 0, 3, 1)
MOVED = (0, 3, 2, 1, 1, -1)


@pytest.mark.parametrize("layout", ["expert", "rank", "padded"])
def test_tokens_go_to_the_nearest_place_of_their_expert(layout: str) -> None:
    """Ranks 0 and 1 share a node, and so do ranks 2 and 3. Tokens of node 1 choose expert 0, which has two places on
    node 0, and take turns at these places.
    """
    placement = (0, 1, 0, 2, 3, 1, 2, -1)

    def body(comm: Communicator) -> None:
        local, size = comm.local_world_size, comm.world_size
        sizes = 4, HIDDEN, 3, comm.rank, len(placement), local, size
        with EPAll2AllLayer(comm, *sizes, dtype="float32", layout=layout, placement=placement) as layer:
            ids = np.tile(np.array([0, 1, 4], np.int32), (4, 1))
            desc = layer.dispatch(on_device(comm, np.ones((4, HIDDEN), np.float32)), on_device(comm, ids))[2]
            # Each rank's number of rows at each place: of expert 0 and then of expert 1.
            of_0 = {0: [4, 0], 1: [0, 4]}.get(comm.rank, [2, 2])
            of_1 = [4, 0] if comm.rank < 2 else [0, 4]
            expected = [of_0[0], of_1[0], of_0[1], 0, 0, of_1[1], 0, 0]
            assert not on_host(desc.lost_slots).any()
            if layout == "expert":
                np.testing.assert_array_equal(on_host(desc.counts)[comm.rank], expected)
            everyone = np.array([list(each) for each in comm.all_gather_bytes(bytes(expected))])
            own = everyone[:, 2 * comm.rank : 2 * comm.rank + 2]
            if layout == "padded":
                np.testing.assert_array_equal(on_host(desc.expert_rows), own.sum(axis=0))
            if layout == "rank":
                chosen = on_host(desc.local_expert_ids)
                np.testing.assert_array_equal([(chosen == place).sum() for place in range(2)], own.sum(axis=0))

    run_ranks(4, body, make_runtime=runtime_with_blocks, local_world_size=2)


def test_experts_move_between_steps_and_survive_a_loss() -> None:
    whole = ThreadBootstrap.create(RANKS)

    def stays(rank: int, layer: EPAll2AllLayer) -> None:
        layer.place(MOVED)  # of expert 2, the only place is on the lost rank
        require_sums(layer, rank)
        with layer.ctx.communicator.grow(whole[rank]) as comm, layer.grow(comm) as grown:
            assert grown.placement == MOVED
            require_sums(grown, rank)
            grown.place(TWICE)
            require_sums(grown, rank)
            require_sums(layer, rank)

    def joins() -> None:
        with Communicator(whole[1], "host", timeout=TIMEOUT) as comm, layer_on(comm, placement=MOVED) as layer:
            require_sums(layer, 1)
            layer.place(TWICE)
            require_sums(layer, 1)

    run_with_joining((1,), stays, joins, placement=TWICE)


@pytest.mark.parametrize("given", [False, True])
def test_the_survivors_of_two_losses_have_the_latest_placement(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    """A rank was lost in `place`, when only rank 0 had changed its placement. Another rank is lost in `shrink`, when
    all ranks except rank 1 have the new layer.
    """
    failed: list[int] = []
    groups: list[Group] = []

    def fail_once(members: Members, options: LayerOptions, number: int) -> DispatchCombineContext:
        context = DispatchCombineContext(members, options, number)
        groups.append(members.group)
        if members.group.members and options.rank == 1 and not failed:
            failed.append(1)
            raise PeerLostError("of the test")
        return context

    monkeypatch.setattr(layer_module, "DispatchCombineContext", fail_once)

    def body(comm: Communicator) -> None:
        layer = layer_on(comm, placement=TWICE)
        require_sums(layer, comm.rank)
        places = layer.ctx.places
        assert places is not None
        if comm.rank == 0:
            places._fill(MOVED)
            places.placement, places.turns = MOVED, 1
        comm.all_gather_bytes(b"")
        if not given:
            layer = layer.shrink()
            with layer if comm.rank == 1 else layer.shrink() as left:
                assert left.placement == MOVED
                require_sums(left, comm.rank)
            return
        shrunk = comm.shrink()
        if comm.rank == 1:
            with pytest.raises(PeerLostError, match="of the test"):
                layer.shrink(shrunk)
        else:
            layer = layer.shrink(shrunk)
        if comm.rank > 0:
            with shrunk.shrink(exclude=[0]) as again, layer.shrink(again) as left:
                assert (left.placement, left.lost_ranks) == (MOVED, (0,))
                require_sums(left, comm.rank)
        shrunk.close()

    run_ranks(RANKS, body)
    for group in groups:  # no rank was lost, so no failure has closed the groups that the layers left
        group.close(reason="the test has ended")


def test_wrong_placements_are_refused_and_change_nothing() -> None:
    def body(comm: Communicator) -> None:
        for wrong, message in (
            ((0, 1, 2), r"expected 6 integers, one for each place, not \(0, 1, 2\)"),
            (("a",) * 6, "expected 6 integers"),
            ((0, 1, 2, 4, 1, 2), "expert 3 has no place"),
            ((0, -2, 2, 1, 1, 2), "-2 is not an expert; expected 0 to 2, or -1"),
            ((-1,) * 6, "expert 0 has no place"),
        ):
            with pytest.raises(ArgumentError, match=f"^placement: {message}"):
                layer_on(comm, placement=wrong)
        with pytest.raises(ArgumentError, match=r"^placement: differs between ranks 0 and 2$"):
            layer_on(comm, placement=MOVED if comm.rank else TWICE)
        with (
            layer_on(comm) as layer,
            pytest.raises(ArgumentError, match=r"^placement: the layer was made without one"),
        ):
            layer.place(TWICE)
        with layer_on(comm, placement=TWICE) as layer:
            with pytest.raises(ArgumentError, match=r"^placement: 4 is not an expert; expected 0 to 3, or -1$"):
                layer.place((0, 1, 2, 4, 3, 1))
            with pytest.raises(ArgumentError, match=r"^placement: differs between ranks"):
                layer.place(MOVED if comm.rank else TWICE)
            assert layer.placement == TWICE
            require_sums(layer, comm.rank)
            ids = np.full((TOKENS, TOPK), 5, np.int32)
            with pytest.raises(ArgumentError, match=r"^exp_indices: .* out of range; expected 0 to 4, where 4 drops"):
                layer.dispatch(on_device(comm, np.ones((TOKENS, HIDDEN), np.float32)), on_device(comm, ids))

    run_ranks(RANKS, body)
