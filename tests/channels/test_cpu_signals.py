"""ProxyChannels used by the CPU, which signals peers' CPUs and kernels, and waits for their signals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from proxyccl import AbortedError, ArgumentError, Communicator, CommunicatorError, TriggerError, WaitTimeoutError
from support.ranks import Ranks
from support.running import impatient

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void answer(DeviceHandle<ProxyChannel>* channels, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (!channels[0].wait()) return;
    channels[0].signal();
  }
}
extern "C" __global__ void put(DeviceHandle<ProxyChannel>* channels, unsigned long bytes) {
  channels[0].put(0, 0, bytes);
}
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def channel_of(comm: Communicator, **options: Any) -> Any:
    (channel,) = comm.proxy_channels(comm.empty(16, "uint8"), **options)
    return channel


def test_two_cpus_play_ping_pong(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        channel = channel_of(comm)
        for _ in range(20):
            if comm.rank == 0:
                channel.signal()
                channel.wait()
            else:
                channel.wait()
                channel.signal()
        assert not channel.poll()
        comm.barrier()

    ranks.run(body)


def test_a_cpu_and_a_kernel_play_ping_pong(ranks: Ranks) -> None:
    rounds = 10

    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(16, "uint8"))
        if comm.rank == 0:
            for _ in range(rounds):
                channels[0].signal()
                channels[0].wait()
        else:
            comm.compile(KERNELS, "answer")(1, 1, channels, rounds)
        comm.synchronize()
        comm.barrier()

    ranks.run(body)


def test_a_signal_from_the_cpu_comes_behind_the_data_of_earlier_puts(ranks: Ranks) -> None:
    nbytes = 1 << 20

    def body(comm: Communicator) -> None:
        target, source = comm.empty(nbytes, "uint8").fill(0), comm.empty(nbytes, "uint8").fill(comm.rank + 1)
        channels = comm.proxy_channels(target, source)
        comm.compile(KERNELS, "put")(1, 1, channels, nbytes)
        channels[0].signal()
        channels[0].wait()
        assert (target.numpy() == 2 - comm.rank).all()
        comm.barrier()

    ranks.run(body)


def test_counts_rise_to_values(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        channel = channel_of(comm)
        if comm.rank == 0:
            channel.signal(3)
            channel.signal()
            channel.wait_until(1)
        else:
            channel.wait_until(2)
            channel.wait()
            channel.wait()
            channel.wait_until(1)  # returns at once, because this signal was consumed earlier
            assert not channel.poll()
            channel.signal(1 << 50)
        comm.barrier()

    ranks.run(body)


def test_a_channel_to_oneself_joins_the_cpu_and_its_own_kernels(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        channel = channel_of(comm, peers=[comm.rank])
        assert not channel.poll()
        channel.signal()
        channel.wait()
        comm.barrier()

    ranks.run(body)


@pytest.mark.parametrize("value", [0, -1, 1 << 64, "3", 1.5])
def test_what_is_no_count_is_refused(ranks: Ranks, value: Any) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=r"^value: must be a count from 1 to"):
            channel_of(comm).signal(value)
        comm.barrier()

    ranks.run(body)


def test_a_count_that_does_not_rise_ends_the_communicator() -> None:
    def fail(comm: Communicator) -> None:
        channel = channel_of(comm)
        channel.signal(2)
        channel.wait_until(2)
        comm.barrier()
        if comm.rank == 0:
            channel.signal(2)
        channel.wait()

    def body(comm: Communicator) -> None:
        with pytest.raises(TriggerError, match="pushed a trigger that was refused: signal"):
            fail(comm)

    with Ranks(2) as pair:
        pair.run(body)


def test_a_wait_that_nobody_answers_ends_by_name() -> None:
    def body(comm: Communicator) -> None:
        channel = channel_of(comm)
        impatient(comm, 1)
        if comm.rank == 0:
            with pytest.raises(
                WaitTimeoutError, match=r"waited too long on the CPU for a signal from rank 1 .* expected 1"
            ):
                channel.wait()
        else:
            with pytest.raises(WaitTimeoutError):
                wait_for_the_end(comm)

    def wait_for_the_end(comm: Communicator) -> None:
        while True:
            comm.group.failure.check()
            time.sleep(0.005)

    with Ranks(2) as pair:
        pair.run(body)


def test_a_wait_ends_when_a_peer_ends_the_communicator() -> None:
    def body(comm: Communicator) -> None:
        channel = channel_of(comm)
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(AbortedError):
            channel.wait()
        with pytest.raises(CommunicatorError):
            channel.poll()
        with pytest.raises(CommunicatorError):
            channel.signal()

    with Ranks(2) as pair:
        pair.run(body)
