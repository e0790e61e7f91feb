"""The watch that detects a stopped proxy, and ends streams' waits for this proxy."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, ProxyLostError, Trigger
from proxyccl.proxy import shared_words
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.shared_words import TurnWatch
from support.device_arrays import on_device, on_host
from support.hanging import caught
from support.running import run_ranks

PUSH = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void push(DeviceHandle<ProxyChannel> channel) { channel.custom(0, 0, 0); }
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shared_words, "time", clock)
    return clock


@pytest.fixture
def words() -> Any:
    words = ffi.new("ProxycclScheduleWords *")
    words.turns[0].count = words.turns[1].count = 7
    return words


def passes(watch: TurnWatch, clock: Clock, seconds: float) -> float:
    """Advances the clock by `seconds`, and calls the watch ten times per simulated second. Returns the last result."""
    idle = 0.0
    for _ in range(round(10 * seconds)):
        clock.now += 0.1
        idle = watch.look_for_streams()
    return idle


def test_time_counts_while_a_stream_waits_and_one_worker_takes_no_turn(words: Any, clock: Clock) -> None:
    watch = TurnWatch(words, 2)
    assert passes(watch, clock, 5) == 0
    words.bell = 3
    assert passes(watch, clock, 2) == pytest.approx(2)
    words.bell, words.running = 0, 3
    words.turns[0].count += 1
    assert passes(watch, clock, 1) == pytest.approx(3)  # worker 1 has had no turn for 3 s
    words.turns[0].count += 1
    words.turns[1].count += 1
    assert passes(watch, clock, 1) == pytest.approx(0.9)
    words.running = 0
    assert passes(watch, clock, 1) == 0


def test_a_worker_that_has_ended_is_not_waited_for(words: Any, clock: Clock) -> None:
    watch = TurnWatch(words, 1)
    words.bell, words.turns[0].count = 3, lib.PROXYCCL_NO_MORE_TURNS
    assert passes(watch, clock, 5) == 0


def test_time_in_which_nobody_could_look_does_not_count(words: Any, clock: Clock) -> None:
    watch = TurnWatch(words, 1)
    words.bell = 3
    passes(watch, clock, 1)
    clock.now += 1000  # simulates that this process itself was stopped
    assert watch.look_for_streams() < 2


def held_up(seconds: float, timeout: float) -> list[BaseException | None]:
    """Runs a collective by proxy while a handler blocks rank 0's proxy for `seconds`. Returns each rank's error, or
    None.
    """

    def body(comm: Communicator) -> BaseException | None:
        began, go_on = threading.Event(), threading.Event()

        def handler(_: Trigger) -> None:
            began.set()
            go_on.wait(seconds)

        x = on_device(comm, np.ones(1000, np.float32))
        comm.all_reduce(x, algorithm="proxy")
        comm.synchronize()
        channel = comm.handler_channel(handler)
        if comm.rank == 0:
            comm.compile(PUSH, "push")(1, 1, channel)
            comm.synchronize()
            assert began.wait(60)
        comm.all_gather_bytes(b"")
        if comm.rank == 1:  # rank 1's proxy starts to wait before rank 0's, so rank 1 needs a longer time-out
            comm.group.set_timeout(60)
        started = time.monotonic()

        def call() -> None:
            comm.all_reduce(x, algorithm="proxy")
            comm.synchronize()
            assert (on_host(x) == 4).all()

        error = caught(call)
        assert time.monotonic() - started < timeout + 5
        go_on.set()
        return error

    return run_ranks(2, body, timeout=timeout, proxy="thread", fifos=1)


def test_a_handler_may_hold_up_a_stream_for_less_than_the_time_out() -> None:
    assert held_up(0.5, 20.0) == [None, None]


def test_a_handler_that_holds_up_a_stream_for_the_time_out_ends_the_communicator() -> None:
    errors = held_up(60.0, 2.0)
    assert isinstance(errors[0], ProxyLostError)
    assert "a handler on channel" in str(errors[0])
    assert "holds up the proxy of this rank" in str(errors[0])
    assert isinstance(errors[1], ProxyLostError)
    assert "holds up the proxy of rank 0" in str(errors[1])
