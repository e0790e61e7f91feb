"""Communicators that give their device memory back for a while."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from proxyccl import (
    AbortedError,
    ArgumentError,
    Communicator,
    CommunicatorError,
    EPAll2AllLayer,
    MismatchError,
    ResourceError,
    RuntimeUnavailableError,
    SuspendedError,
)
from proxyccl.channels import group
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.proxy.daemon.choice import ChosenDaemon
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.daemon.connection import DaemonConnection
from proxyccl.proxy.daemon.session_service import SessionService
from proxyccl.proxy.processes import start_of
from proxyccl.transfer import Agent
from support.device_arrays import barrier, on_device, on_host
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.running import wait_for

MIB = 1 << 20
pytestmark = pytest.mark.host_only(reason="AMD's GPUs can't suspend memory; tests/gpu/ suspends NVIDIA's")


def pages(comm: Communicator) -> int:
    """Returns the number of pages of the communicator's blocks."""
    chosen = [memory for memory, piece in comm.group.device_memory._live() if piece.block]
    return sum(os.fstat(memory.descriptor).st_blocks for memory in chosen)  # type: ignore[attr-defined]


def some_calls(comm: Communicator, array: Any) -> list[bytes]:
    """Returns the results of calls that use all kinds of the library's memory."""
    rank, ranks = comm.rank, comm.world_size
    results = []
    for count in (100, 100_000):
        for algorithm in ("one_shot", "two_shot", "ring", "proxy"):
            x = on_device(comm, np.arange(count, dtype=np.float32) + rank)
            results.append(comm.all_reduce(x, algorithm=algorithm))
        results.append(comm.all_gather(on_device(comm, np.full(count, rank, np.int32))))
    comm.all_reduce(array, out=array)
    received = on_device(comm, np.zeros(1000, np.int32))
    with comm.transfers() as transfers:
        transfers.send(on_device(comm, np.full(1000, rank, np.int32)), (rank + 1) % ranks)
        transfers.recv(received, (rank - 1) % ranks)
    barrier(comm)
    return [on_host(each).tobytes() for each in (*results, received)]


@pytest.mark.daemon
@pytest.mark.parametrize("proxy", [None, "process"])
def test_calls_give_the_same_results_after_a_communicator_was_suspended(proxy: str | None) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").upload(np.full(MIB, 1.0, np.float32))
        comm.register(array)
        before = some_calls(comm, array)
        for _ in range(3):
            address, used = array.ptr, comm.memory_usage()
            assert pages(comm) > 0
            comm.suspend()
            assert comm.suspended
            assert pages(comm) == 0
            assert sum(comm.memory_usage().values()) < 2 * MIB
            comm.resume()
            assert not comm.suspended
            assert comm.memory_usage() == used
            assert array.ptr == address
            assert some_calls(comm, array) == before
        assert set(array.numpy()) == {float(comm.world_size**4)}

    with Ranks(3, suspendable=True, proxy=proxy) as ranks:
        ranks.run(body)


def proxied(comm: Communicator) -> float:
    return float(on_host(comm.all_reduce(on_device(comm, np.ones(1000, np.float32)), algorithm="proxy"))[-1])


def daemon_of(comm: Communicator) -> int:
    assert isinstance(comm.proxy, DaemonClient)
    return comm.proxy.daemon


def wait_for_end(pid: int) -> None:
    wait_for(lambda: start_of(pid) is None, "the proxies' process ends")


def test_the_proxies_process_ends_while_all_its_communicators_are_suspended() -> None:
    def body(comm: Communicator) -> None:
        array, other = comm.empty(MIB, "float32").fill(1), comm.split(range(comm.world_size))
        (channel,) = comm.proxy_channels(array)
        assert proxied(comm) == proxied(other) == 2
        served = daemon_of(comm)
        comm.suspend()
        assert proxied(other) == 2
        assert start_of(served) is not None
        other.close()
        for rounds in range(1, 4):
            wait_for_end(served)
            comm.resume()
            for _ in range(rounds):
                channel.signal()
                channel.wait()
                assert proxied(comm) == 2
            assert not channel.poll()
            before, served = served, daemon_of(comm)
            assert served != before
            comm.suspend()

    with Ranks(2, suspendable=True, proxy="process") as ranks:
        ranks.run(body)


def test_the_proxies_process_ends_even_if_no_call_has_used_it() -> None:
    def body(comm: Communicator) -> int:
        barrier(comm)
        comm.suspend()
        comm.resume()
        return daemon_of(comm)

    with Ranks(2, suspendable=True, proxy="process", cta_policy="zero") as ranks:  # connects before the first call
        served = ranks.run(body)[0]
        ranks.run(lambda comm: comm.suspend())
        wait_for_end(served)


def test_calls_begin_before_the_proxies_process_has_started_again() -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty(MIB, "float32").fill(1)
        for _ in range(3):  # the later calls are issued without Python
            comm.all_reduce(x, out=x, algorithm="proxy")
        for _ in range(2):
            comm.suspend()
            comm.resume()
            comm.all_reduce(x, out=x, algorithm="proxy")
        assert set(x.numpy()) == {float(2**5)}
        for _ in range(2):
            comm.suspend()
            comm.resume()
        comm.close()  # waits for the start

    with Ranks(2, suspendable=True, proxy="process") as ranks:
        ranks.run(body)


def raise_failure(comm: Communicator) -> None:
    while True:
        proxied(comm)


def test_a_proxy_that_does_not_start_again_ends_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        assert proxied(comm) == 2
        comm.suspend()
        barrier_of_threads.wait()
        comm.resume()
        with pytest.raises(CommunicatorError, match="the proxy did not start again: RuntimeUnavailableError: no room"):
            raise_failure(comm)

    def refuse(*_: object) -> NoReturn:
        raise RuntimeUnavailableError("no room")

    barrier_of_threads = threading.Barrier(2, lambda: monkeypatch.setattr(ChosenDaemon, "connect", refuse))
    with Ranks(2, suspendable=True, proxy="process") as ranks:
        ranks.run(body)


def test_calls_of_a_suspended_communicator_are_refused_before_anything_moves() -> None:
    def body(comm: Communicator) -> None:
        x, array = np.ones(8, np.float32), comm.empty(MIB, "float32")
        window = comm.window(array)
        for _ in range(3):  # the later calls are issued without Python
            comm.all_reduce(x)
        comm.send(x, 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)
        comm.suspend()
        calls = {
            "all_reduce": lambda: comm.all_reduce(x),
            "barrier": comm.barrier,
            "send": lambda: comm.send(x, 1 - comm.rank),
            "empty": lambda: comm.empty(8),
            "register": lambda: comm.register(array),
            "split": lambda: comm.split([0, 1]),
            "channels": lambda: comm.proxy_channels(array),
            "put": lambda: window.put(x, 1 - comm.rank),
            "suspend": comm.suspend,
        }
        for call in calls.values():
            with pytest.raises(SuspendedError):
                call()
        comm.resume()
        with pytest.raises(SuspendedError, match="not suspended"):
            comm.resume()
        x[:] = 1
        comm.all_reduce(x)
        assert set(x) == {2.0}

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def collectives(comm: Communicator, array: Any) -> dict[str, Callable[[], object]]:
    """Returns calls that all ranks make, each of which adds nothing to `array`, which is all zeros."""
    ranks, x, out = comm.world_size, np.ones(4, np.float32), np.zeros(4, np.float32)
    halves = np.ones((2, 8), np.float16)

    def norm() -> object:
        return comm.all_reduce_rms_norm(halves, halves, np.ones(8, np.float16), 1e-6)

    return {
        "all_reduce": lambda: comm.all_reduce(x, out=out),
        "all_reduce of a suspended array": lambda: comm.all_reduce(array),
        "all_gather to a new array": lambda: comm.all_gather(x),
        "all_to_all_v": lambda: comm.all_to_all_v(np.ones(ranks), [1] * ranks, [1] * ranks),
        "barrier": comm.barrier,
        "broadcast of a suspended array": lambda: comm.broadcast(array, 0),
        "gather": lambda: comm.gather(x, 0),
        "norm": norm,
        "scatter": lambda: comm.scatter(np.ones(ranks) if comm.rank == 0 else None, 0, out=np.zeros(1)),
    }


@pytest.mark.daemon
@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_collectives_resume_a_communicator_if_asked_for(proxy: str) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").fill(0)
        for name, call in collectives(comm, array).items():
            for turn in range(3):  # the first call prepares what the later calls use
                comm.suspend(save=turn != 1, resume_on_call=True)
                call()
                assert not comm.suspended, name
                assert not array.numpy().any()
        comm.suspend()
        with pytest.raises(SuspendedError):  # each `suspend` asks anew
            comm.barrier()
        comm.resume()

    with Ranks(3, suspendable=True, proxy=proxy) as ranks:
        ranks.run(body)


def test_a_collective_of_one_rank_meets_the_resume_of_another() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(8, np.float32)
        for resuming in (0, 1):
            comm.suspend(resume_on_call=True)
            if comm.rank == resuming:
                comm.resume()
            comm.all_reduce(x)
        assert set(x) == {4.0}

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_calls_of_layers_resume_their_communicator_if_asked_for() -> None:
    def body(comm: Communicator) -> None:
        ranks, tokens, hidden = comm.world_size, 256, 1024
        layer = EPAll2AllLayer(comm, tokens, hidden, 1, comm.rank, ranks, ranks, ranks, dtype="float32")
        given = np.random.default_rng(comm.rank).standard_normal((tokens, hidden)).astype(np.float32)
        ids = (np.arange(tokens, dtype=np.int32) % ranks)[:, None]
        for _ in range(3):
            comm.suspend(save=False, resume_on_call=True)
            with pytest.raises(SuspendedError):  # not all ranks need make this call
                layer.ctx.reallocate_dispatch_output_buf(8)
            with pytest.raises(SuspendedError):
                layer.check()
            rows, _, desc = layer.dispatch(on_device(comm, given), on_device(comm, ids))
            comm.suspend(resume_on_call=True)
            assert np.array_equal(on_host(layer.combine(rows, desc)), given)
            del rows, desc
            comm.suspend(resume_on_call=True)
            layer.ep_barrier_all()
        layer.finalize()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_a_captured_call_does_not_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        def refuse(_: object) -> NoReturn:  # as a GPU's runtime while torch captures a stream
            raise ArgumentError("stream", "this thread captures another stream")

        comm.suspend(resume_on_call=True)
        with monkeypatch.context() as patched:
            patched.setattr(comm.runtime, "stream_handle", refuse)
            with pytest.raises(SuspendedError):
                comm.all_reduce(np.ones(4, np.float32))
        assert comm.suspended
        comm.barrier()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_calls_that_not_all_ranks_make_never_resume() -> None:
    def body(comm: Communicator) -> None:
        x, array = np.ones(8, np.float32), comm.empty(MIB, "float32")
        window, peer = comm.window(array), 1 - comm.rank
        comm.prepare_transfers()
        comm.suspend(resume_on_call=True)
        calls: list[Callable[[], object]] = [
            lambda: comm.send(x, peer),
            lambda: comm.recv(x, peer),
            lambda: window.put(x, peer),
            lambda: window.signal(peer),
            lambda: comm.empty(8),
            lambda: comm.register(x),
            lambda: comm.split([comm.rank]),
            lambda: comm.suspend(resume_on_call=True),
            array.numpy,
        ]
        if comm.rank == 0:  # the other rank makes none of the calls
            for call in calls:
                with pytest.raises(SuspendedError):
                    call()
        assert comm.suspended
        comm.barrier()
        array.fill(1)

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_a_collective_of_a_suspended_communicator_that_failed_raises_the_failure() -> None:
    def body(comm: Communicator) -> None:
        comm.suspend(resume_on_call=True)
        if comm.rank == 1:
            comm.abort("a reason")
        with pytest.raises(AbortedError, match="a reason"):
            comm.barrier()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_a_message_sent_before_is_received_afterwards(proxy: str) -> None:
    def body(comm: Communicator) -> None:
        comm.prepare_transfers()
        if comm.rank == 0:
            comm.send(on_device(comm, np.arange(100)), 1)
        comm.suspend(save=False)
        comm.resume()
        if comm.rank == 1:
            got = on_device(comm, np.zeros(100, np.int64))
            comm.recv(got, 0)
            comm.synchronize()
            assert np.array_equal(on_host(got), np.arange(100))

    with Ranks(2, suspendable=True, proxy=proxy) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("save", [True, False])
def test_layers_of_experts_work_after_their_communicator_was_suspended(save: bool) -> None:
    def body(comm: Communicator) -> None:
        ranks, tokens, hidden = comm.world_size, 256, 1024
        layer = EPAll2AllLayer(comm, tokens, hidden, 2, comm.rank, 2 * ranks, ranks, ranks, dtype="float32")
        assert comm.memory_usage()["experts"] > MIB
        given = np.random.default_rng(comm.rank).standard_normal((tokens, hidden)).astype(np.float32)
        ids = np.stack([np.arange(tokens) % (2 * ranks), (np.arange(tokens) + 1) % (2 * ranks)], 1).astype(np.int32)
        for _ in range(3):
            for _ in range(2):
                rows, _, desc = layer.dispatch(on_device(comm, given), on_device(comm, ids))
                combined = on_host(layer.combine(rows, desc))
                assert np.array_equal(combined, given + given)
                barrier(comm)
            del rows, desc
            comm.suspend(save=save)
            with pytest.raises(SuspendedError):
                layer.dispatch(on_device(comm, given), on_device(comm, ids))
            comm.resume()
        layer.finalize()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("save", [True, False])
def test_second_halves_of_layers_work_after_their_communicator_was_suspended(save: bool) -> None:
    def body(comm: Communicator) -> None:
        ranks, tokens, hidden = comm.world_size, 256, 1024
        layer = EPAll2AllLayer(comm, tokens, hidden, 1, comm.rank, 2 * ranks, ranks, ranks, dtype="float32")
        given = on_device(comm, np.random.default_rng(comm.rank).standard_normal((tokens, hidden)).astype(np.float32))
        ids = on_device(comm, (np.arange(tokens, dtype=np.int32) % (2 * ranks))[:, None])
        sent = layer.dispatch_send(given, ids)
        comm.suspend(save=save)
        comm.resume()
        rows, _, desc = layer.dispatch_recv(sent)
        combining = layer.combine_send(rows, desc)
        comm.suspend(save=save)
        comm.resume()
        assert np.array_equal(on_host(layer.combine_recv(combining)), on_host(given))
        layer.finalize()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("nbytes", [MIB, (20 << 20) + 3])
def test_arrays_keep_their_contents(nbytes: int) -> None:
    def body(comm: Communicator) -> None:
        contents = np.random.default_rng(comm.rank).integers(0, 256, nbytes, np.uint8)
        array, other = comm.empty(nbytes, "uint8").upload(contents), comm.empty(2 * MIB, "uint8").fill(comm.rank)
        for _ in range(2):
            comm.suspend()
            comm.resume()
            assert np.array_equal(array.numpy(), contents)
            assert np.array_equal(other.numpy(), np.full(2 * MIB, comm.rank, np.uint8))

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_arrays_lose_their_contents_if_these_are_not_saved() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").upload(np.ones(MIB, np.float32))
        comm.suspend(save=False)
        comm.resume()
        assert not array.numpy().any()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_memory_that_could_not_be_mapped_at_resume_is_mapped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates that the memory belongs to another communicator of the ranks, which resumes later than this one."""
    ask, refuses = DaemonConnection.ask, threading.Event()

    def refusing(self: DaemonConnection, function: Any, *arguments: Any) -> Any:
        is_array = function is SessionService.add_memory and arguments[1] == array_bytes
        if refuses.is_set() and (is_array or function is SessionService.add_pinned_memory):
            raise ArgumentError("handle", "names memory that its owner has suspended or freed")
        return ask(self, function, *arguments)

    array_bytes = 3 * MIB

    def body(comm: Communicator) -> None:
        array = comm.empty(array_bytes // 4, "float32").fill(1)
        comm.register(array)
        pinned = PinnedRange(comm.group, 4096)
        assert pinned.source_id(1 - comm.rank) != pinned.peer_id(1 - comm.rank)
        comm.all_reduce(array, algorithm="proxy")
        comm.suspend()
        refuses.set()
        comm.resume()
        assert isinstance(comm.proxy, DaemonClient)
        comm.proxy.drain(30)  # waits until the proxy has started again
        barrier(comm)
        refuses.clear()
        comm.proxy.set_mapped(b"", [], True)
        barrier(comm)
        comm.all_reduce(array, algorithm="proxy")
        assert set(array.numpy()) == {4.0}
        comm.group.keep(pinned)

    monkeypatch.setattr(DaemonConnection, "ask", refusing)
    with Ranks(2, suspendable=True, proxy="process") as ranks:
        ranks.run(body)


@pytest.mark.parametrize("name", ["save", "resume_on_call"])
@pytest.mark.parametrize("value", [None, [], 0, "no", np.True_])
def test_arguments_must_be_bools(name: str, value: Any) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").fill(1)
        with pytest.raises(ArgumentError, match=f"{name}: must be True or False"):
            comm.suspend(**{name: value})
        assert not comm.suspended
        assert array.numpy().all()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.suspend(save=False), r"suspend\(save=False\)"),
        (lambda comm: comm.suspend(resume_on_call=True), r"suspend\(resume_on_call=True\)"),
        (lambda comm: comm.all_reduce(np.ones(8, np.float32)), "all_reduce"),
        (lambda comm: comm.register(comm.empty(8)), "register"),
    ],
)
def test_an_error_names_suspend_and_the_other_call_of_another_rank(
    call: Callable[[Communicator], object], text: str
) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").fill(1)
        barrier(comm)
        with pytest.raises(MismatchError, match=f"suspend.*{text}|{text}.*suspend"):
            comm.suspend() if comm.rank == 0 else call(comm)
        assert array.numpy().all()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_a_communicator_that_was_not_made_for_it_is_not_suspended() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeUnavailableError, match="suspendable=True"):
            comm.suspend()
        assert not comm.suspended
        comm.barrier()

    with Ranks(2) as ranks:
        ranks.run(body)


def test_ranks_agree_on_whether_they_may_be_suspended() -> None:
    options = [{"suspendable": False}, {"suspendable": True}]
    with Ranks(2, options_of=options.__getitem__) as ranks, pytest.raises(ArgumentError, match="suspendable"):
        ranks.run(lambda _: None)


@pytest.mark.parametrize("function", ["resume", "allocate_pinned"])
@pytest.mark.parametrize("resume", [Communicator.resume, Communicator.barrier])
def test_without_memory_to_resume_all_ranks_stay_suspended(
    resume: Callable[[Communicator], None], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").upload(np.full(MIB, 3.0, np.float32))
        comm.suspend(resume_on_call=True)
        memory = comm.group.device_memory
        if comm.rank == 1:
            with monkeypatch.context() as patched:

                def full(blocks: object) -> None:
                    raise ResourceError("the device is full")

                patched.setattr(comm.runtime, function, full)
                with pytest.raises(ResourceError, match="rank 1: the device is full"):
                    resume(comm)
        else:
            with pytest.raises(ResourceError, match="rank 1: the device is full"):
                resume(comm)
        assert comm.suspended
        assert memory.usage()["arrays"] == pages(comm) == 0
        resume(comm)
        assert set(array.numpy()) == {3.0}

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("pinned", [True, False])
def test_without_host_memory_for_contents_all_ranks_stay_awake(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").upload(np.full(MIB, 3.0, np.float32))

        def full(_: object) -> None:
            raise ResourceError("nothing can be pinned")

        for _ in range(2):
            with monkeypatch.context() as patched:
                if pinned and comm.rank == 1:
                    patched.setattr(comm.runtime, "allocate_pinned", full)
                with pytest.raises(ResourceError, match=expected):
                    comm.suspend(resume_on_call=True)
            assert not comm.suspended
            assert set(array.numpy()) == {3.0}
            assert set(comm.all_reduce(array, out=comm.empty(MIB, "float32")).numpy()) == {6.0}
        if pinned:
            comm.suspend()
            comm.resume()
        else:
            comm.suspend(save=False)
            comm.resume()
            array.fill(3)
        assert set(array.numpy()) == {3.0}

    expected = "stays usable; rank 1: nothing can be pinned$"
    if not pinned:
        expected = r"rank 0: the ranks' contents have \d+ bytes, and the host has 7340032 bytes left; rank 1: "
        monkeypatch.setattr(group, "free_memory", lambda: 7 * MIB)
    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_a_suspended_communicator_can_be_closed_and_its_arrays_freed() -> None:
    def body(comm: Communicator) -> None:
        some_calls(comm, comm.empty(MIB, "float32").upload(np.ones(MIB, np.float32)))
        array = comm.empty(MIB, "float32")
        comm.suspend()
        array.free()
        comm.close()
        assert comm.closed

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_layers_are_finalized_while_suspended_and_not_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        tokens, hidden = 256, 1024
        ids, array = np.zeros((tokens, 2), np.int32), comm.empty(MIB, "float32")
        layer = EPAll2AllLayer(comm, tokens, hidden, 2, comm.rank, 4, 2, 2, dtype="float32")
        own: list[tuple[bool, int]] = []
        with monkeypatch.context() as patched:

            def set_mapped(_: bytes, bases: list[int], mapped: bool) -> None:
                if array.memory.ptr in bases:
                    own.append((mapped, len(bases)))

            patched.setattr(comm.runtime, "set_mapped", set_mapped)
            comm.suspend()
            layer.finalize()
            comm.resume()
        (unmapped, before), (mapped, after) = own
        assert (unmapped, mapped) == (False, True)
        assert before > after
        layer = EPAll2AllLayer(comm, tokens, hidden, 2, comm.rank, 4, 2, 2, dtype="float32")
        rows, _, desc = layer.dispatch(on_device(comm, np.ones((tokens, hidden), np.float32)), on_device(comm, ids))
        layer.combine(rows, desc)
        comm.suspend()
        layer.finalize()
        comm.close()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_a_failure_while_suspended_is_noticed() -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        comm.suspend()
        if comm.rank == 1:
            comm.abort("a reason")
        with pytest.raises(AbortedError, match="a reason"):
            comm.resume()
        with pytest.raises(AbortedError, match="a reason"):
            comm.barrier()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_a_rank_that_dies_while_suspended_is_noticed_and_the_others_go_on(proxy: str) -> None:
    survivor, victim = run_processes(2, PROGRAMS / "asleep.py", env={"PROXYCCL_PROXY": proxy})
    assert victim.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, survivor.stderr
    lost = ["barrier: lost rank 1", "resume: lost rank 1"]
    assert survivor.stdout.splitlines() == ["noticed while suspended", *lost, f"alone: 3.0 {MIB}"]


def test_arrays_of_a_suspended_communicator_refuse_use() -> None:
    def body(comm: Communicator) -> None:
        other = comm.split([0, 1])
        array, copy = comm.empty(MIB, "float32").fill(1), np.zeros(MIB, np.float32)
        for _ in range(3):  # the later calls are issued without Python
            other.broadcast(array, 0)
        with Agent(f"agent {comm.rank}") as agent:
            comm.suspend()
            uses: dict[str, Callable[[], object]] = {
                "numpy": array.numpy,
                "fill": lambda: array.fill(0),
                "upload": lambda: array.upload(copy),
                "asarray": lambda: np.asarray(array),
                "input": lambda: other.broadcast(array, 0),
                "output": lambda: other.all_reduce(copy, out=array),
                "send": lambda: other.send(array, 1 - comm.rank),
                "register": lambda: other.register(array),
                "window": lambda: other.window(array),
                "agent": lambda: agent.register(array),
            }
            for use in uses.values():
                with pytest.raises(SuspendedError, match=r"Array\(shape=\(1048576,\), .* was suspended"):
                    use()
            comm.resume()
        assert array.numpy().all()
        other.all_reduce(array)
        assert set(array.numpy()) == {2.0}

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_memory_of_an_agent_is_not_suspended() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(MIB, "float32").fill(comm.rank)
        with Agent(f"agent {comm.rank}") as agent:
            region = agent.register(array) if comm.rank == 1 else None
            for _ in range(2):
                with pytest.raises(ArgumentError, match="rank 1: agent 'agent 1' has registered Region"):
                    comm.suspend()
            assert not comm.suspended
            assert set(comm.all_reduce(array).numpy()) == {1.0}
            if region is not None:
                agent.deregister(region)
            comm.suspend()
            comm.resume()
            if comm.rank == 1:
                agent.register(array)
        comm.suspend()  # a closed agent has no regions
        comm.resume()

    with Ranks(2, suspendable=True) as ranks:
        ranks.run(body)


def test_arrays_in_other_communicators_stay_registered_where_all_ranks_take_part() -> None:
    *pair, other = run_processes(3, PROGRAMS / "asleep_elsewhere.py")
    for ended in pair:
        assert ended.returncode == 0, ended.stderr
        refused, asleep, *rest = ended.stdout.splitlines()
        assert re.fullmatch("memory: suspend: (rank [01]: memory at .* of other processes; expected .*){2}", refused)
        assert "float32, device=host:0) has no memory: its communicator was suspended" in asleep
        assert rest == ["with the same ranks: True", "sum: 2.0", "sum: 3.0"]
    assert other.stdout.splitlines() == ["sum: 3.0"], other.stderr
