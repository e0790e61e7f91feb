"""`split`: a part's members, the resources that a part shares with the whole communicator, and the order of closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    AbortedError,
    ArgumentError,
    ClosedError,
    Communicator,
    FileBootstrap,
    MismatchError,
    ProxyCCLError,
    ResourceError,
    RuntimeUnavailableError,
    ThreadBootstrap,
    WaitTimeoutError,
)
from proxyccl.channels import group
from proxyccl.channels.joining.topology import Topology
from proxyccl.channels.liveness.watcher import Watcher
from support.device_arrays import on_device, on_host
from support.devices import ON_HOST
from support.paths import TESTS
from support.processes import run_processes
from support.ranks import live_threads, open_descriptors, settled, settles
from support.running import TIMEOUT, run_ranks

PROGRAM = TESTS / "support" / "programs" / "split.py"


def total(comm: Communicator, value: float, **options: Any) -> float:
    """Returns the sum of a value over the ranks."""
    return float(on_host(comm.all_reduce(on_device(comm, np.full(5, value, np.float32)), **options))[0])


def ended(check: Callable[[], None]) -> BaseException:
    """Calls `check` until it raises an exception, and returns that exception."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            check()
        except Exception as error:
            return error
        time.sleep(0.005)
    raise AssertionError("it goes on")


def test_members_are_numbered_by_the_list_and_others_take_no_part() -> None:
    def body(comm: Communicator) -> None:
        members = [2, 0, 3]
        if comm.rank in members:
            part = comm.split(members)
            assert (part.rank, part.world_size) == (members.index(comm.rank), 3)
            assert part.runtime is comm.runtime
            assert part.job != comm.job
            assert total(part, comm.rank) == 5
            assert total(part, comm.rank, algorithm="proxy") == 5
            ring = np.zeros(1, np.int32)
            part.send(on_device(part, np.full(1, part.rank, np.int32)), (part.rank + 1) % 3)
            assert on_host(part.recv(on_device(part, ring), (part.rank - 1) % 3))[0] == (part.rank - 1) % 3
        assert total(comm, 1) == 4

    run_ranks(4, body)


def test_parts_are_made_at_once_and_of_parts() -> None:
    def body(comm: Communicator) -> None:
        half = comm.split([0, 1] if comm.rank < 2 else [2, 3])
        again = comm.split([0, 1] if comm.rank < 2 else [2, 3])
        assert half.job != again.job
        alone = half.split([half.rank])
        pair = half.split([1, 0], timeout=7)
        assert pair.timeout == 7
        assert alone.group.links.host_ranks == 4  # the number of ranks on the host, not the number of ranks in the part
        assert (total(alone, 3), total(pair, comm.rank), total(again, 1)) == (3, 1 if comm.rank < 2 else 5, 2)
        array = half.empty(4).fill(1)
        half.register(array)
        assert total(comm, 1) == 4

    run_ranks(4, body)


def test_a_part_of_rehearsed_nodes() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank != 1:
            part = comm.split([0, 2, 3])
            assert part.topology.nodes == (0, 1, 1)
            assert total(part, comm.rank) == 5

    run_ranks(4, body, local_world_size=2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1, 2], "ranks: 2 is not a rank; expected 0 to 1"),
        ([0, 0], "ranks: rank 0 is given twice"),
        ([], "is not among"),
        (["0"], "ranks: '0' is not a rank"),
    ],
)
def test_wrong_ranks_are_refused(ranks: list[Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=message):
            comm.split(ranks)

    run_ranks(2, body)


def test_members_that_differ_in_the_list_are_told() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match=r"ranks: \[., .\] here, \[., .\] on rank"):
            comm.split([0, 1] if comm.rank == 0 else [1, 0])
        assert total(comm.split([0, 1]), 1) == 2
        assert comm.all_gather_bytes(bytes([comm.rank]) * (20000 + comm.rank)) == [bytes(20000), b"\1" * 20001]

    run_ranks(2, body)


def test_a_member_that_stays_away_is_named_and_the_rest_goes_on() -> None:
    timeout = 0.2 if ON_HOST else 3  # seconds; on shared GPUs rank 2 may be slow

    def body(comm: Communicator) -> None:
        if comm.rank != 1:
            with pytest.raises(
                WaitTimeoutError, match=rf"split: ranks \[1\] did not come within {timeout} s"
            ) as caught:
                comm.split([0, 1, 2], timeout=timeout)
            assert caught.value.peer == 1
        assert total(comm, 1) == 3
        assert total(comm.split([0, 1, 2]), 1) == 3

    run_ranks(3, body)


def test_threads_split_the_same_ranks_at_once_over_bootstraps_of_the_members() -> None:
    """Two ranks split concurrently with several bootstraps (one is None), each rank in a different order. Calls with
    the same bootstrap match.
    """
    meetings = [ThreadBootstrap.create(2) for _ in range(2)]

    def body(comm: Communicator) -> None:
        own = [bootstraps[comm.rank] for bootstraps in meetings]
        order = [0, 1, None] if comm.rank else [None, 1, 0]
        with ThreadPoolExecutor(3) as pool:
            parts = {
                number: pool.submit(
                    comm.split, [0, 1], bootstrap=None if number is None else own[number], timeout=TIMEOUT
                )
                for number in order
            }
        for number in (0, 1, None):
            value = 7.0 if number is None else number
            assert total(parts[number].result(), value) == 2 * value
        if comm.rank:
            with pytest.raises(ArgumentError, match=r"bootstrap: must have the rank and world_size \(0, 2\)"):
                comm.split([1, 0], bootstrap=own[0])

    run_ranks(2, body)


def test_an_error_of_a_meeting_over_a_bootstrap_names_the_ranks_of_the_whole() -> None:
    members = [2, 1]
    bootstraps = ThreadBootstrap.create(2)

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            with pytest.raises(
                WaitTimeoutError, match=r"between ranks 2 and 1, which are 0 and 1 here: .* ranks \[1\]"
            ) as caught:
                comm.split(members, timeout=0.2, bootstrap=bootstraps[0])
            assert (caught.value.rank, caught.value.peer) == (2, 1)
        assert total(comm, 1) == 3

    run_ranks(3, body)


def test_the_end_of_a_part_leaves_the_rest_alone() -> None:
    def body(comm: Communicator) -> None:
        first, second = comm.split([0, 1]), comm.split([0, 1])
        total(first, 1)
        comm.barrier()
        if comm.rank == 0:
            first.abort("for the test")
        assert isinstance(ended(first.check), AbortedError)
        assert total(second, 1) == 2
        assert total(comm, 1) == 2

    run_ranks(2, body)


def test_an_abort_ends_the_parts_by_the_same_exception() -> None:
    all_have_split = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        part = comm.split([1, 0])
        deeper = part.split([0, 1])
        all_have_split.wait(TIMEOUT)
        if comm.rank == 0:
            comm.abort("for the test")
        whole = ended(comm.check)
        assert isinstance(whole, AbortedError)
        for each in (deeper, part):
            again = ended(each.check)
            assert (type(again), str(again)) == (type(whole), str(whole))
        with pytest.raises(AbortedError):
            total(part, 1)

    run_ranks(2, body)


def test_closing_closes_the_parts_in_any_order() -> None:
    """Both ranks close the whole communicator; rank 1 first closes two of its parts."""

    def body(comm: Communicator) -> None:
        parts = [comm.split([0, 1]) for _ in range(3)]
        for part in parts:
            assert total(part, 1) == 2
        started = time.monotonic()
        if comm.rank == 1:
            parts[2].close()
            parts[0].close(wait=False)
        comm.close()
        assert time.monotonic() - started < TIMEOUT
        for part in parts:
            assert part.closed
            with pytest.raises(ClosedError):
                total(part, 1)
            part.close()

    run_ranks(2, body)
    before = settled()
    run_ranks(2, body)
    assert settles(before)


def test_a_part_may_end_by_itself_while_the_whole_is_closed() -> None:
    """`close` may find a part in the list of parts although another thread has already freed the part's resources."""

    def body(comm: Communicator) -> None:
        part = comm.split([0, 1])
        part.close()
        comm.group._children.append(part.group)
        comm.close()

    run_ranks(2, body)


def test_a_part_costs_few_descriptors_and_no_thread() -> None:
    def body(comm: Communicator) -> None:
        total(comm, 1)
        comm.barrier()
        before = open_descriptors(), live_threads()
        comm.barrier()
        parts = [comm.split([0, 1]) for _ in range(10)]
        for part in parts:
            assert total(part, 1) == 2
        comm.barrier()
        descriptors, threads = open_descriptors(), live_threads()
        assert threads <= before[1]
        assert descriptors - before[0] <= 2 * 10 * 9
        comm.barrier()

    run_ranks(2, body)


def test_a_part_that_does_not_open_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = group.Watcher

    def watch_the_whole(*args: Any, parent: Watcher | None, **options: Any) -> Watcher:
        if parent is not None:
            raise ResourceError("too few descriptors")
        return watch(*args, parent=parent, **options)

    def body(comm: Communicator) -> None:
        with pytest.raises(ResourceError, match="too few descriptors"):
            comm.split([0, 1])
        assert total(comm, 1) == 2

    run_ranks(2, lambda comm: total(comm, 1))
    before = settled()
    monkeypatch.setattr(group, "Watcher", watch_the_whole)
    run_ranks(2, body)
    assert settles(before)


def test_ranks_of_several_hosts_meet_over_a_subset_of_the_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topology, "spans_hosts", True)
    subsets: dict[int, list[ThreadBootstrap]] = {}
    making = threading.Lock()

    def subset(bootstrap: ThreadBootstrap, members: Sequence[int], key: int) -> ThreadBootstrap:
        with making:
            return subsets.setdefault(key, ThreadBootstrap.create(len(members)))[members.index(bootstrap.rank)]

    def refused(comm: Communicator) -> None:
        with pytest.raises(RuntimeUnavailableError, match="ThreadBootstrap can't join some of its ranks alone"):
            comm.split([0, 1, 2])

    def body(comm: Communicator) -> None:
        if comm.rank != 1:
            assert total(comm.split([2, 0]), comm.rank) == 2

    run_ranks(3, refused)
    monkeypatch.setattr(ThreadBootstrap, "subset", subset, raising=False)
    run_ranks(3, body)
    assert len(subsets) == 1


@pytest.mark.parametrize("failure", [WaitTimeoutError, ResourceError])
def test_ranks_of_several_hosts_may_try_again(
    failure: type[ProxyCCLError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first split fails on rank 0, which times out waiting for rank 1 or has too few descriptors."""
    monkeypatch.setattr(Topology, "spans_hosts", True)
    errors = [ResourceError("too few")] if failure is ResourceError else []

    def subset(bootstrap: ThreadBootstrap, members: Sequence[int], key: int) -> FileBootstrap:
        if bootstrap.rank == 0 and errors:
            raise errors.pop()
        return FileBootstrap(tmp_path / f"{key:x}", members.index(bootstrap.rank), len(members))

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(failure):
                comm.split([0, 1], timeout=0.1)
        elif failure is ResourceError:
            with pytest.raises(WaitTimeoutError, match=r"ranks \[0\] did not come"):
                comm.split([0, 1], timeout=0.1)
        comm.barrier()
        assert total(comm.split([0, 1]), 1) == 2

    monkeypatch.setattr(ThreadBootstrap, "subset", subset, raising=False)
    run_ranks(2, body)


def test_a_lost_rank_ends_the_parts() -> None:
    lost, *others = run_processes(3, PROGRAM)
    assert lost.returncode != 0
    for other in others:
        assert other.returncode == 0, other.stderr
        assert "PeerLostError: the process of rank 0 ended" in other.stdout
