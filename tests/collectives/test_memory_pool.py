"""Collectives of arrays in a pool. Another library allocates the pool's memory, and a communicator tracks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from proxyccl import Array, Communicator
from proxyccl.device.arrays.view import ArrayView
from proxyccl.device.memory.memory_pool import MemoryPool
from proxyccl.device.runtimes import open_runtime
from support.cases.memory import make_call, registered, room_for, symmetric, view_of
from support.cases.reference import Call
from support.cases.span_calls import Kind, SpanCalls
from support.device_arrays import barrier
from support.devices import RUNTIME, processes, world_sizes
from support.fakes.foreign_memory import ForeignMemory
from support.paths import PROGRAMS
from support.ranks import Ranks
from support.running import run_mpi, wait_for

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

LONG = open_runtime().launch_defaults.meeting_bytes
CALLS = [
    Call("all_reduce", algorithm="two_shot"),
    Call("reduce_scatter"),
    Call("all_gather"),
    Call("all_to_all"),
    Call("broadcast", root=1),
]


def on_own_devices(world_size: int) -> Ranks:
    """Opens ranks on different devices. A pool belongs to a device, so each rank needs a device of its own."""
    return Ranks(world_size, make_runtime=lambda rank: open_runtime(RUNTIME, rank))


@pytest.fixture(scope="module", params=world_sizes(2, 3), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with on_own_devices(request.param) as group:
        yield group


def follow(comm: Communicator) -> MemoryPool:
    """Makes a communicator follow its device's pool, as `Communicator.memory_pool` does after torch has made
    the pool.
    """
    pool = MemoryPool(comm.runtime)
    comm.group.symmetric.follow(pool)
    wait_for(lambda: not freed(comm), "freed segments are withdrawn")  # an earlier test may have freed segments
    return pool


def arrays(comm: Communicator, call: Call, count: int) -> list[Array]:
    """Returns new arrays that fill segments of the pool."""
    room = room_for(call, comm.world_size)
    return [ForeignMemory(comm.runtime, room).array() for _ in range(count)]


def free(comm: Communicator, *given: Array) -> None:
    """Waits until no rank uses the arrays, and frees their segments."""
    barrier(comm)
    for array in given:
        array.free()


def shown(comm: Communicator, array: Array) -> bool:
    """Waits until all peers have mapped an array that a call has announced. Returns True."""
    comm.group.symmetric.update()
    wait_for(lambda: registered(comm, array.view()), "the peers have replied")
    return True


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.collective)
def test_arrays_in_the_pool_are_registered(ranks: Ranks, call: Call) -> None:
    """The first call of each size comes before peers have mapped the segments. Later calls use slices that begin at
    different offsets on each rank.
    """

    def body(comm: Communicator) -> None:
        pool = follow(comm)
        before = pool.segments()
        for count in (17, LONG // 4 + 3):
            given = replace(call, count=count, in_place=False)
            source, target = arrays(comm, given, 2)
            make_call(comm, given, source, target)
            assert shown(comm, source)
            assert shown(comm, target)
            for seed, offset in enumerate((0, comm.rank, 4 * comm.rank)):
                make_call(comm, replace(given, seed=seed), source, target, offset)
            free(comm, source, target)
        wait_for(lambda: pool.segments() == before, "the pool's memory is freed")

    ranks.run(body)


def test_an_array_that_is_not_in_the_pool_has_all_ranks_stage(ranks: Ranks) -> None:
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        follow(comm)
        source, target = arrays(comm, call, 2)
        assert shown(comm, target)
        private = comm.runtime.allocate(target.nbytes)
        unknown = Array(comm.runtime, private, target.shape, target.dtype)
        for seed in range(3):
            make_call(comm, replace(call, seed=seed), source, unknown if comm.rank == 0 else target)
            make_call(comm, replace(call, seed=seed + 10), source, target)
        free(comm, source, target)

    ranks.run(body)


def test_segments_that_come_and_go(ranks: Ranks) -> None:
    """A segment is freed when no peer maps it. Peers map a new segment at the same address anew."""
    call = Call("all_gather", count=LONG // 4, in_place=False)

    def body(comm: Communicator) -> None:
        pool = follow(comm)
        source = symmetric(comm, room_for(call, comm.world_size))
        before = pool.segments()
        for seed in range(4):
            (target,) = arrays(comm, call, 1)
            view = target.view()
            make_call(comm, replace(call, seed=seed), source, target)
            assert shown(comm, target)
            make_call(comm, replace(call, seed=seed + 10), source, target)
            free(comm, target)
            wait_for(lambda: pool.segments() == before, "the pool's memory is freed")
            comm.runtime.synchronize()
            assert not registered(comm, view)

    ranks.run(body)


def test_a_freed_segment_stays_while_it_is_registered(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        pool = follow(comm)
        before = pool.segments()
        memory = ForeignMemory(comm.runtime, 4096)
        part = view_of(memory.array(), 1024, 100, "float32")
        comm.group.symmetric.update()
        registration = comm.register(part)
        barrier(comm)
        memory.close()
        comm.group.symmetric.update()
        barrier(comm)
        (left,) = [segment for segment in pool.segments() if segment not in before]
        assert left.freed
        # A peer whose other thread maps memory replies after the barrier.
        wait_for(lambda: registered(comm, part), "all peers have mapped the registered part")
        comm.deregister(registration)
        # `before` may contain a segment of an earlier test that has been freed meanwhile.
        wait_for(lambda: all(segment in before for segment in pool.segments()), "the pool's memory is freed")

    ranks.run(body)


def test_two_communicators_use_one_pool() -> None:
    """A segment is freed when both communicators have withdrawn it, and stays usable if one communicator is closed."""
    call, size = Call("all_gather", count=LONG // 4, in_place=False), max(world_sizes(2, 3), default=2)

    with on_own_devices(size) as first:
        with on_own_devices(size) as second:
            kept: list[tuple[Array, ...]] = [()] * size

            def allocate(comm: Communicator) -> None:
                follow(comm)
                kept[comm.rank] = tuple(arrays(comm, call, 3))
                make_call(comm, call, *kept[comm.rank][:2])
                assert shown(comm, kept[comm.rank][1])

            def share(comm: Communicator) -> None:
                follow(comm)
                assert shown(comm, kept[comm.rank][1])
                make_call(comm, replace(call, seed=1), *kept[comm.rank][:2])
                free(comm, kept[comm.rank][2])
                wait_for(lambda: not freed(comm), "what was freed is withdrawn")

            first.run(allocate)
            second.run(share)
            first.run(lambda comm: make_call(comm, replace(call, seed=2), *kept[comm.rank][:2]))

        def go_on(comm: Communicator) -> None:
            make_call(comm, replace(call, seed=3), *kept[comm.rank][:2])
            free(comm, *kept[comm.rank][:2])
            wait_for(lambda: not freed(comm), "what was freed is withdrawn")

        first.run(go_on)


def freed(comm: Communicator) -> list[int]:
    """Returns the ids of segments that the allocator has freed but whose memory is still allocated."""
    comm.group.symmetric.update()
    return [segment.number for segment in MemoryPool(comm.runtime).segments() if segment.freed]


def test_the_proxies_reach_segments(ranks: Ranks) -> None:
    """Proxies in a daemon can also map memory that the allocator's functions made."""

    def body(comm: Communicator) -> None:
        pool = follow(comm)
        before = pool.segments()
        arrays: list[Array] = []

        def segment(comm: Communicator, nbytes: int, _: Kind) -> ArrayView:
            arrays.append(ForeignMemory(comm.runtime, nbytes).array())
            return arrays[-1].view()

        calls = SpanCalls(comm, 5000 * comm.world_size, allocate=segment)
        for seed in range(3):
            calls.run("all_gather", 5000, seed)
            assert comm.collectives.by_proxy().memories.target(arrays[1].ptr, arrays[1].nbytes) is not None
        barrier(comm)
        free(comm, *arrays)
        wait_for(lambda: pool.segments() == before, "the pool's memory is freed")

    ranks.run(body)


@pytest.mark.slow
@pytest.mark.hip_full
def test_ranks_as_processes() -> None:
    """Peers in other processes map segments, even segments whose registered arrays were freed."""
    size = processes(3)
    done = run_mpi(size, PROGRAMS / "memory_pool.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: correct" for rank in range(size)]
