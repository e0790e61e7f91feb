"""Collectives that streams start and proxies run, directly on the callers' arrays: results, order, failures."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from proxyccl import (
    ArgumentError,
    Communicator,
    MismatchError,
    ResourceError,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.channels import memory, symmetric
from proxyccl.channels.collectives import move_schedules, reductions
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.channels.schedules import rings as schedule_rings
from proxyccl.device._native import lib
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.arrays.view import ArrayView
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtimes import open_runtime
from proxyccl.device.stream_operations import CopyBytes, Operation, StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.schedule import Schedule, SchedulePost, ScheduleReceive, ScheduleSend, ScheduleWait
from proxyccl.proxy.trigger import MAX_MEMORIES
from support import hanging
from support.cases.reference import Call
from support.cases.span_calls import COLLECTIVES, KINDS, Kind, SpanCalls, allocate
from support.device_arrays import barrier, on_device, on_host
from support.devices import RUNTIME, processes, with_the_largest_once_more, world_sizes
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.running import TIMEOUT, impatient, run_mpi, run_ranks, wait_for

pytestmark = [pytest.mark.daemon, pytest.mark.hip]
# Marks tests that need not run with proxies in a daemon, because other tests cover the same steps of a daemon.
NO_PROXY = pytest.mark.no_proxy

SHORT = 2.0
SHARES = (0, 1, 17, 603, 65_537)


@pytest.fixture(scope="module", params=with_the_largest_once_more(world_sizes(1, 2, 3)), ids=lambda n: f"{n}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_moves_spans_of_any_length_and_offset(ranks: Ranks, collective: str, kinds: tuple[Kind, Kind]) -> None:
    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, max(SHARES) * comm.world_size, kinds)
        for seed, share in enumerate(SHARES):
            for in_place in (False, True):
                calls.run(collective, share, seed, in_place=in_place, root=seed % comm.world_size)

    ranks.run(body)


def test_ranks_may_give_arrays_of_different_kinds(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        kinds: tuple[Kind, Kind] = ("private", "empty") if comm.rank % 2 else ("empty", "private")
        calls = SpanCalls(comm, 5000 * comm.world_size, kinds)
        for seed, collective in enumerate(COLLECTIVES):
            calls.run(collective, 5000, seed)

    ranks.run(body)


@pytest.mark.parametrize("kinds", [("empty", "empty"), ("private", "private")], ids="-".join)
def test_a_call_may_take_several_schedules(kinds: tuple[Kind, Kind]) -> None:
    def body(comm: Communicator) -> None:
        comm.collectives.by_proxy().longest_round = 1000
        calls = SpanCalls(comm, 2345 * comm.world_size, kinds)
        for seed, collective in enumerate(COLLECTIVES):
            for in_place in (False, True):
                calls.run(collective, 2345, seed, in_place=in_place)

    run_ranks(max(world_sizes(1, 2, 3)), body)


@pytest.mark.parametrize("kinds", [("empty", "empty"), ("private", "private"), ("private", "empty")], ids="-".join)
def test_little_goes_through_pinned_memory(kinds: tuple[Kind, Kind]) -> None:
    def body(comm: Communicator) -> None:
        comm.collectives.by_proxy().memories.pinned_bytes = 4096
        calls = SpanCalls(comm, 2000 * comm.world_size, kinds)
        for seed in range(24):
            share = (1, 700, 1999)[seed // 3 % 3]  # shares below and above `pinned_bytes`
            calls.run(COLLECTIVES[seed % 3], share, seed, in_place=seed % 2 == 1, root=seed % comm.world_size)

    run_ranks(max(world_sizes(1, 2, 3)), body)


@pytest.mark.hip_full
@pytest.mark.parametrize(
    ("in_place", "kind"),
    [
        # Without --full, each kind of memory is tested once, either in place or out of place.
        pytest.param(in_place, kind, marks=pytest.mark.full if in_place != (kind == "private") else [])
        for in_place in (False, True)
        for kind in KINDS
    ],
)
def test_reduces_in_pieces_and_rounds(kind: Kind, in_place: bool) -> None:
    """Reduces arrays of lengths below and above the limits that the test sets."""
    counts = (1, 3, 500, 1031, 4096, 10_007)

    def body(comm: Communicator) -> None:
        by_proxy = comm.collectives.by_proxy()
        by_proxy.shortest_piece, by_proxy.longest_round = 1024, 20_000
        by_proxy.one_crossing_bytes, by_proxy.memories.pinned_bytes = 2048, 1024
        rank, ranks = comm.rank, comm.world_size
        stream = comm.runtime.create_stream()
        for count in counts:
            values = np.random.default_rng(count).integers(-50, 50, (ranks, count * ranks)).astype(np.int32)
            expected = values.sum(axis=0)
            own = slice(rank * count, (rank + 1) * count)
            x, out = (elements(allocate(comm, 4 * count * ranks, kind)) for _ in range(2))
            write(comm, x, values[rank])
            share = part(x if in_place else out, rank * count, count)
            comm.reduce_scatter(x, out=share, algorithm="proxy", stream=stream)
            comm.synchronize(stream)
            assert (read(comm, share) == expected[own]).all()
            write(comm, x, values[rank])
            barrier(comm)
            result = x if in_place else out
            comm.all_reduce(x, out=result, algorithm="proxy", stream=stream)
            comm.synchronize(stream)
            assert (read(comm, result) == expected).all()

    run_ranks(max(world_sizes(1, 2, 3)), body)


def elements(view: ArrayView) -> ArrayView:
    return replace(view, shape=(view.nbytes // 4,), dtype=as_dtype("int32"))


def part(view: ArrayView, begin: int, count: int) -> ArrayView:
    return replace(view, ptr=view.ptr + 4 * begin, shape=(count,))


def write(comm: Communicator, view: ArrayView, values: NDArray[np.int32]) -> None:
    comm.runtime.copy(view.ptr, np.ascontiguousarray(values).ctypes.data, view.nbytes)


def read(comm: Communicator, view: ArrayView) -> NDArray[np.int32]:
    values = np.empty(view.shape, np.int32)
    comm.runtime.copy(values.ctypes.data, view.ptr, values.nbytes)
    return values


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_moves_megabytes(ranks: Ranks, collective: str) -> None:
    share = 1_100_001

    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, share * comm.world_size)
        for in_place in (False, True):
            calls.run(collective, share, 1, in_place=in_place)

    ranks.run(body)


@NO_PROXY
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "broadcast", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("more", [0, 1])
def test_between_nodes_kernels_move_short_shares_and_schedules_longer_ones(collective: str, more: int) -> None:
    longest = open_runtime(RUNTIME).launch_defaults.proxied_kernel_bytes
    nodes = max(world_sizes(1, 2, 3))
    count = longest + more if collective != "all_reduce" else (longest + more) * nodes
    call = Call(collective, count=count, dtype="uint8", in_place=False)

    def body(comm: Communicator) -> None:
        collectives = comm.collectives
        chosen = collectives.choose(collective, Request(), as_dtype("uint8"), max(call.sizes(nodes)))
        if nodes > 1:
            assert collectives.goes_by_schedule(chosen) == (more > 0 or longest == 0)
        if count > 0:
            call.run(comm)
        if longest > 0:
            replace(call, algorithm="two_shot" if collective == "all_reduce" else "kernels").run(comm)

    run_ranks(nodes, body, local_world_size=1)


@NO_PROXY
@pytest.mark.hip_full
def test_many_calls_of_all_kinds(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """With --full, makes more calls than the library keeps prepared."""
    count = 1000 if pytestconfig.getoption("--full") else 250

    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, 700 * comm.world_size)
        for seed in range(count):
            collective = COLLECTIVES[seed * 7 % 3]
            calls.run(collective, 1 + seed * 37 % 700, seed, in_place=seed % 2 == 1, root=seed % comm.world_size)

    ranks.run(body)


def test_calls_queued_on_one_stream_run_in_order(ranks: Ranks) -> None:
    """Each call gathers the result of the previous call, without a wait in between."""
    share, rounds = 1000, 50

    def body(comm: Communicator) -> None:
        calls, stream = SpanCalls(comm, share * comm.world_size), comm.runtime.create_stream()
        x, out = calls.spans("all_gather", share, 0, in_place=True)
        calls.load(x, out, 7)
        for i in range(rounds):
            root = i % comm.world_size
            calls.issue("all_gather", x, out, stream=stream)
            calls.issue("broadcast", out, out, root, stream)
        comm.synchronize(stream)
        calls.check("all_gather", share, x, out, 7)

    ranks.run(body)


def test_two_groups_at_once() -> None:
    """Two communicators' calls do not wait for each other, even if one daemon thread runs all their schedules."""
    size, share, rounds = max(world_sizes(1, 2)), 5000, 100
    # No thread may read its results before all calls are done, because reading waits for the whole device.
    together = threading.Barrier(2 * size)

    def body(comm: Communicator) -> None:
        calls, stream = SpanCalls(comm, share * comm.world_size), comm.runtime.create_stream()
        x, out = calls.spans("all_gather", share, 0, in_place=True)
        calls.load(x, out, 7)
        together.wait(TIMEOUT)
        for i in range(rounds):
            calls.issue("all_gather", x, out, stream=stream)
            calls.issue("broadcast", out, out, i % comm.world_size, stream)
        comm.synchronize(stream)
        together.wait(TIMEOUT)
        calls.check("all_gather", share, x, out, 7)

    with Ranks(size) as first, Ranks(size) as second, ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(group.run, body) for group in (first, second)]:
            ended.result()


@pytest.mark.hip_full
def test_several_workers_share_a_schedule() -> None:
    size = max(world_sizes(1, 2, 3))

    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, 5000 * comm.world_size)
        for seed in range(60):
            calls.run(COLLECTIVES[seed % 3], 1 + seed * 31 % 5000, seed)

    run_ranks(size, body, fifos=3, proxy_threads=3)


def test_schedules_and_kernels_triggers_take_turns(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, 1000 * comm.world_size)
        x = on_device(comm, np.empty(1000, np.float32))
        for seed in range(20):
            calls.run("all_gather", 1000, seed)
            comm.all_reduce(on_device(comm, np.full(1000, seed, np.float32)), out=x, algorithm="proxy")
            comm.synchronize()
            assert (on_host(x) == seed * comm.world_size).all()

    ranks.run(body)


@pytest.mark.slow
@NO_PROXY  # the tests of killed ranks below also use processes
@pytest.mark.hip_full
@pytest.mark.parametrize(
    "size",
    # Without --full, only the largest number of ranks runs as processes. The tests above run fewer ranks as threads.
    [
        pytest.param(size, marks=pytest.mark.full if size < processes(3) else [])
        for size in world_sizes(1, 2, 3, processes=True)
    ],
)
def test_ranks_as_processes(size: int) -> None:
    result = run_mpi(size, PROGRAMS / "by_proxy.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("correct") == size, result.stdout + result.stderr


# -- failures ---


failure_of = functools.partial(hanging.caught, within=SHORT + 5)  # a busy machine may need 5 s more than the time-out


def test_a_rank_that_never_comes_is_named_with_the_schedule() -> None:
    size = max(world_sizes(2, 3), default=2)
    failed = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        calls, stream = SpanCalls(comm, 100 * comm.world_size), comm.runtime.create_stream()
        x, out = calls.spans("all_gather", 100, 0, in_place=False)
        calls.run("all_gather", 100, 0)
        impatient(comm, SHORT)
        if comm.rank == 1:
            assert failed.wait(60)
            return failure_of(lambda: comm.synchronize(stream))
        for _ in range(3):  # the first call's failure also ends the two queued calls
            calls.issue("all_gather", x, out, stream=stream)
        error = failure_of(lambda: comm.synchronize(stream))
        failed.set()
        return error

    errors = run_ranks(size, body)
    for rank, error in enumerate(errors):
        assert isinstance(error, WaitTimeoutError), (rank, error)
        assert re.search(r"waited too long for rank 1 to join schedule \d$", str(error))
        assert error.peer == 1


@pytest.mark.hip_full
@pytest.mark.parametrize(
    # One collective suffices, because the schedules of all collectives wait for a peer's data with the same code.
    "collective",
    [pytest.param(each, marks=pytest.mark.full if each != "all_to_all" else []) for each in COLLECTIVES],
)
def test_a_killed_rank_is_named_on_the_others(collective: str) -> None:
    size, victim = processes(3), 1
    ended = run_processes(size, PROGRAMS / "failure.py", f"killed_in_a_schedule:{collective}")
    lines = [line for process in ended for line in process.stdout.splitlines()]
    for rank in range(size):
        if rank == victim:
            continue
        printed = [line for line in lines if line.startswith(f"rank {rank}: ")]
        assert len(printed) == 2, (lines, [process.stderr for process in ended])
        for line in printed:
            assert line.startswith(f"rank {rank}: PeerLostError peer={victim} late=False")


def channel_to_itself(comm: Communicator) -> int:
    links, rank = comm.group.links, comm.rank
    channel = comm.proxy.reserve_channel(links.connection(rank))
    word, handle = links.semaphore(rank, channel), links.semaphore_handle(rank, channel)
    comm.proxy.set_channel(channel, links.connection(rank), word, handle=handle)
    return channel


def ring(comm: Communicator, number: int) -> None:
    words, stream = comm.proxy.schedule_pointers, comm.runtime.create_stream()
    operations = [WriteValue(words.bell, number), WaitValue(words.done, 1), WriteValue(words.done, 0)]
    StreamOperations(comm.runtime, operations)(stream)
    comm.synchronize(stream)


def test_a_stream_works_between_the_stages_of_a_schedule() -> None:
    """The stream copies each piece that has arrived; the schedule sends the copy when the stream sets a gate word."""
    pieces = 3

    def body(comm: Communicator) -> None:
        first, second, third = (comm.empty(pieces, "uint64").fill(0) for _ in range(3))
        ids = [comm.register(array).id for array in (first, second, third)]
        channel, words, stream = channel_to_itself(comm), comm.proxy.schedule_pointers, comm.runtime.create_stream()
        between = comm.empty(pieces, "uint64").fill(0)
        schedule = Schedule(
            sends=(
                *(ScheduleSend(channel, ids[0], 8 * i, 8, dst_memory=ids[1], dst_offset=8 * i) for i in range(pieces)),
                *(
                    ScheduleSend(channel, ids[1], 8 * i, 8, dst_memory=ids[2], dst_offset=8 * i, gate=i + 1)
                    for i in range(pieces)
                ),
            ),
            receives=(
                *(ScheduleReceive(channel, stage=i) for i in range(pieces)),
                ScheduleReceive(channel, sends=pieces),
            ),
        )
        operations: list[Operation] = [WriteValue(words.bell, comm.proxy.add_schedule(schedule))]
        for i in range(pieces):
            operations += [
                WaitValue(words.stages[i], 1),
                CopyBytes(between.ptr + 8 * i, second.ptr + 8 * i, 8),
                CopyBytes(second.ptr + 8 * i, first.ptr + 8 * (pieces - 1 - i), 8),
                WriteValue(words.gate, i + 1),
            ]
        operations += [WaitValue(words.done, 1), WriteValue(words.done, 0), WriteValue(words.gate, 0)]
        operations += [WriteValue(stage, 0) for stage in words.stages[:pieces]]
        turn = StreamOperations(comm.runtime, operations)
        for seed in range(10):
            sent = np.arange(pieces, dtype=np.uint64) + 100 * seed
            first.upload(sent)
            turn(stream)
            comm.synchronize(stream)
            assert (between.numpy() == sent).all()
            assert (third.numpy() == sent[::-1]).all()

    run_ranks(1, body)


def test_what_a_schedule_waits_for_is_shown_in_the_order_of_its_steps() -> None:

    def body(comm: Communicator) -> None:
        proxy, words, channel = comm.proxy, comm.proxy.schedule_pointers, channel_to_itself(comm)
        source, target = (comm.register(comm.empty(64, "uint8")).id for _ in range(2))
        number = proxy.add_schedule(
            Schedule(
                sends=(ScheduleSend(channel, source, 0, 64, dst_memory=target, gate=1),),
                receives=(ScheduleReceive(channel, stage=0), ScheduleReceive(channel)),
            )
        )
        count = ctypes.c_uint64.from_address(comm.group.control.semaphore_host(channel))
        streams = [comm.runtime.create_stream() for _ in range(2)]
        resets = [WriteValue(word, 0) for word in (words.done, words.stages[0], words.gate)]
        assert proxy.schedule_waits() == []
        StreamOperations(comm.runtime, [WriteValue(words.bell, number), WaitValue(words.done, 1), *resets])(streams[0])

        def shown(kind: int) -> None:
            wait_for(lambda: proxy.schedule_waits() == [ScheduleWait(kind, 0, number)], f"it waits for kind {kind}")

        shown(lib.PROXYCCL_WAIT_SCHEDULE_DATA)
        count.value = 1
        shown(lib.PROXYCCL_WAIT_SCHEDULE_GATE)
        StreamOperations(comm.runtime, [WriteValue(words.gate, 1)])(streams[1])
        shown(lib.PROXYCCL_WAIT_SCHEDULE_DATA)
        count.value = 2
        comm.synchronize(streams[0])
        assert proxy.schedule_waits() == []

    run_ranks(1, body)


def test_a_schedule_that_is_not_there_is_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TriggerError, match=r"refused schedule 77.*does not exist"):
            ring(comm, 77)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        ({"src_offset": 1}, "leaves its source memory"),
        ({"src_offset": 1 << 63}, "leaves its source memory"),
        ({"dst_offset": 1}, "leaves the receiver's memory"),
        ({"src_memory": 300}, "leaves its source memory"),
        ({"channel": 900}, "channel id of the schedule is not in use"),
    ],
)
def test_what_a_send_may_not_do_is_refused_before_anything_moves(send: dict[str, int], reason: str) -> None:
    def body(comm: Communicator) -> None:
        source, target = (comm.empty(64, "uint8").fill(value) for value in (1, 2))
        steps = {
            "channel": channel_to_itself(comm),
            "src_memory": comm.register(source).id,
            "src_offset": 0,
            "nbytes": 64,
            "dst_memory": comm.register(target).id,
            **send,
        }
        number = comm.proxy.add_schedule(Schedule(sends=(ScheduleSend(**steps),)))
        with pytest.raises(TriggerError, match=rf"refused schedule {number}.*{reason}"):
            ring(comm, number)
        assert (target.numpy() == 2).all()

    run_ranks(1, body)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(posts=(SchedulePost(1024, 0, 0),)),
        Schedule(posts=(SchedulePost(0, 512, 0),)),
        Schedule(posts=(SchedulePost(0, 511, 1 << 32),)),
        Schedule(sends=(ScheduleSend(0, 0, 0, 1),)),
        Schedule(sends=(ScheduleSend(0, 512, 0, 1, dst_memory=0),)),
        Schedule(sends=(ScheduleSend(0, 0, 0, 1, post_channel=1024),)),
        Schedule(sends=(ScheduleSend(0, 0, 0, 1, dst_memory=0, gate_stage=16),)),
        Schedule(receives=(ScheduleReceive(1024),)),
        Schedule(joined=16),
    ],
    ids=repr,
)
def test_a_schedule_with_ids_out_of_range_is_refused(schedule: Schedule) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="schedule"):
            comm.proxy.add_schedule(schedule)

    run_ranks(1, body)


def test_schedules_are_numbered_anew_when_they_are_removed() -> None:
    def body(comm: Communicator) -> None:
        numbers = [comm.proxy.add_schedule(Schedule()) for _ in range(3)]
        assert len(set(numbers)) == 3
        for number in numbers:
            ring(comm, number)
            comm.proxy.remove_schedule(number)
        assert comm.proxy.add_schedule(Schedule()) > 0

    run_ranks(1, body)


def test_a_schedule_that_runs_is_not_removed() -> None:
    def body(comm: Communicator) -> None:
        proxy, stream, channel = comm.proxy, comm.runtime.create_stream(), channel_to_itself(comm)
        source, target = (comm.register(comm.empty(64, "uint8")).id for _ in range(2))
        schedule = Schedule(
            sends=(ScheduleSend(channel, source, 0, 64, dst_memory=target),),
            receives=(ScheduleReceive(channel, sends=2),),
        )
        sent = ctypes.c_uint64.from_address(comm.group.control.semaphore_host(channel))
        number = proxy.add_schedule(schedule)
        bell, done = proxy.schedule_pointers.bell, proxy.schedule_pointers.done
        StreamOperations(comm.runtime, [WriteValue(bell, number), WaitValue(done, 1), WriteValue(done, 0)])(stream)
        deadline = time.monotonic() + 30
        while sent.value != 1:  # after one send, the schedule waits for the second
            assert time.monotonic() < deadline
        with pytest.raises(ResourceError, match=f"schedule {number} runs"):
            proxy.remove_schedule(number)
        sent.value = 2
        comm.synchronize(stream)
        proxy.remove_schedule(number)

    run_ranks(1, body)


def test_calls_that_differ_are_named() -> None:
    size = max(world_sizes(1, 2))

    def body(comm: Communicator) -> BaseException | None:
        calls = SpanCalls(comm, 64 * comm.world_size)
        share = 8 + comm.rank
        x, out = calls.spans("all_gather", share, 0, in_place=False)
        impatient(comm, SHORT)
        return failure_of(lambda: (calls.issue("all_gather", x, out), comm.synchronize()))

    if size > 1:
        errors = run_ranks(size, body)
        assert any(isinstance(error, MismatchError) and error.argument == "count" for error in errors), errors


def test_memory_that_was_freed_is_not_named_again(ranks: Ranks) -> None:
    """Schedules name memory by id. New memory at the address of freed memory has a different id."""

    def body(comm: Communicator) -> None:
        used = []
        for seed in range(6):
            calls = SpanCalls(comm, 100 * comm.world_size)
            calls.run("all_gather", 100, seed)
            for array in calls.arrays:
                array.owner.free()
            comm.group.symmetric.update(wait=True)
            barrier(comm)
            comm.group.symmetric.update(wait=True)
            used.append(sum(limit > 0 for limit in comm.proxy.words.memory_limits[0:MAX_MEMORIES]))
            barrier(comm)
        assert used[-1] <= used[0]

    ranks.run(body)


@NO_PROXY
def test_a_call_wakes_the_peers_that_must_map_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 makes its call only after rank 0's call has returned, and rank 1's watcher does not wake by itself."""
    monkeypatch.setattr(WatchThread, "INTERVAL_MS", 60_000)
    issued = threading.Event()

    def body(comm: Communicator) -> None:
        x, longer = on_device(comm, np.ones(8, np.float32)), on_device(comm, np.ones(1 << 20, np.float32))
        comm.all_reduce(x, algorithm="proxy")
        comm.synchronize()
        if comm.rank == 1:
            assert issued.wait(TIMEOUT)
        stream = comm.runtime.create_stream()
        comm.all_reduce(longer, algorithm="proxy", stream=stream)
        issued.set()
        comm.synchronize(stream)
        assert (on_host(longer) == 2).all()

    run_ranks(2, body)


@pytest.mark.slow
@NO_PROXY
@pytest.mark.hip_full
def test_many_arrays_leave_memory_ids_for_stages() -> None:
    def body(comm: Communicator) -> None:
        arrays = [SpanCalls(comm, 100 * comm.world_size) for _ in range(MAX_MEMORIES // 2)]
        for seed, calls in enumerate(arrays):
            calls.run("all_gather", 100, seed)
        SpanCalls(comm, 5000 * comm.world_size, ("private", "private")).run("all_to_all", 5000, 1)

    run_ranks(max(world_sizes(1, 2)), body)


@pytest.mark.host_only("as on several hosts")
def test_registered_arrays_of_many_ranks_leave_memory_ids_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "MOST_RANKS", 1)
    monkeypatch.setattr(memory, "_SCHEDULE_IDS", 4)

    def body(comm: Communicator) -> None:
        arrays = [comm.empty(1000, np.float32) for _ in range(4)]
        registered = [comm.register(array) for array in arrays[:3]]
        assert [each.is_for_schedules for each in registered] == [True, True, False]
        for array in arrays:
            summed = comm.all_reduce(array.fill(comm.rank + 1), algorithm="proxy")
            assert np.all(on_host(summed) == 6)
        registered[0].close()
        assert comm.register(arrays[3]).is_for_schedules
        assert np.all(on_host(comm.all_reduce(arrays[3].fill(1), algorithm="proxy")) == 3)

    run_ranks(3, body)


def test_schedules_that_nobody_can_ring_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_rings, "_MOST_DROPPED", 8)

    def body(comm: Communicator) -> None:
        removed: list[int] = []
        remove = comm.proxy.remove_schedule

        def record(number: int) -> None:
            remove(number)
            removed.append(number)

        with monkeypatch.context() as recording:
            recording.setattr(comm.proxy, "remove_schedule", record)
            calls = SpanCalls(comm, 200 * comm.world_size)
            for seed in range(60):
                calls.run("all_gather", 1 + seed, seed)
                if seed % 4 == 3:
                    comm.group.launches.calls.clear()
        # At most 8 of the 60 schedules await removal, 4 are kept for later calls, and 16 are in flight.
        assert len(removed) >= 60 - 8 - 4 - 16

    run_ranks(max(world_sizes(2, 3), default=2), body)


@NO_PROXY
@pytest.mark.host_only("its kernels move data between nodes too, unless that is forbidden")
@pytest.mark.parametrize(
    ("dtype", "op", "most"), [("float16", "sum", 4), ("float16", "avg", 4), ("int64", "avg", 4), ("int64", "avg", 3)]
)
def test_a_hierarchy_has_schedules_between_nodes_where_kernels_do_not_reach(
    dtype: str, op: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For up to `most` ranks, the hierarchical algorithm uses schedules between nodes. For more ranks the algorithm
    uses kernels that wait for the proxy's copies.
    """
    steps, by_schedule = reductions.all_reduce_steps, []
    monkeypatch.setattr(reductions, "_MOST_SCHEDULED_RANKS", most)
    monkeypatch.setattr(reductions, "all_reduce_steps", lambda *call: by_schedule.append(call) or steps(*call))
    make = HostRuntime.__init__

    def without_proxied_kernels(self: HostRuntime, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        self.launch_defaults = structs.replace(self.launch_defaults, proxied_kernel_bytes=0, one_crossing_bytes=4096)

    monkeypatch.setattr(HostRuntime, "__init__", without_proxied_kernels)
    monkeypatch.setattr(move_schedules, "_SHORTEST_PIECE", 1024)

    def body(comm: Communicator) -> None:
        assert comm.collectives.goes_by_schedule("hierarchical")
        assert move_schedules.crosses_once(comm.collectives.by_proxy(), 1000)
        for turn, count in enumerate((1, 2, 17, 1000, 5003)):
            Call("all_reduce", dtype, op, None, count, turn % 5, in_place=turn % 2 == 0, seed=turn).run(comm)
            Call("all_gather", dtype, None, None, count, turn % 5, in_place=turn % 2 == 0, seed=turn).run(comm)

    run_ranks(4, body, local_world_size=2)
    assert bool(by_schedule) == (most == 4)
