"""Ranks close communicators in any order, without waiting for ranks that have left; aborts never wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, MismatchError, ResourceError, ThreadBootstrap, WaitTimeoutError
from proxyccl.channels import group
from proxyccl.channels.segment.control import Presence
from proxyccl.device.host import HostRuntime
from support.device_arrays import on_device, on_host
from support.devices import require_devices
from support.paths import TESTS
from support.processes import run_processes
from support.running import TIMEOUT, impatient, run_ranks, wait_for

PROGRAM = TESTS / "support" / "programs" / "failure.py"


def with_several(count: int, world_size: int, body: Callable[[list[Communicator]], Any], timeout: float) -> list[Any]:
    """Runs body(communicators) in one thread per rank. All ranks join all `count` communicators."""
    require_devices(world_size)
    bootstraps = [ThreadBootstrap.create(world_size) for _ in range(count)]
    results: list[Any] = [None] * world_size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body([Communicator(of_all[rank], timeout=timeout) for of_all in bootstraps])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * timeout)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_ranks_close_communicators_in_different_orders() -> None:
    released = threading.Event()

    class Kept:
        def close(self) -> None:
            released.set()

    def body(communicators: list[Communicator]) -> float:
        first, second = communicators
        first.group.keep(Kept())
        for comm in communicators:
            assert (on_host(comm.all_reduce(on_device(comm, np.ones(4, np.float32)))) == 2).all()
        started = time.monotonic()
        for comm in (first, second) if first.rank == 0 else (second, first):
            comm.close()
            assert comm.closed
        return time.monotonic() - started

    for seconds in with_several(2, 2, body, TIMEOUT):
        assert seconds < TIMEOUT  # no rank ran into the time-out
    assert released.wait(TIMEOUT), "what peers reach is freed when all have closed the communicator"


@pytest.mark.parametrize("second_first", [True, False])
def test_two_threads_of_a_rank_close_two_communicators_at_once(second_first: bool) -> None:
    closed = [threading.Event(), threading.Event()]  # set when rank 0 has closed the first, or the second

    def body(communicators: list[Communicator]) -> None:
        first, second = communicators

        def close_second() -> None:
            wait_for(lambda: second.group.control.presence is Presence.CLOSING_ANOTHER, "this rank closes the first")
            second.close()
            closed[1].set()

        if first.rank == 0:
            closing = threading.Thread(target=close_second)
            closing.start()
            first.close()  # meanwhile announces in the second that this thread closes another communicator
            closed[0].set()
            closing.join()
            return
        wait_for(lambda: second.group._watcher.presence(0) is Presence.LEFT, "rank 0 has left the second")
        for comm, of_rank_0 in ((second, closed[1]), (first, closed[0]))[:: 1 if second_first else -1]:
            comm.close()
            assert of_rank_0.wait(TIMEOUT)

    with_several(2, 2, body, TIMEOUT)


def test_a_rank_that_does_not_close_is_named() -> None:
    done = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        impatient(comm, 1)
        if comm.rank == 1:
            done.wait(TIMEOUT)
            return None
        try:
            with pytest.raises(WaitTimeoutError, match="close: rank 1 did not close the communicator") as caught:
                comm.close()
        finally:
            done.set()
        return caught.value

    error = run_ranks(2, body)[0]
    assert isinstance(error, WaitTimeoutError)
    assert (error.rank, error.peer, error.operation) == (0, 1, "close")


BUSY = r"""
#include "proxyccl/proxyccl.h"
extern "C" __global__ void busy(unsigned long* stopped, unsigned long lasts) {
  const unsigned long start = proxyccl::nanoseconds();
  while (proxyccl::nanoseconds() - start < lasts) {}
  *stopped = 1;
}
"""


def test_a_ranks_own_work_may_take_longer_than_its_end_waits_for_peers() -> None:
    def body(comm: Communicator) -> None:
        x, stopped = on_device(comm, np.ones(4, np.float32)), on_device(comm, np.zeros(1, np.uint64))
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.compile(BUSY)["busy"](1, 1, stopped, 500_000_000)
        comm.close()  # rank 1 has left before rank 0's kernel ends
        if comm.rank == 0:
            assert on_host(stopped) == 1

    run_ranks(2, body, linger=0.05)


def test_an_exchange_with_a_rank_that_has_closed_ends_at_once() -> None:
    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 0:
            with pytest.raises(
                MismatchError, match=r"^collective: rank 1 calls 'register', and rank 0 has closed the communicator"
            ):
                comm.close()
            return None
        started = time.monotonic()
        with pytest.raises(MismatchError, match="this rank calls 'register', and rank 0 has closed the") as caught:
            comm.register(comm.empty(4))
        assert time.monotonic() - started < TIMEOUT
        return caught.value

    error = run_ranks(2, body)[1]
    assert isinstance(error, MismatchError)
    assert error.peer == 0


def test_abort_waits_for_nobody() -> None:
    """Rank 0 aborts while rank 0's kernel and rank 0's peers wait."""
    source = """
    #include "proxyccl/proxyccl.h"
    using namespace proxyccl;
    extern "C" __global__ void wait_for_peer(DeviceHandle<SmChannel>* channels) {
      if (threadIdx.x == 0) channels[0].wait();
    }
    """

    def body(comm: Communicator) -> float:
        kernel = comm.compile(source, "wait_for_peer")
        channels = comm.sm_channels(comm.empty(4))
        stream = comm.runtime.create_stream()
        kernel(1, 1, channels, stream=stream)
        comm.all_gather_bytes(b"", "all wait")
        started = time.monotonic()
        if comm.rank == 0:
            comm.abort("enough")
        return time.monotonic() - started

    assert run_ranks(2, body)[0] < 1


def test_a_close_that_waits_for_nobody_leaves_memory_to_the_peers() -> None:
    """Rank 0 closes immediately; rank 1 keeps the communicator, and closes it later."""
    rank_0_has_closed = threading.Event()

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(1000, np.float32))
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.close(wait=False)
            assert comm.closed
            rank_0_has_closed.set()
        else:
            assert rank_0_has_closed.wait(TIMEOUT)
            comm.synchronize()
            assert (on_host(x) == 2).all()
            comm.check()
            comm.close()

    assert with_several(1, 2, lambda communicators: body(communicators[0]), TIMEOUT) == [None, None]


def test_the_timeout_of_a_communicator_can_change() -> None:
    timed_out = threading.Event()

    def body(comm: Communicator) -> float:
        impatient(comm, 0.5)
        assert comm.timeout == 0.5
        seconds = 0.0
        if comm.rank == 0:
            started = time.monotonic()
            with pytest.raises(WaitTimeoutError):
                comm.all_gather_bytes(b"", "nobody else comes")
            seconds = time.monotonic() - started
            timed_out.set()
        assert timed_out.wait(TIMEOUT)  # if rank 1 closed earlier, rank 0's wait would end at once
        comm.close(wait=False)
        return seconds

    assert with_several(1, 2, lambda communicators: body(communicators[0]), TIMEOUT)[0] < TIMEOUT


@pytest.mark.parametrize("order", ["same", "reversed_on_odd_ranks"])
def test_six_communicators_left_open_end_at_exit(order: str) -> None:
    ended = run_processes(4, PROGRAM, f"exit_with_six:{order}")
    assert [process.returncode for process in ended] == [0] * 4, ended
    assert not any(process.stderr for process in ended), ended  # a time-out would be printed to stderr


def test_what_a_rank_announces_reaches_its_peers() -> None:
    def body(comm: Communicator) -> None:
        watcher = comm.group._watcher
        peer = 1 - comm.rank
        assert watcher.presence(peer) is Presence.PRESENT
        comm.all_gather_bytes(b"", "looked")
        watcher.announce(Presence.CLOSING_ANOTHER)
        comm.all_gather_bytes(b"", "announced")
        assert watcher.presence(peer) is Presence.CLOSING_ANOTHER
        comm.all_gather_bytes(b"", "seen")
        watcher.announce(Presence.PRESENT)

    run_ranks(2, body)


@pytest.mark.host_only("replaces the host runtime's method")
@pytest.mark.parametrize("end", [Communicator.close, lambda comm: comm.abort("for the test")], ids=["close", "abort"])
def test_pins_are_kept_for_each_open_communicator(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Communicator], None]
) -> None:
    """Each open communicator keeps memory pinned; a communicator that failed to open keeps none pinned."""
    kept: list[object] = []

    def keep_pins(runtime: HostRuntime) -> Callable[[], None]:
        kept.append(runtime)
        return lambda: kept.remove(runtime)

    def no_watcher(*_: object, **__: object) -> None:
        raise ResourceError("no descriptor is left")

    monkeypatch.setattr(HostRuntime, "keep_pins", keep_pins)
    all_have_counted = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        part = comm.split([0, 1])
        part.all_gather_bytes(b"")
        if all_have_counted.wait(TIMEOUT) == 0:
            assert len(kept) == 4
            monkeypatch.setattr(group, "Watcher", no_watcher)
        all_have_counted.wait(TIMEOUT)
        with pytest.raises(ResourceError, match="no descriptor is left"):
            comm.split([0, 1])
        if all_have_counted.wait(TIMEOUT) == 0:
            assert len(kept) == 4
        all_have_counted.wait(TIMEOUT)
        end(comm)

    run_ranks(2, body)
    wait_for(lambda: not kept, "the communicators are released")
