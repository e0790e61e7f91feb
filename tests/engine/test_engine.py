"""The proxy service: handlers, sharing of rings and threads, counters, idling."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, ClosedError, Communicator, Operation, ProxyService, ResourceError, Trigger
from proxyccl.proxy.thread import IdlePolicy
from support.device_arrays import barrier, on_device, on_host
from support.running import run_ranks

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void every_operation(ProxyChannelDeviceHandle channel) {
  channel.custom(1, 2);
  channel.put(3, 4, 5);
  channel.signal();
  channel.putWithSignal(6, 7, 8);
  channel.putWithSignalAndFlush(9, 10, 11);
  channel.flush();
}
extern "C" __global__ void largest(ProxyChannelDeviceHandle channel) {
  channel.custom(0xffffffff, 0xffffffff, 0xfffffffe);
  channel.flush();
}
extern "C" __global__ void flush(ProxyChannelDeviceHandle channel) { channel.flush(); }
extern "C" __global__ void mixed(DeviceHandle<ProxyChannel>* channels, int puts, int signals, int flushes) {
  for (int i = 0; i < puts; ++i) channels[0].put(0, 0, 100);
  for (int i = 0; i < signals; ++i) channels[0].signal();
  for (int i = 0; i < flushes; ++i) channels[0].flush();
}
"""


def test_a_handler_gets_every_operation_in_order() -> None:
    def body(comm: Communicator) -> None:
        seen: list[Trigger] = []
        channel = comm.handler_channel(seen.append)
        comm.compile(KERNELS, "every_operation")(1, 1, channel)
        comm.synchronize()
        data, signal, flush = Operation.DATA, Operation.SIGNAL, Operation.FLUSH
        assert [t.operation for t in seen] == [
            Operation.CUSTOM,
            data,
            signal,
            data | signal,
            data | signal | flush,
            flush,
        ]
        assert (seen[1].dst_offset, seen[1].src_offset, seen[1].size) == (3, 4, 5)
        assert {t.channel for t in seen} == {channel.id}
        assert comm.proxy.counters(channel.id).triggers == 6

    run_ranks(1, body)


def test_a_custom_trigger_carries_three_numbers_of_32_bits() -> None:
    def body(comm: Communicator) -> None:
        seen: list[Trigger] = []
        channel = comm.handler_channel(seen.append)
        comm.compile(KERNELS, "largest")(1, 1, channel)
        comm.synchronize()
        largest = (1 << 32) - 1
        expected = Trigger(Operation.CUSTOM, channel.id, largest, src_offset=largest - 1, dst_offset=largest)
        assert seen == [expected, Trigger(Operation.FLUSH, channel.id)]

    run_ranks(1, body)


def test_a_flush_returns_only_when_the_handler_has() -> None:
    def body(comm: Communicator) -> None:
        ended: list[float] = []

        def slow(_: Trigger) -> None:
            time.sleep(0.05)
            ended.append(time.monotonic())

        comm.compile(KERNELS, "flush")(1, 1, comm.handler_channel(slow))
        comm.synchronize()
        assert len(ended) == 1

    run_ranks(1, body)


def test_handlers_run_in_the_proxys_thread() -> None:
    def body(comm: Communicator) -> None:
        names: set[str] = set()
        kernel = comm.compile(KERNELS, "flush")
        for _ in range(4):
            kernel(1, 1, comm.handler_channel(lambda _: names.add(threading.current_thread().name)))
        comm.synchronize()
        assert names == {"proxyccl-0-proxy-0", "proxyccl-0-proxy-1"}

    run_ranks(1, body, fifos=2, proxy_threads=2)


def test_counters_say_what_a_channel_did() -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(1024, "uint8"))
        barrier(comm)
        comm.compile(KERNELS, "mixed")(1, 1, channels, 7, 5, 3)
        comm.synchronize()
        counters = channels[0].counters
        assert (counters.puts, counters.bytes, counters.signals, counters.flushes) == (7, 700, 5, 3)
        assert counters.triggers == 15
        barrier(comm)

    run_ranks(2, body)


def test_counters_only_grow_while_they_are_read() -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(1024, "uint8"))
        barrier(comm)
        stream = comm.runtime.create_stream()
        kernel = comm.compile(KERNELS, "mixed")
        kernel(1, 1, channels, 2000, 0, 1, stream=stream)
        last = 0
        while not stream.query():
            now = channels[0].counters.puts
            assert last <= now <= 2000
            last = now
        assert channels[0].counters.puts == 2000
        barrier(comm)

    run_ranks(2, body)


def test_counters_of_no_channel_are_refused() -> None:
    def body(comm: Communicator) -> ProxyService:
        for channel in (-1, 1024):
            with pytest.raises(ArgumentError, match="channel"):
                comm.proxy.counters(channel)
        return comm.proxy

    (service,) = run_ranks(1, body)
    with pytest.raises(ClosedError):
        service.counters(0)
    with pytest.raises(ClosedError):
        service.outstanding(0)
    with pytest.raises(ClosedError):
        service.schedule_waits()
    with pytest.raises(ClosedError):
        service.add_handler(print)
    assert service.close()


@pytest.mark.own_proxy(reason="about the workers of this process")
def test_a_channel_id_that_was_freed_serves_any_worker() -> None:
    def body(comm: Communicator) -> None:
        service = comm.proxy
        one, other = service.connect_copy(), service.connect_copy()
        reserved = [service.reserve_channel(one) for _ in range(1024)]
        with pytest.raises(ResourceError, match="all 1024 channel ids are in use"):
            service.reserve_channel(other)
        service.free_channels(reserved, one)
        channel = service.reserve_channel(other)
        assert service.ring_of(channel) == other.worker != one.worker

    run_ranks(1, body, fifos=2, proxy_threads=2)


def test_a_handler_must_be_callable() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="handler"):
            comm.handler_channel("not a function")  # type: ignore[arg-type]

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("fifos", "proxy_threads", "argument"),
    [
        (0, 1, "fifos"),
        (65, 1, "fifos"),
        (1, 2, "fifos"),
        ("ring", 1, "fifos"),
        (None, 1, "fifos"),
        (1, 0, "proxy_threads"),
        (1, "2", "proxy_threads"),
    ],
)
def test_rings_and_threads_must_be_sensible_numbers(fifos: Any, proxy_threads: Any, argument: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: must be"):
        run_ranks(1, lambda comm: None, fifos=fifos, proxy_threads=proxy_threads)


def test_a_proxy_that_slept_wakes_up() -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(100, "uint8"))
        kernel = comm.compile(KERNELS, "mixed")
        barrier(comm)
        for turn in range(5):
            time.sleep(0.02)
            kernel(1, 1, channels, 1, 0, 1)  # a kernel's flush waits for the proxy
            comm.synchronize()
            assert channels[0].counters.flushes == turn + 1
            time.sleep(0.02)
            x = on_device(comm, np.ones(4, np.float32))
            comm.all_reduce(x, algorithm="proxy")
            assert (on_host(x) == 2).all()

    run_ranks(2, body, idle=IdlePolicy(spin_us=0, yield_us=0, max_sleep_us=5000))
