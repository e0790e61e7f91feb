"""A proxy in another process: launches wake its threads, and each client's idle policy applies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proxyccl import Communicator, ThreadBootstrap
from proxyccl.proxy.observe.publications import find
from proxyccl.proxy.observe.reader import Observer, WorkerView
from proxyccl.proxy.thread import IdlePolicy
from support.daemons import forget_daemon, running_daemon
from support.device_arrays import on_device
from support.observing import KERNELS, channels_of
from support.running import TIMEOUT, run_ranks, wait_for

REST = 0.02  # seconds without work after which a proxy thread sleeps most of the time


@pytest.fixture(params=["process", "daemon"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields where the proxy runs: "process", or "daemon" for a node daemon that only this test uses."""
    if request.param == "process":
        forget_daemon(monkeypatch)
        yield "process"
        return
    with running_daemon(tmp_path / "socket") as daemon:
        monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(daemon.path))
        yield "daemon"


def worker_of(comm: Communicator) -> WorkerView:
    ((_, publication),) = find(comm.job, [comm.rank])
    with Observer(publication) as observer:
        (worker,) = observer.snapshot().workers
    return worker


def test_what_uses_the_proxy_wakes_it_and_what_does_not_lets_it_sleep(place: str) -> None:
    def body(comm: Communicator) -> None:
        channels, kernel = channels_of(comm), comm.compile(KERNELS, "mixed")
        x = on_device(comm, np.ones(64, np.float32))
        comm.all_reduce(x, algorithm="proxy")
        comm.synchronize()

        def wakes(proxied: bool) -> bool:
            """Sleeps for REST seconds, makes a call, and returns whether the call woke the worker."""
            before = worker_of(comm).wakes
            comm.all_gather_bytes(b"")
            time.sleep(REST)
            comm.all_reduce(x, algorithm="proxy" if proxied else "two_shot")
            comm.synchronize()
            after = worker_of(comm).wakes
            comm.all_gather_bytes(b"")  # another rank's next call may wake a thread that both ranks share
            return after > before

        woken = [wakes(True) for _ in range(20)]
        assert sum(woken) > 10
        before = worker_of(comm).wakes
        unwoken = [wakes(False) for _ in range(20)]  # a list, because any() over a generator might skip calls
        assert not any(unwoken)

        def pushed() -> bool:
            kernel(1, 1, channels, 1, 0, 0)
            comm.synchronize()
            return worker_of(comm).wakes > before

        wait_for(pushed, "a kernel that pushes wakes the proxy")
        comm.all_gather_bytes(b"")

    run_ranks(2, body, proxy=place, idle=IdlePolicy(max_sleep_us=1e6))


def test_the_idle_policy_of_a_second_communicator_counts(place: str) -> None:
    def body(first: Communicator) -> None:
        assert first.proxy is not None
        before = worker_of(first).idle_times
        more = IdlePolicy(yield_us=501.0, max_sleep_us=40.0)
        with Communicator(ThreadBootstrap.create(1)[0], timeout=TIMEOUT, proxy=place, idle=more) as second:
            assert second.proxy is not None
            assert worker_of(second).idle_times == worker_of(first).idle_times == (5.0, 501.0, 40.0)
        wait_for(lambda: worker_of(first).idle_times == before, "the second's policy goes with it")

    run_ranks(1, body, proxy=place)


def test_a_proxy_that_is_idle_for_long_sleeps_longer_than_its_policy_says(place: str) -> None:
    def body(comm: Communicator) -> None:
        assert comm.proxy is not None  # starts it
        time.sleep(0.5)
        before = worker_of(comm).sleeps
        time.sleep(0.5)
        assert 0 < worker_of(comm).sleeps - before < 2000  # a sleep lasts 0.5 to 1 ms, so 0.5 s have at most 1000

    run_ranks(1, body, proxy=place, idle=IdlePolicy.where_cores_suffice())
