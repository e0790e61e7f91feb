"""A signal handler runs immediately even while a call waits. An exception in a handler ends the wait and, like any
exception, the peers' waits. Rank 0 is this process's main thread, in which Python runs handlers. Rank 1 is another
thread, which makes its calls late.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyccl import AbortedError, Communicator, KernelError, ThreadBootstrap
from support.device_arrays import on_device, on_host
from support.devices import require_devices, runtime_with_blocks
from support.running import TIMEOUT
from support.signals import Interrupt, handling, interrupt

AT_ONCE = 5.0
"""Seconds within which a handler must run. On an idle machine the handler runs within 0.2 s; if waits did not check for
signals, the handler would run only after TIMEOUT.
"""
Call = Callable[[Communicator], object]


class Peer:
    """Rank 1, which opens the same communicator, and makes calls on request in its own thread."""

    def __init__(self, make: Callable[[int], Any] = lambda _: None) -> None:
        require_devices(2)
        bootstraps = ThreadBootstrap.create(2)
        self._todo: list[Call] = []
        self._told = threading.Event()
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run, args=(bootstraps[1], make), daemon=True)
        self._thread.start()
        self.comm = Communicator(bootstraps[0], make(0), timeout=TIMEOUT)

    def _run(self, bootstrap: ThreadBootstrap, make: Callable[[int], Any]) -> None:
        comm = Communicator(bootstrap, make(1), timeout=TIMEOUT)
        every_call(comm)
        self._told.wait()
        try:
            self.outcome = self._todo[0](comm)
        except Exception as error:
            self.outcome = error
        comm.close(wait=False)

    def come(self, call: Call) -> None:
        """Lets rank 1 make a call."""
        self._todo.append(call)
        self._told.set()

    def ended(self) -> object:
        """Waits for rank 1's thread, and returns the outcome of its call."""
        self._thread.join(TIMEOUT)
        return self.outcome


def every_call(comm: Communicator) -> None:
    """Makes every call of CALLS once, so that later calls set nothing up."""
    array = on_device(comm, np.ones(100000, np.float32))
    for algorithm in ("one_shot", "ring", "proxy"):
        comm.all_reduce(array, algorithm=algorithm)
    comm.all_gather(array)
    comm.gather(array)
    with comm.transfers() as transfers:
        transfers.send(array, 1 - comm.rank)
        transfers.recv(on_device(comm, np.ones(100000, np.float32)), 1 - comm.rank)
    comm.barrier()
    comm.synchronize()


def reduced(comm: Communicator, algorithm: str, count: int) -> Any:
    array = on_device(comm, np.ones(count, np.float32))
    comm.all_reduce(array, algorithm=algorithm)
    comm.synchronize()
    return on_host(array)


def on_stream(wait: Callable[[Communicator, Any], object]) -> Call:
    def call(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        comm.all_reduce(on_device(comm, np.ones(10, np.float32)), stream=stream)
        wait(comm, stream)

    return call


def event_behind(comm: Communicator, stream: Any) -> None:
    event = comm.runtime.create_event()
    event.record(stream)
    event.synchronize()


def then_synchronize(call: Call) -> Call:
    def waiting(comm: Communicator) -> None:
        call(comm)
        comm.synchronize()

    return waiting


CALLS: dict[str, Call] = {
    "kernel": lambda comm: reduced(comm, "one_shot", 100),
    "ring": lambda comm: reduced(comm, "ring", 100000),
    "proxy": lambda comm: reduced(comm, "proxy", 100000),
    "all_gather": then_synchronize(lambda comm: comm.all_gather(on_device(comm, np.ones(10)))),
    "gather": then_synchronize(lambda comm: comm.gather(on_device(comm, np.ones(10)))),
    "recv": then_synchronize(lambda comm: comm.recv(on_device(comm, np.ones(10)), 1)),
    "send": then_synchronize(lambda comm: comm.send(on_device(comm, np.ones(1 << 22)), 1)),
    "barrier": then_synchronize(lambda comm: comm.barrier()),
    "stream": on_stream(lambda _, stream: stream.synchronize()),
    "stream by communicator": on_stream(lambda comm, stream: comm.synchronize(stream)),
    "all streams": on_stream(lambda comm, _: comm.synchronize()),
    "event": on_stream(event_behind),
    "exchange": lambda comm: comm.all_gather_bytes(b""),
    "split": lambda comm: comm.split([0, 1]),
    "shrink": lambda comm: comm.shrink(),
    "close": lambda comm: comm.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_ends_the_wait_at_once(name: str) -> None:
    peer = Peer()
    with contextlib.suppress(Interrupt), peer.comm as comm:  # the exception also leaves this block
        every_call(comm)
        with handling(interrupt) as times:
            with pytest.raises(Interrupt):
                CALLS[name](comm)
            assert time.monotonic() - times[0] < AT_ONCE
        raise Interrupt
    peer.come(lambda comm: comm.close() if name == "close" else comm.barrier())
    outcome = peer.ended()
    assert outcome is None if name == "close" else isinstance(outcome, AbortedError), outcome


@pytest.mark.host_only(reason="a GPU's kernel has as many blocks as it needs")
def test_a_wait_for_other_blocks_is_interrupted() -> None:
    peer = Peer(runtime_with_blocks)
    every_call(peer.comm)
    with handling(interrupt) as times:
        with pytest.raises(Interrupt):
            reduced(peer.comm, "ring", 100000)
        assert time.monotonic() - times[0] < AT_ONCE
    peer.come(lambda comm: comm.barrier())
    assert isinstance(peer.ended(), AbortedError)
    peer.comm.close()


@pytest.mark.parametrize("name", ["kernel", "ring", "proxy"])
def test_a_wait_goes_on_when_the_handler_returns(name: str) -> None:
    peer = Peer()
    every_call(peer.comm)
    with handling(lambda: peer.come(CALLS[name])) as times:  # rank 1 makes the call once the handler has run
        assert (CALLS[name](peer.comm) == 2).all()
    assert len(times) == 1
    assert (peer.ended() == 2).all()
    peer.comm.close()


@pytest.mark.parametrize(
    "end",
    [
        lambda comm: comm.abort("by a handler"),
        pytest.param(lambda comm: comm.close(), marks=pytest.mark.host_only(reason="a GPU's kernels are waited for")),
    ],
    ids=["abort", "close"],
)
def test_a_handler_may_end_what_it_interrupts(end: Call) -> None:
    peer = Peer()
    every_call(peer.comm)
    with handling(lambda: end(peer.comm)), pytest.raises(AbortedError):
        CALLS["kernel"](peer.comm)
    peer.come(lambda comm: comm.barrier())
    assert isinstance(peer.ended(), AbortedError)
    peer.comm.close()


@pytest.mark.host_only(reason="a GPU's stream takes it")
def test_a_handler_is_refused_what_it_interrupts() -> None:
    peer = Peer()
    every_call(peer.comm)
    with handling(lambda: CALLS["ring"](peer.comm)), pytest.raises(KernelError, match="a signal's handler can't use"):
        CALLS["kernel"](peer.comm)
    peer.come(lambda comm: comm.barrier())
    assert isinstance(peer.ended(), AbortedError)
    peer.comm.close()
