"""`shrink`, and ranks that join: the new communicator's members and state, and refused calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    AbortedError,
    ArgumentError,
    ClosedError,
    Communicator,
    ExcludedError,
    MismatchError,
    PeerLostError,
    ThreadBootstrap,
    WaitTimeoutError,
)
from proxyccl.channels import group
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.joining.meeting import Meeting, meet_survivors
from proxyccl.channels.reports import reporter
from proxyccl.channels.symmetric import SymmetricMemory
from support.device_arrays import on_device, on_host
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import settled, settles
from support.running import TIMEOUT, run_ranks, wait_for

pytestmark = pytest.mark.hip


def total(comm: Communicator, value: float, **options: Any) -> float:
    """Returns the sum of a value over the ranks."""
    return float(on_host(comm.all_reduce(on_device(comm, np.full(5, value, np.float32)), **options))[0])


def call_until_it_fails(comm: Communicator) -> None:
    while True:
        total(comm, 1)


# Without --full, the cases still kill a rank at each stage, kill the first and the last rank, and leave only one rank.
@pytest.mark.parametrize(
    ("world_size", "killed"),
    [
        pytest.param(4, ["1=before"], marks=pytest.mark.full),
        pytest.param(4, ["0=before"], marks=pytest.mark.full),
        pytest.param(5, ["0=before", "4=before", "2=before"], marks=pytest.mark.full),
        pytest.param(4, ["3=before", "0=comes"], marks=pytest.mark.full),
        pytest.param(4, ["3=before", "0=assembled"], marks=pytest.mark.full),
        pytest.param(4, ["3=before", "1=joined"], marks=pytest.mark.full),
        (4, ["0=before", "3=starts"]),
        (5, ["4=before", "0=comes", "1=assembled", "2=joined"]),
        (3, ["0=before", "1=before"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.host_only(reason="more processes than most machines have GPUs")
def test_those_that_are_left_go_on(world_size: int, killed: list[str]) -> None:
    """All survivors agree on the members, whatever the stage of `shrink` at which ranks are killed."""
    lost = {int(argument[0]) for argument in killed}
    left = [rank for rank in range(world_size) if rank not in lost]
    first = sum(range(1, len(left) + 1))
    expected = f"{left} {[float(first), float(first * len(left)), float(len(left))]}\n"
    for rank, ended in enumerate(run_processes(world_size, PROGRAMS / "shrink.py", *killed)):
        assert ended.returncode == (-9 if rank in lost else 0), ended.stderr
        assert ended.stdout == ("" if rank in lost else expected)


@pytest.mark.daemon
@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.host_only(reason="more processes than most machines have GPUs")
def test_proxies_in_any_place_go_on(place: str) -> None:
    ended = run_processes(3, PROGRAMS / "shrink.py", "0=before", env={"PROXYCCL_PROXY": place})
    assert [(one.returncode, one.stdout) for one in ended[1:]] == [(0, "[1, 2] [3.0, 6.0, 2.0]\n")] * 2, ended


def test_the_excluded_take_no_part_and_the_communicator_goes_on() -> None:
    def body(comm: Communicator) -> None:
        kept = comm.empty(300, "float32").fill(1)
        comm.all_reduce(kept)
        if comm.rank != 1:
            shrunk = comm.shrink(exclude=[1])
            assert shrunk.members == (0, 2, 3)
            assert shrunk.members[shrunk.rank] == comm.rank
            assert shrunk.runtime is comm.runtime
            assert shrunk.job != comm.job
            assert total(shrunk, comm.rank) == 5
            assert total(shrunk, comm.rank, algorithm="proxy") == 5
            assert np.all(shrunk.all_reduce(kept).numpy() == 12)
            with pytest.raises(ClosedError, match="was shrunk before"):
                comm.shrink(exclude=[1])
            shrunk.close()
        assert total(comm, 1) == 4

    run_ranks(4, body)


def test_what_was_shrunk_may_end_before_what_it_gave() -> None:
    def body(comm: Communicator) -> None:
        kept = comm.empty(3000, "float32").fill(1)
        shrunk = comm.shrink()
        comm.close()
        with pytest.raises(ClosedError, match="expected `shrink` before `close`"):
            comm.shrink()
        assert np.all(shrunk.all_reduce(kept).numpy() == 3)
        again = shrunk.shrink()
        shrunk.close()
        assert np.all(again.all_reduce(kept).numpy() == 9)
        again.close()

    run_ranks(3, body)


def test_a_communicator_that_failed_without_a_loss_goes_on_with_all() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(AbortedError):
            call_until_it_fails(comm)
        shrunk = comm.shrink()
        assert shrunk.members == (0, 1, 2)
        assert comm.closed
        assert total(shrunk, 1) == 3
        shrunk.close()

    run_ranks(3, body)


@pytest.mark.own_proxy(reason="looks into the service")
def test_a_report_that_is_being_written_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shrink` waits for a report that is being written, because the report reads proxy memory that shrink frees."""
    collect, freed, groups = reporter.collect, [], []
    writing = [threading.Event(), threading.Event()]

    def slow(group: Any, *arguments: Any) -> Any:
        if group not in groups:  # a communicator of an earlier test may also write a report
            return collect(group, *arguments)
        proxy = group.links.proxy_if_started
        writing[group.rank].set()
        time.sleep(0.3)
        freed.append(proxy._freed)
        return collect(group, *arguments)

    monkeypatch.setattr(reporter, "collect", slow)
    monkeypatch.setattr(reporter, "_NOTE_SECONDS", 0.0)

    def fail(comm: Communicator) -> None:
        total(comm, 1, algorithm="proxy")
        if comm.rank == 1:
            comm.group.failure.file_exchange_failure(WaitTimeoutError("of the test"))
        call_until_it_fails(comm)

    def body(comm: Communicator) -> None:
        groups.append(comm.group)
        with pytest.raises(WaitTimeoutError):
            fail(comm)
        assert writing[comm.rank].wait(TIMEOUT)
        comm.shrink().close()

    run_ranks(2, body)
    assert freed == [False, False]


def test_a_rank_that_closed_the_communicator_is_not_waited_for() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.__exit__(ValueError, ValueError("of the program"), None)
            return
        with pytest.raises(AbortedError):
            call_until_it_fails(comm)
        shrunk = comm.shrink(timeout=TIMEOUT)
        assert shrunk.members == (1, 2)
        assert total(shrunk, 1) == 2
        shrunk.close()

    run_ranks(3, body)


def test_a_late_rank_is_told_that_the_others_went_on() -> None:
    gone, together = threading.Event(), threading.Barrier(2)

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert gone.wait(TIMEOUT)
            with pytest.raises(
                ExcludedError, match=r"rank 1 came too late: ranks \[0, 2\] continue without it"
            ) as raised:
                comm.shrink()
            assert raised.value.rank == 1
            return
        together.wait(TIMEOUT)
        shrunk = comm.shrink(timeout=1.0)
        shrunk.timeout = TIMEOUT
        assert shrunk.members == (0, 2)
        gone.set()
        assert total(shrunk, 1) == 2
        shrunk.close()

    run_ranks(3, body)


def test_what_was_shrunk_has_failed_where_a_rank_came_too_late() -> None:
    """After ranks 0 and 2 have shrunk without the late rank 1, no rank waits for another."""
    gone, together = threading.Event(), threading.Barrier(2)

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert gone.wait(TIMEOUT)
            with pytest.raises(
                WaitTimeoutError, match=r"rank [02] waited too long in the bootstrap for a call from rank 1"
            ):
                total(comm, 1)
            with pytest.raises(ExcludedError):
                comm.shrink()
            return
        together.wait(TIMEOUT)
        shrunk = comm.shrink(timeout=1.0)
        assert comm.closed
        gone.set()
        shrunk.close()

    run_ranks(3, body)


def test_what_is_lost_in_the_middle_of_a_shrink_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks agree on the members and then fail, and the next attempt also fails."""

    def fails(collectives: Collectives) -> None:
        if collectives.group.members:
            collectives.group.failure.abort("lost since")
            collectives.group.failure.check()
        start(collectives)

    def meets_once(whole: Meeting, *rest: Any) -> Meeting:
        if whole.members:
            raise PeerLostError("lost again")
        return meet_survivors(whole, *rest)

    def body(comm: Communicator) -> None:
        with pytest.raises(PeerLostError, match="lost again"):
            comm.shrink()

    start = Collectives.start
    monkeypatch.setattr(Collectives, "start", fails)
    monkeypatch.setattr(group, "meet_survivors", meets_once)
    run_ranks(2, body)  # descriptors that a process's first calls open may stay open
    before = settled()
    run_ranks(2, body)
    assert settles(before)


def test_ranks_that_exclude_different_ones_are_told() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match=r"exclude: \[.*\] here, \[.*\] on rank \d") as raised:
            comm.shrink(exclude=[3] if comm.rank else [])
        assert raised.value.argument == "exclude"
        with pytest.raises(ClosedError, match=r"that failed \(MismatchError\): make a new Communicator"):
            comm.shrink(exclude=[3])

    def members(comm: Communicator) -> None:
        if comm.rank < 3:
            body(comm)

    run_ranks(4, members)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ([4], "exclude: 4 is not a rank; expected 0 to 2"),
        (["1"], "exclude: '1' is not a rank"),
        ([0, 1, 2], "exclude: . is this rank; expected others"),
    ],
)
def test_what_is_no_rank_is_refused(exclude: list[Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=message):
            comm.shrink(exclude=exclude)
        assert total(comm, 1) == 3

    run_ranks(3, body)


def test_arrays_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers keep arrays of the old communicator mapped, so calls of the new communicator access the arrays directly."""
    withdrawn = []
    withdraw = SymmetricMemory.withdraw
    monkeypatch.setattr(
        SymmetricMemory, "withdraw", lambda self, range_: (withdrawn.append(range_), withdraw(self, range_))
    )

    def body(comm: Communicator) -> None:
        kept, gone = comm.empty(70_000, "float32").fill(1), comm.empty(100)
        registered = comm.register(comm.empty(500))
        shrunk = comm.shrink()
        symmetric = shrunk.group.symmetric
        ranges = [(array.ptr, array.nbytes) for array in (kept, gone)]
        assert all(symmetric.find(*range_) for range_ in [*ranges, (registered.ptr, registered.nbytes)])
        del gone
        wait_for(lambda: symmetric.find(*ranges[1]) is None, "it is withdrawn")
        comm.close()
        assert np.all(shrunk.all_reduce(kept).numpy() == 2)
        assert symmetric.find(*ranges[0]) is not None
        shrunk.close()

    run_ranks(2, body)
    assert withdrawn


def test_arrays_that_ended_after_the_failure_are_not_kept() -> None:
    meet = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        kept, freed, gone = comm.empty(100), comm.empty(100), comm.empty(100)
        comm.register(kept)
        ranges = [(array.ptr, array.nbytes) for array in (kept, freed, gone)]
        meet.wait(TIMEOUT)  # rank 0 aborts when no rank is in a call
        if comm.rank == 0:
            comm.abort("of the test")
        wait_for(lambda: comm.group.failure.aborted, "the failure is known")
        del gone
        shrunk = comm.shrink()
        announced = [shrunk.group.symmetric.find(*each) is not None for each in ranges]
        freed.free()
        kept.free()  # `kept` stays registered
        announced += [shrunk.group.symmetric.find(*each) is not None for each in ranges]
        assert announced == [True, True, False, True, False, False]
        shrunk.close()

    run_ranks(2, body)


def test_new_ranks_join_those_that_are_there() -> None:
    smaller, larger = ThreadBootstrap.create(3), ThreadBootstrap.create(4)

    results: list[float] = []

    def old(rank: int) -> None:
        with Communicator(smaller[rank], "host", timeout=TIMEOUT) as comm:
            kept = comm.empty(100, "float32").fill(1)
            with comm.grow(larger[rank]) as grown:
                assert (grown.rank, grown.world_size) == (rank, 4)
                results.append(float(grown.all_reduce(kept).numpy()[0]))
                results.append(total(grown, 1, algorithm="proxy"))
            assert total(comm, 1) == 3

    def new() -> None:
        with Communicator(larger[3], "host", timeout=TIMEOUT) as comm:
            x = comm.empty(100, "float32").fill(7)
            results.append(float(comm.all_reduce(x).numpy()[0]))
            results.append(total(comm, 1, algorithm="proxy"))

    threads = [threading.Thread(target=old, args=(rank,)) for rank in range(3)] + [threading.Thread(target=new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * TIMEOUT)
    assert sorted(results) == [4.0] * 4 + [10.0] * 4


def test_nodes_and_transports_stay_when_new_ranks_join() -> None:
    options: dict[str, Any] = {"local_world_size": 1, "transport": {(0, 1): "copy"}, "timeout": TIMEOUT}
    smaller, larger = ThreadBootstrap.create(2), ThreadBootstrap.create(3)

    def described(comm: Communicator) -> tuple[object, ...]:
        assert total(comm, 1) == 3
        return comm.topology.nodes, comm.topology.forced

    def old(rank: int) -> tuple[object, ...]:
        with Communicator(smaller[rank], "host", **options) as comm, comm.grow(larger[rank]) as grown:
            return described(grown)

    def new() -> tuple[object, ...]:
        with Communicator(larger[2], "host", **options) as comm:
            return described(comm)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(old, 0), pool.submit(old, 1), pool.submit(new)]
        assert [future.result(4 * TIMEOUT) for future in futures] == [((0, 1, 2), {(0, 1): "copy"})] * 3
