"""Bootstraps, whose all-gathers of bytes have a time limit: over threads, files, MPI, and torch's process groups."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from proxyccl import (
    ArgumentError,
    Bootstrap,
    Communicator,
    ExchangeError,
    MismatchError,
    PeerLostError,
    ThreadBootstrap,
    TorchBootstrap,
    WaitTimeoutError,
)
from proxyccl.channels.joining.boards import COLLECTED_FROM, bundle, unbundle
from proxyccl.channels.joining.bootstrap import MpiBootstrap, MpiSubset, as_bootstrap, library_of_group
from proxyccl.channels.joining.exchange import Exchange
from support.device_arrays import on_device, on_host
from support.devices import processes, require_devices
from support.fakes.torch import install
from support.paths import PROGRAMS
from support.processes import FileBootstrap
from support.running import TIMEOUT, impatient, run_alone, run_mpi
from support.signals import Interrupt, handling, interrupt

T = TypeVar("T")


def together(bootstraps: list[Any], action: Callable[[Any], T]) -> list[T]:
    require_devices(len(bootstraps))
    with ThreadPoolExecutor(len(bootstraps)) as pool:
        return list(pool.map(action, bootstraps, timeout=TIMEOUT))


def patient() -> None:
    """The check that a bootstrap makes while it waits; this one never ends the wait."""


def make(kind: str, world_size: int, directory: Path) -> list[Any]:
    if kind == "threads":
        return ThreadBootstrap.create(world_size)
    return [FileBootstrap(str(directory), rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize(("kind", "ranks"), [("threads", 4), ("files", 4), ("files", COLLECTED_FROM)])
def test_everyone_gets_everyones_bytes_in_rank_order(kind: str, ranks: int, tmp_path: Path) -> None:
    def body(bootstrap: Bootstrap) -> list[list[bytes]]:
        return [
            bootstrap.all_gather(bytes([bootstrap.rank]) * (bootstrap.rank * turn), 60, patient) for turn in range(10)
        ]

    with ThreadPoolExecutor(ranks) as pool:
        for result in pool.map(body, make(kind, ranks, tmp_path), timeout=TIMEOUT):
            assert result == [[bytes([rank]) * (rank * turn) for rank in range(ranks)] for turn in range(10)]


@pytest.mark.parametrize("ranks", [3, COLLECTED_FROM])
def test_some_ranks_of_mpi_exchange_messages(ranks: int) -> None:
    came: dict[tuple[int, int, int, int], bytes] = {}  # the keys are (receiver, sender, key, round)

    class Post:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def send(self, receiver: int, key: int, number: int, data: bytes) -> None:
            came[receiver, self.rank, key, number] = data

        def take(self, sender: int, key: int, number: int) -> bytes | None:
            return came.pop((self.rank, sender, key, number), None)

    members = list(range(2 * ranks, 0, -2))

    def body(rank: int) -> list[list[bytes]]:
        post: Any = Post(rank)
        subset = MpiSubset(post, members, 7)
        return [subset.all_gather(b"%d" % rank * turn, TIMEOUT, patient) for turn in range(3)]

    with ThreadPoolExecutor(ranks) as pool:
        for result in pool.map(body, members, timeout=TIMEOUT):
            assert result == [[b"%d" % rank * turn for rank in members] for turn in range(3)]
    assert not came


@pytest.fixture
def lonely_mpi(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Replaces MPI by a stand-in whose other rank joins no collective. Returns references to the receive buffers."""
    buffers: list[weakref.ref[Any]] = []

    def begin(send: Any, receive: Any) -> Any:
        buffers.append(weakref.ref(receive))
        return types.SimpleNamespace(Test=lambda: False)

    comm = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Iallgather=begin)
    comm.Idup = lambda: (comm, types.SimpleNamespace(Test=lambda: True))
    mpi = types.SimpleNamespace(COMM_WORLD=comm, Exception=RuntimeError, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    return buffers


def test_a_request_to_mpi_that_was_abandoned_keeps_its_buffers_and_is_the_last(
    lonely_mpi: list[weakref.ref[Any]],
) -> None:
    bootstrap = MpiBootstrap()
    with pytest.raises(WaitTimeoutError, match="not all ranks came in time"):
        bootstrap.all_gather(b"", 0, patient)
    with pytest.raises(ExchangeError, match="an earlier call was abandoned"):
        bootstrap.all_gather(b"", 0, patient)
    bootstrap.close()  # close() must not free the MPI communicator, because a request is pending
    del bootstrap
    gc.collect()
    (buffer,) = lonely_mpi
    assert buffer() is not None


def test_a_bundle_that_is_none_is_refused() -> None:
    messages = [b"", b"one", b"two!"]
    assert unbundle(bundle(messages), 3, "here", 1) == messages
    for wrong in (b"", bundle(messages)[:-1], bundle(messages) + b"x", bundle(messages[:2])):
        with pytest.raises(ExchangeError, match=r"rank 0's message in here can't be read: .* of 3 ranks") as caught:
            unbundle(wrong, 3, "here", 1)
        assert (caught.value.rank, caught.value.peer) == (1, 0)


@pytest.mark.parametrize(("kind", "ranks"), [("threads", 3), ("files", 3), ("files", COLLECTED_FROM)])
def test_a_rank_that_does_not_come_is_named_within_the_time_out(kind: str, ranks: int, tmp_path: Path) -> None:
    bootstraps = [each for each in make(kind, ranks, tmp_path) if each.rank != 2]
    started = time.monotonic()
    for bootstrap in bootstraps:
        with pytest.raises(WaitTimeoutError, match="2") as caught:
            bootstrap.all_gather(b"", 0.1, patient)
        assert caught.value.rank == bootstrap.rank
    assert time.monotonic() - started < TIMEOUT / 2
    assert caught.value.peer == 2


@pytest.mark.parametrize("kind", ["threads", "files"])
def test_giving_up_ends_the_wait(kind: str, tmp_path: Path) -> None:
    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        make(kind, 2, tmp_path)[0].all_gather(b"", 30, give_up)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2"])
def test_the_number_of_threads_is_positive(world_size: Any) -> None:
    with pytest.raises(ArgumentError, match="world_size"):
        ThreadBootstrap.create(world_size)


def test_a_communicator_needs_no_more_than_the_protocol(tmp_path: Path) -> None:
    def body(bootstrap: Bootstrap) -> float:
        with Communicator(bootstrap, timeout=TIMEOUT) as comm:
            return float(on_host(comm.all_reduce(on_device(comm, np.ones(3, np.float32))))[0])

    assert together(make("files", 3, tmp_path), body) == [3.0] * 3


def test_an_incomplete_communicator_times_out() -> None:
    with pytest.raises(WaitTimeoutError, match=r"ranks \[1\]"):
        Communicator(ThreadBootstrap.create(2)[0], timeout=0.3)


def test_a_rank_that_misses_a_registration_ends_the_communicator() -> None:
    def body(bootstrap: Bootstrap) -> tuple[BaseException, BaseException]:
        with Communicator(bootstrap, timeout=TIMEOUT) as comm:
            x = comm.empty(16)
            impatient(comm, 1)

            def register() -> None:
                if comm.rank == 0:
                    comm.register(x)
                while comm.rank == 1:
                    comm.check()
                    time.sleep(0.01)

            with pytest.raises(WaitTimeoutError, match="bootstrap") as caught:
                register()
            with pytest.raises(WaitTimeoutError, match="bootstrap") as again:
                comm.all_reduce(x)
            return caught.value, again.value

    for first, again in together(ThreadBootstrap.create(2), body):
        assert (type(again), str(again)) == (type(first), str(first))
        assert isinstance(first, WaitTimeoutError)
        assert (first.rank, first.peer, first.operation) == (0, 1, "bootstrap")


def test_ranks_that_set_up_different_things_are_told_so() -> None:
    calls: list[Callable[[Communicator, Any], object]] = [
        lambda comm, x: comm.register(x),
        lambda comm, x: comm.all_reduce(x),
        lambda comm, x: comm.close(),
    ]

    def body(bootstrap: Bootstrap) -> BaseException:
        with Communicator(bootstrap, timeout=TIMEOUT) as comm:
            x = comm.empty(16)
            comm.all_gather_bytes(b"", "all are ready")
            with pytest.raises(MismatchError) as caught:
                calls[bootstrap.rank](comm, x)
            return caught.value

    for error in together(ThreadBootstrap.create(3), body):
        assert isinstance(error, MismatchError)
        assert error.argument == "collective"


def test_a_group_of_a_class_that_a_backend_derives_from_torchs_is_torchs() -> None:
    of_torch = type("ProcessGroup", (), {"__module__": "torch._C._distributed_c10d"})
    assert library_of_group(type("OfABackend", (of_torch,), {})()) == "torch"
    assert library_of_group(object()) is None


@pytest.mark.slow
def test_mpi_communicators_and_their_parts_are_bootstraps() -> None:
    world_size = processes(3)
    result = run_mpi(world_size, PROGRAMS / "bootstrap.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("correct") == world_size


# -- torch ---


class Group:
    """A stand-in for a torch process group, with the calls that the bootstrap makes, over threads."""

    __module__ = "torch.distributed"

    def __init__(self, bootstrap: ThreadBootstrap) -> None:
        self.bootstrap = bootstrap


@pytest.fixture
def torch_distributed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    import pickle

    def all_gather_object(out: list[Any], value: Any, group: Group) -> None:
        if value == b"fail":
            raise RuntimeError("Timed out after 1 second")
        out[:] = map(pickle.loads, group.bootstrap.all_gather(pickle.dumps(value), 20, patient))

    distributed = types.ModuleType("torch.distributed")
    world = threading.local()
    distributed.__dict__.update(
        is_initialized=lambda: True,
        group=world,
        get_rank=lambda group: group.bootstrap.rank,
        get_world_size=lambda group: group.bootstrap.world_size,
        all_gather_object=all_gather_object,
    )
    torch = types.ModuleType("torch")
    torch.__dict__["distributed"] = distributed
    torch.__dict__["cuda"] = types.SimpleNamespace(is_initialized=lambda: False)
    install(monkeypatch, torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return distributed


@pytest.mark.usefixtures("torch_distributed")
def test_a_process_group_joins_ranks() -> None:
    def body(bootstrap: ThreadBootstrap) -> float:
        with Communicator.from_torch(Group(bootstrap), timeout=TIMEOUT) as comm:
            assert (comm.rank, comm.world_size) == (bootstrap.rank, 3)
            return float(on_host(comm.all_reduce(on_device(comm, np.ones(3, np.float32))))[0])

    assert together(ThreadBootstrap.create(3), body) == [3.0] * 3


def test_a_process_group_must_be_there_and_hold_this_process(torch_distributed: types.ModuleType) -> None:
    (bootstrap,) = ThreadBootstrap.create(1)
    made, owned = as_bootstrap(Group(bootstrap))
    assert owned
    assert isinstance(made, TorchBootstrap)
    with pytest.raises(WaitTimeoutError, match="Timed out after 1 second"):
        made.all_gather(b"fail", 1, patient)
    bootstrap.rank = -1
    with pytest.raises(ArgumentError, match="not a member"):
        TorchBootstrap(Group(bootstrap))
    torch_distributed.__dict__["is_initialized"] = lambda: False
    with pytest.raises(ArgumentError, match="init_process_group"):
        TorchBootstrap()


@pytest.mark.usefixtures("torch_distributed")
def test_a_bootstrap_that_was_made_for_ranks_that_do_not_meet_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[TorchBootstrap] = []

    def close(bootstrap: TorchBootstrap) -> None:
        closed.append(bootstrap)

    monkeypatch.setattr(TorchBootstrap, "close", close)
    with pytest.raises(ArgumentError, match="2 does not divide the world size 1"):
        Communicator(Group(ThreadBootstrap.create(1)[0]), local_world_size=2)
    assert len(closed) == 1


@pytest.mark.parametrize("how", ["signal", "failure", "time-out"])
def test_a_wait_in_torch_ends_by_what_ends_any_wait(how: str, torch_distributed: types.ModuleType) -> None:
    inside, stuck = threading.Event(), threading.Event()

    def wait_for_ever(out: list[Any], value: Any, group: Group) -> None:
        inside.set()
        stuck.wait(4 * TIMEOUT)

    def give_up() -> None:
        if how == "failure" and inside.is_set():
            raise PeerLostError("rank 1 is gone", rank=0)

    torch_distributed.__dict__["all_gather_object"] = wait_for_ever
    bootstrap = TorchBootstrap(Group(ThreadBootstrap.create(2)[0]))
    ends = {"signal": Interrupt, "failure": PeerLostError, "time-out": WaitTimeoutError}[how]
    began = time.monotonic()
    try:
        with handling(interrupt) if how == "signal" else contextlib.nullcontext(), pytest.raises(ends):
            bootstrap.all_gather(b"", 0.1 if how == "time-out" else 2 * TIMEOUT, give_up)
        assert time.monotonic() - began < TIMEOUT
    finally:
        stuck.set()


class GarblingBootstrap:
    """A bootstrap that corrupts one of its rank's messages: in message number `exchange` (counted from 0, among
    messages with a payload), garbage replaces everything after the first NUL byte.
    """

    def __init__(self, bootstrap: ThreadBootstrap, exchange: int) -> None:
        self.bootstrap = bootstrap
        self._left = exchange
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        purpose, _, carried = data.partition(b"\0")
        if carried and self._left == 0:
            data = purpose + b"\0\xff\xfe{"
        self._left -= bool(carried)
        return self.bootstrap.all_gather(data, timeout, give_up)

    def close(self) -> None:
        self.bootstrap.close()


@pytest.mark.parametrize("exchange", range(7))
def test_garbage_from_a_peer_is_an_error_that_names_it(exchange: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap exchanges hosts, topology, control segments and where the proxy runs; mailboxes exchange the job, a
    registration and the first collective's scratch memory. Each case corrupts one of these exchanges.
    """
    carry_over = Exchange.carry_over

    def also_garbled(exchanges: Exchange, mailboxes: Any) -> None:
        if mailboxes.rank == 1:
            bootstraps[1].bootstrap = mailboxes
        else:
            carry_over(exchanges, mailboxes)

    monkeypatch.setattr(Exchange, "carry_over", also_garbled)

    def body(bootstrap: Bootstrap) -> BaseException:
        expected = pytest.raises(ExchangeError, match=r"invalid .* from rank 1: expected JSON")
        with expected as caught, Communicator(bootstrap, timeout=TIMEOUT) as comm:
            comm.register(comm.empty(16))
            comm.all_reduce(comm.empty(16))
        return caught.value

    bootstraps: list[Any] = list(ThreadBootstrap.create(2))
    bootstraps[1] = GarblingBootstrap(bootstraps[1], exchange)
    for error in together(bootstraps, body):
        assert isinstance(error, ExchangeError)
        assert (error.peer, error.operation) == (1, "bootstrap")


# These tests run in separate processes: an earlier test may have loaded another version of libfabric, after which MPI
# can't be loaded.
_ALONE = """
import os
from proxyccl.channels.joining.bootstrap import as_bootstrap
for processes in ("", "1", "4", "4"):
    if processes:
        os.environ["WORLD_SIZE"] = processes
    as_bootstrap(None)
"""


def test_one_rank_of_several_processes_is_warned_of_once() -> None:
    done = run_alone("-c", _ALONE)
    assert done.returncode == 0, done.stderr
    (text,) = done.stderr.splitlines()
    assert "one rank" in text
    assert "torchrun started 4 processes (WORLD_SIZE)" in text
    assert "FileBootstrap" in text


_IN_A_CHILD = """
import multiprocessing
from proxyccl.channels.joining.bootstrap import as_bootstrap
child = multiprocessing.get_context("fork").Process(target=as_bootstrap, args=(None,))
child.start()
child.join()
raise SystemExit(child.exitcode)
"""


def test_one_rank_in_a_process_of_multiprocessing_is_warned_of() -> None:
    done = run_alone("-c", _IN_A_CHILD)
    assert done.returncode == 0, done.stderr
    assert "multiprocessing started this process" in done.stderr
