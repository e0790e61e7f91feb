"""Collectives of symmetric memory: ranks write directly to peers' arrays, and may mix symmetric and private arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.runtimes import open_runtime
from support.cases.memory import download, make_call, registered, room_for, symmetric, upload, view_of
from support.cases.reference import DTYPES, MOVES, Call, operations_of, poison
from support.device_arrays import barrier
from support.devices import runtime_with_blocks, world_sizes
from support.ranks import Ranks
from support.running import wait_for

# Ranks send shares of at least this many bytes only after all ranks have joined the call.
LONG = open_runtime().launch_defaults.meeting_bytes
CALLS = [
    Call("all_reduce", algorithm="two_shot"),
    Call("all_reduce"),
    Call("reduce_scatter"),
    Call("all_gather"),
    Call("all_to_all"),
    Call("broadcast", root=1),
    *(Call(name, algorithm="proxy", root=1) for name in ("all_reduce", "reduce_scatter", *MOVES)),
]


@pytest.fixture(
    scope="module",
    # Without --full, only three ranks run, because three ranks cover all code paths.
    params=[pytest.param(n, marks=pytest.mark.full if n != 3 else []) for n in world_sizes(2, 3, 5)],
    ids=lambda n: f"{n}-ranks",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, make_runtime=runtime_with_blocks) as group:
        yield group


def private(comm: Communicator, nbytes: int) -> ArrayView:
    """Returns an array in new memory that peers do not know about."""
    memory = comm.runtime.allocate(nbytes)
    device = (comm.runtime.name, comm.runtime.device)
    return ArrayView(memory.ptr, (nbytes,), as_dtype("uint8"), device, True, memory)


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "apart"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.collective}-{call.algorithm or 'auto'}")
def test_slices_at_different_offsets_of_different_ranks(ranks: Ranks, call: Call, in_place: bool) -> None:
    def body(comm: Communicator) -> list[bytes]:
        results = []
        for count in (1, 17, LONG // 4 + 3):
            given = replace(call, count=count, in_place=in_place)
            source = symmetric(comm, room_for(given, comm.world_size))
            target = source if in_place else symmetric(comm, room_for(given, comm.world_size))
            for offset in (0, comm.rank, 4 * comm.rank):
                results.append(make_call(comm, given, source, target, offset))
        return results

    results = ranks.run(body)
    if call.collective == "all_reduce":
        assert all(result == results[0] for result in results), "ranks got different bits"


def test_all_to_all_in_several_pieces_a_block(ranks: Ranks) -> None:
    call = Call("all_to_all", count=LONG // 4 + 100_003, in_place=False)

    def body(comm: Communicator) -> None:
        room = room_for(call, comm.world_size)
        make_call(comm, call, symmetric(comm, room), symmetric(comm, room))

    ranks.run(body)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_reduced_in_peers_arrays(ranks: Ranks, dtype: str) -> None:
    op = operations_of(dtype, "two_shot")[0]
    call = Call("all_reduce", dtype, op, algorithm="two_shot", count=5001)

    def body(comm: Communicator) -> bytes:
        array = symmetric(comm, room_for(call, comm.world_size))
        return make_call(comm, call, array, array)

    assert len(set(ranks.run(body))) == 1


@pytest.mark.parametrize("who", ["the first rank's", "the last rank's", "no rank's"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.collective}-{call.algorithm or 'auto'}")
def test_all_ranks_stage_where_one_array_is_private(ranks: Ranks, call: Call, who: str) -> None:
    """Each call with a private array is followed by a call in which all ranks use symmetric arrays."""
    call = replace(call, count=LONG // 4 + 1, in_place=False)

    def body(comm: Communicator) -> None:
        room = room_for(call, comm.world_size)
        source, reached, unknown = symmetric(comm, room), symmetric(comm, room), private(comm, room)
        is_private = comm.rank == {"the first rank's": 0, "the last rank's": comm.world_size - 1}.get(who, -1)
        for seed in range(2):
            make_call(comm, replace(call, seed=seed), source, unknown if is_private else reached)
            make_call(comm, replace(call, seed=10 + seed), source, reached)

    ranks.run(body)


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.collective != "reduce_scatter"], ids=lambda call: call.collective
)
def test_results_take_no_way_through_scratch_memory(ranks: Ranks, call: Call) -> None:
    call = replace(call, count=LONG, in_place=False, algorithm="two_shot" if call.collective == "all_reduce" else None)

    def body(comm: Communicator) -> None:
        room = room_for(call, comm.world_size)
        source, target = symmetric(comm, room), symmetric(comm, room)
        make_call(comm, call, source, target)
        staged = staging_memory(comm, reduces=call.collective == "all_reduce")
        untouched = poison(staged.nbytes, np.dtype(np.uint8))
        upload(comm, staged, untouched)
        make_call(comm, replace(call, seed=1), source, target)
        assert download(comm, staged).tobytes() == untouched.tobytes()
        barrier(comm)

    ranks.run(body)


# Maximum number of elements that ranks load directly from peers' arrays.
FEW = open_runtime().launch_defaults.offered_bytes // 4


@pytest.mark.parametrize("count", [1, 1003, FEW])
def test_few_elements_in_place_are_loaded_from_peers_arrays(ranks: Ranks, count: int) -> None:
    call = Call("all_reduce", "float32", "avg", "two_shot", count)

    def body(comm: Communicator) -> bytes:
        array = symmetric(comm, room_for(call, comm.world_size))
        make_call(comm, call, array, array)
        scratch = staging_memory(comm)
        untouched = poison(scratch.nbytes, np.dtype(np.uint8))
        upload(comm, scratch, untouched)
        result = make_call(comm, replace(call, seed=1), array, array)
        assert download(comm, scratch).tobytes() == untouched.tobytes()
        barrier(comm)
        return result

    assert len(set(ranks.run(body))) == 1


@pytest.mark.parametrize("who", ["the first rank", "the last rank", "all but the first"])
def test_ranks_in_place_beside_others_that_are_not(ranks: Ranks, who: str) -> None:
    """In each first call, only some ranks work in place; in each second call, all ranks do."""
    call = Call("all_reduce", count=1003, algorithm="two_shot")

    def body(comm: Communicator) -> None:
        room = room_for(call, comm.world_size)
        source, target = symmetric(comm, room), symmetric(comm, room)
        last = comm.world_size - 1
        offers = {"the first rank": comm.rank == 0, "the last rank": comm.rank == last}.get(who, comm.rank != 0)
        for seed in range(3):
            make_call(comm, replace(call, seed=seed, in_place=offers), source, source if offers else target)
            make_call(comm, replace(call, seed=10 + seed), source, source)

    ranks.run(body)


def test_a_reduction_leaves_the_inputs_whose_results_are_dropped(ranks: Ranks) -> None:
    """No rank writes to a peer's input, although ranks can access peers' inputs."""
    call = Call("all_reduce", count=1003, in_place=False)

    def body(comm: Communicator) -> None:
        x, out = view_of(symmetric(comm, 4 * call.count), 0, call.count, call.dtype), comm.empty(call.count)
        values = call.input(comm.rank, comm.world_size)
        upload(comm, x, values)
        for _ in range(3):
            barrier(comm)
            comm.reduce(x, root=0, algorithm="two_shot", out=out)
            comm.synchronize()
            barrier(comm)
            assert np.array_equal(download(comm, x), values)

    ranks.run(body)


def staging_memory(comm: Communicator, *, reduces: bool | None = None) -> ArrayView:
    """Returns the scratch memory of reductions (`reduces`), of calls that only move data, or (None) of both."""
    scratch, defaults = comm.collectives.team()._scratch, comm.runtime.launch_defaults
    data, results = 3 * defaults.data_bytes, 3 * defaults.result_bytes
    if reduces is None:
        return view_of(scratch, 0, data + results, "uint8")
    return view_of(scratch, data, results, "uint8") if reduces else view_of(scratch, 0, data, "uint8")


def test_memory_that_is_deregistered_freed_and_allocated_again(ranks: Ranks) -> None:
    """A new array at the address of an earlier registered array must not be mistaken for the earlier array."""
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        room = room_for(call, comm.world_size)
        source = symmetric(comm, room)
        for seed in range(4):
            array = ArrayView(*private_memory(comm, room))
            comm.register(array)
            assert registered(comm, array)
            make_call(comm, replace(call, seed=seed), source, array)
            comm.deregister(array)
            assert not registered(comm, array)
            make_call(comm, replace(call, seed=seed + 10), source, array)
            array.owner.close()  # type: ignore[attr-defined]
            again = ArrayView(*private_memory(comm, room))
            assert not registered(comm, again)
            make_call(comm, replace(call, seed=seed + 20), source, again)
            barrier(comm)

    ranks.run(body)


def private_memory(comm: Communicator, nbytes: int) -> tuple[Any, ...]:
    view = private(comm, nbytes)
    return view.ptr, view.shape, view.dtype, view.device, view.writable, view.owner


def test_arrays_that_were_freed_are_unmapped_by_their_peers(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        shared = comm.group.symmetric
        kept = len(shared.memories())
        for _ in range(3):
            arrays = [symmetric(comm, 4096) for _ in range(5)]
            barrier(comm)
            for array in arrays[1:]:
                array.free()
            del array, arrays  # an array is freed with its last reference
            # `kept` may still count a freed array of an earlier test.
            wait_for(lambda: len(shared.memories()) <= kept, "the peers have unmapped the freed arrays")
            barrier(comm)

    ranks.run(body)


def test_a_rank_maps_peers_arrays_while_its_proxy_adds_an_array(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def body(comm: Communicator) -> None:
        shared, proxy = comm.group.symmetric, comm.group.links.proxy
        make_call(comm, Call("all_gather", algorithm="proxy", count=16), comm.empty(64), comm.empty(1024))
        array = comm.empty(4096, "uint8")
        announced, add = shared.find(array.ptr, array.nbytes), proxy.add_memory
        assert announced is not None

        def slow(base: int, *arguments: Any, **options: Any) -> int:
            if base == array.ptr:
                barrier(comm)
                goes_on.wait(2)
            return add(base, *arguments, **options)

        if comm.rank == 0:
            monkeypatch.setattr(proxy, "add_memory", slow)
            shared.own_memory(announced)
            assert goes_on.is_set()
        else:
            barrier(comm)
            late = comm.empty(8192, "uint8")
            other = shared.find(late.ptr, late.nbytes)
            assert other is not None
            wait_for(lambda: shared.memories_at_peers(other), "the peers have mapped a new array")
            goes_on.set()
        barrier(comm)

    ranks.run(body)


def test_more_arrays_than_can_be_announced_are_staged(ranks: Ranks) -> None:
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        symmetric = comm.group.symmetric
        wait_for(lambda: not symmetric.withdrawn, "what was freed is withdrawn")
        kept = [comm.empty(16, "uint8")]
        while symmetric.find(kept[-1].ptr, kept[-1].nbytes) is not None:
            kept.append(comm.empty(16, "uint8"))
        room = room_for(call, comm.world_size)
        late = comm.empty(room, "uint8")
        assert not registered(comm, late.view())
        make_call(comm, call, late, comm.empty(room, "uint8"))
        del kept
        wait_for(lambda: not symmetric.withdrawn, "its entries are free for the next test")

    ranks.run(body)


def test_only_what_is_registered_can_be_deregistered(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="array: the array is not registered"):
            comm.deregister(comm.empty(4))

    ranks.run(body)
