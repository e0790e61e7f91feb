"""A failed rank frees memory that peers have mapped only when no peer's kernel can access the memory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from proxyccl import AbortedError, Communicator
from proxyccl.channels.liveness.aftermath import Aftermath
from proxyccl.channels.segment.control import ControlSegment, Presence, create_segment
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device._native import lib as native
from proxyccl.device.errors import ArgumentError
from proxyccl.device.gpu import unused_memory
from proxyccl.device.gpu.unused_memory import UnusedMemory, add_hold, is_held, remove_hold
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view
from proxyccl.device.runtimes import open_runtime
from support.devices import ON_HOST
from support.ranks import collect_garbage
from support.running import TIMEOUT, run_ranks, wait_for
from support.stream_words import wait_value, write_value

pytestmark = pytest.mark.hip


class Held:
    def __init__(self) -> None:
        self.now = True

    def holds(self) -> bool:
        return self.now


@pytest.fixture(autouse=True)
def no_other_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_memory, "_holds", [])


@pytest.fixture
def held() -> Iterator[Held]:
    hold = Held()
    add_hold(hold.holds)
    yield hold
    remove_hold(hold.holds)


# -- memory that a `Hold` keeps allocated after its owner freed it ---


def test_held_allocations_are_freed_by_the_first_wait_after_the_hold(held: Held) -> None:
    unused, freed = UnusedMemory(), []
    unused.append(lambda: freed.append("mapping"))
    unused.append_allocation(0, lambda: freed.append("allocation"))
    unused.free()
    assert freed == ["mapping"]
    held.now = False
    unused.free()
    assert freed == ["mapping", "allocation"]


def test_an_allocation_that_cant_be_freed_keeps_no_other() -> None:
    def fail() -> None:
        raise OSError("the driver's")

    unused, freed = UnusedMemory(), []
    unused.append_allocation(0, fail)
    unused.append_allocation(0, lambda: freed.append("allocation"))
    with pytest.raises(OSError, match="the driver's"):
        unused.free()
    unused.free()
    assert freed == ["allocation"]


@pytest.mark.skipif(ON_HOST, reason="the host's memory is there as long as anybody maps it")
@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_a_gpu_frees_no_memory_that_is_held(held: Held, how: str) -> None:
    def body(comm: Communicator) -> None:
        runtime = comm.runtime
        memory = runtime.allocate(4096)
        ptr, handle = memory.ptr, runtime.export(memory.ptr, 4096)
        if how == "closed":
            memory.close()
            assert memory.closed
        del memory
        runtime.synchronize()
        assert runtime.allocations(ptr, 4096)
        with pytest.raises(ArgumentError, match="handle: names memory that this process has freed"):
            runtime.open(handle)
        held.now = False
        runtime.synchronize()
        assert not runtime.allocations(ptr, 4096)

    run_ranks(1, body)


# -- when a failed rank may free memory that peers access ---


class Ranks:
    """The control segments of three ranks, and the `Aftermath` of rank 0."""

    def __init__(self, pids: dict[int, int] | None = None, patience: float = TIMEOUT) -> None:
        runtime = open_runtime("host")
        self.segments = [create_segment(runtime, rank, TIMEOUT, world_size=3) for rank in range(3)]
        for rank, segment in enumerate(self.segments):
            segment.introduce(self.peers_of(rank))
        pids = pids or dict.fromkeys((1, 2), os.getpid())
        here = PeerProcess(os.getpid(), proc_view(), forks.here().token)
        processes = {
            peer: here if pid == here.pid else PeerProcess(pid, here.view, bytes(16)) for peer, pid in pids.items()
        }
        self.aftermath = Aftermath(0, self.segments[0], self.peers_of(0), processes, lambda: patience)
        self.aftermath.begin()

    def peers_of(self, rank: int) -> dict[int, ControlSegment]:
        return {peer: segment for peer, segment in enumerate(self.segments) if peer != rank}

    def fail(self) -> None:
        self.segments[1].raise_abort(ErrorRecord(native.PROXYCCL_ERROR_LOCAL, 1))

    def end(self) -> None:
        self.aftermath.end()
        for segment in self.segments:
            segment.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


@pytest.mark.parametrize("presence", [Presence.LEFT, Presence.STOPPED])
def test_memory_is_held_from_the_failure_until_all_ranks_have_ended(ranks: Ranks, presence: Presence) -> None:
    assert not ranks.aftermath.holds()
    ranks.fail()
    assert ranks.aftermath.holds()
    assert is_held()
    ranks.segments[1].set_presence(presence)
    assert ranks.aftermath.holds()
    ranks.segments[2].set_presence(presence)
    assert not ranks.aftermath.holds()


def test_what_peers_reach_is_let_go_when_all_ranks_have_ended(ranks: Ranks) -> None:
    reached = threading.Event()
    ref = weakref.ref(reached)
    ranks.fail()
    ranks.aftermath.follow([reached])
    del reached
    for peer in (1, 2):
        assert ref() is not None
        assert not ranks.aftermath.over
        ranks.segments[peer].set_presence(Presence.LEFT)
        is_held()
    assert ref() is None
    assert ranks.aftermath.over


def test_a_rank_whose_process_has_ended_runs_no_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ranks = Ranks({1: process.pid, 2: process.pid})
        ranks.fail()
        ranks.aftermath.watch_processes()
        ranks.aftermath.follow([])
        assert ranks.aftermath.holds()
        process.communicate(b"\n")
        assert not ranks.aftermath.holds()
        assert ranks.aftermath.over
    ranks.end()


def test_after_the_bound_what_is_held_is_kept_for_good(caplog: pytest.LogCaptureFixture) -> None:
    ranks, freed = Ranks(patience=0), []
    reached = threading.Event()
    ref = weakref.ref(reached)
    unused = UnusedMemory.on("a test's", 0)
    unused.append_allocation(0, lambda: freed.append("before"))
    ranks.fail()
    ranks.aftermath.follow([reached])
    del reached
    with caplog.at_level(logging.WARNING, "proxyccl"):
        while ranks.aftermath.holds():
            pass
    assert "ranks [1, 2] have not closed the communicator within 0 s of its failure" in caplog.text
    unused.append_allocation(0, lambda: freed.append("after"))
    unused.free()
    assert freed == ["after"]
    assert ref() is not None
    for peer in (1, 2):
        ranks.segments[peer].set_presence(Presence.LEFT)
    wait_for(lambda: ref() is None, "without a query, the peers' end")
    ranks.end()


# -- communicators ---


def collected(ref: Callable[[], object]) -> bool:
    collect_garbage()
    return ref() is None


def use_and_fail(comm: Communicator, what: str) -> Callable[[], object]:
    """Makes a communicator fail, closes it and drops its objects. Returns a weak reference to the object that `what`
    names: an array, the array's memory or semaphore words.
    """
    x = comm.empty(1024, "uint8")
    registered, channels = comm.register(x), comm.sm_channels(x)
    announced = comm.group.symmetric.find(x.ptr, x.nbytes)
    reached = {
        "array": x,
        "memory": announced.memory if announced is not None else None,
        "words": comm.group.semaphore_words._block.memory,
    }[what]
    ref = weakref.ref(reached)
    comm.abort("of the test")
    del reached, announced
    comm.deregister(registered)
    comm.close()
    del channels
    return ref


@pytest.mark.parametrize("what", ["array", "memory", "words"])
def test_a_failed_rank_keeps_what_a_peers_kernel_may_still_reach(what: str) -> None:
    """While a stream of rank 1 waits for a value, rank 0 fails, closes, and drops all its objects."""
    closed, looked = threading.Event(), threading.Event()

    def body(comm: Communicator) -> tuple[bool, bool] | None:
        if comm.rank == 0:
            ref = use_and_fail(comm, what)
            kept = not collected(ref)
            closed.set()
            assert looked.wait(TIMEOUT)
            comm.runtime.synchronize()
            return kept, collected(ref)
        word, stream = comm.runtime.allocate(8), comm.runtime.create_stream()
        comm.register(x := comm.empty(1024, "uint8"))
        comm.sm_channels(x)
        wait_value(comm.runtime, word.ptr, 1, stream)
        try:
            assert closed.wait(TIMEOUT)
        finally:
            opener = comm.runtime.create_stream()
            write_value(comm.runtime, word.ptr, 1, opener)
            opener.synchronize()
        comm.close()
        looked.set()
        return None

    assert run_ranks(2, body)[0] == (True, True)


def test_ranks_that_shrink_say_that_their_kernels_have_ended() -> None:
    """After rank 2 has aborted, ranks 0 and 1 shrink. Ranks that shrink announce the end of their kernels only when
    the new communicator is ready.
    """
    closed, shrunk = threading.Event(), threading.Barrier(2)

    def body(comm: Communicator) -> list[Presence] | None:
        if comm.rank == 2:
            comm.abort("of the test")
            comm.close()
            closed.set()
            return None
        assert closed.wait(TIMEOUT)
        comm.group._stop_work()
        presence = comm.group.control.presence
        shrunk.wait(TIMEOUT)
        return [presence]

    assert run_ranks(3, body)[:2] == [[Presence.STOPPED]] * 2


def test_nothing_is_launched_once_a_rank_has_failed() -> None:
    """A peer may fail and free memory after the ranks have compared their calls but before this rank launches its
    kernel.
    """
    compared = threading.Event()

    def body(comm: Communicator) -> list[int]:
        launched: list[int] = []
        if comm.rank == 0:
            assert compared.wait(TIMEOUT)
            comm.abort("of the test")
            return launched
        compared.set()
        while not comm.group.failure.aborted:
            pass
        with pytest.raises(AbortedError):
            comm.group.launches.launch(launched.append, None, ())
        return launched

    assert run_ranks(2, body) == [[], []]


FAILS = """
extern "C" __global__ void half_a_barrier() {
  if (threadIdx.x == 0) return;
  if (threadIdx.x == 1) __syncwarp(3);
  __syncthreads();
  if (threadIdx.x == 2) __shfl_sync(8, 1, 0);
}
"""


@pytest.mark.host_only(reason="on a GPU the kernel would end the context")
def test_a_kernels_failure_that_nobody_asked_for_ends_the_communicator_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(comm: Communicator) -> str:
        kernels, stream = comm.compile('#include "proxyccl/proxyccl.h"\n' + FAILS), comm.runtime.create_stream()
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            kernels.half_a_barrier(1, 4, stream=stream)
            comm.close()
            return ""
        with pytest.raises(AbortedError) as caught:
            comm.all_gather_bytes(b"")
        assert "rank 0" in str(caught.value)
        kernels.half_a_barrier(1, 4, stream=stream)
        comm.close()
        return str(caught.value)

    with caplog.at_level(logging.WARNING, "proxyccl"):
        run_ranks(2, body)
    assert "rank 1: a kernel failed, as the end of its communicator found" in caplog.text
