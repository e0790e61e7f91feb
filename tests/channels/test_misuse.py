"""A call that two threads of a rank make at once is an error; an error in a library thread ends the communicator."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, ClosedError, Communicator, ConcurrentCallError
from proxyccl.channels import group as group_module
from proxyccl.channels.symmetric import SymmetricMemory
from proxyccl.proxy.service import ProxyService
from support.device_arrays import on_device, on_host
from support.running import TIMEOUT, run_ranks

pytestmark = pytest.mark.host_only(reason="involves no kernels")


def in_thread(action: Any) -> threading.Thread:
    thread = threading.Thread(target=action, name="another")
    thread.start()
    return thread


def check_until_it_fails(comm: Communicator) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        comm.check()


@pytest.mark.parametrize("call", ["split", "exchange"])
def test_a_second_thread_in_a_call_is_refused_and_the_first_goes_on(call: str) -> None:
    refused = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        def make() -> object:
            return comm.split([0, 1]) if call == "split" else comm.all_gather_bytes(b"x")

        made: list[object] = []
        errors: list[str] = []

        def attempt() -> None:
            try:
                made.append(make())
            except ConcurrentCallError as error:
                errors.append(str(error))
                refused.wait(TIMEOUT)

        if comm.rank == 1:
            refused.wait(TIMEOUT)
            make()
        else:
            for thread in [in_thread(attempt) for _ in range(2)]:
                thread.join(TIMEOUT)
            assert len(made) == len(errors) == 1
            assert "thread another of this rank is in such a call" in errors[0]
        comm.all_gather_bytes(b"both are there")
        assert (on_host(comm.all_reduce(on_device(comm, np.ones(4, np.float32)))) == 2).all()

    run_ranks(2, body)


def test_a_communicator_that_another_thread_closes_meanwhile_gives_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = threading.Event(), threading.Event()
    start = group_module.Group.open

    def late(self: Any, observer: Any) -> None:
        if self.parent is not None:
            made.set()
            assert closed.wait(TIMEOUT)
        start(self, observer)

    monkeypatch.setattr(group_module.Group, "open", late)

    def body(comm: Communicator) -> None:
        def close() -> None:
            assert made.wait(TIMEOUT)
            comm.close()
            closed.set()

        closer = in_thread(close)
        with pytest.raises(ClosedError, match="the communicator was closed meanwhile"):
            comm.split([0])
        closer.join(TIMEOUT)

    run_ranks(1, body)


def test_an_error_of_the_watchers_thread_ends_the_communicator_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    update, broken = SymmetricMemory.update, threading.Event()

    def fail(self: SymmetricMemory, *, wait: bool = False) -> None:
        if broken.is_set() and self._rank == 1:
            raise KeyError("of the test")
        update(self, wait=wait)

    monkeypatch.setattr(SymmetricMemory, "update", fail)

    def body(comm: Communicator) -> None:
        comm.all_gather_bytes(b"")
        broken.set()
        with pytest.raises(AbortedError, match=r"rank 1|KeyError: 'of the test'") as caught:
            check_until_it_fails(comm)
        if comm.rank == 1:
            assert "its watcher has failed: KeyError: 'of the test'" in str(caught.value)

    run_ranks(2, body)


def test_an_error_of_the_proxys_thread_ends_the_communicator_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProxyService, worker: Any, info: Any) -> None:
        raise LookupError("of the test")

    monkeypatch.setattr(ProxyService, "_handle", fail)
    source = """
    #include "proxyccl/proxyccl.h"
    using namespace proxyccl;
    extern "C" __global__ void push(ProxyChannelDeviceHandle channel) { channel.custom(0, 0); channel.flush(); }
    """

    def body(comm: Communicator) -> None:
        kernel, channel = comm.compile(source, "push"), comm.handler_channel(lambda trigger: None)
        comm.all_gather_bytes(b"")
        if comm.rank == 1:
            kernel(1, 1, channel)
        with pytest.raises(AbortedError, match=r"rank 1|this rank") as caught:
            check_until_it_fails(comm)
        if comm.rank == 1:
            assert "its proxy's thread has failed: LookupError: of the test" in str(caught.value)

    run_ranks(2, body, proxy="thread")
