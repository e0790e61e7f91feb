"""The ring under stress: more producers than slots, many laps, several rings; nothing is lost or reordered."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from proxyccl import ArgumentError, Communicator, Runtime, Trigger
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.service import ProxyService
from support.device_arrays import barrier
from support.devices import ON_HOST, rank_runtime
from support.ranks import Ranks
from support.running import run_ranks

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

PRODUCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void produce(ProxyChannelDeviceHandle channel, int times, int synced) {
  const unsigned producer = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = 0; i < times; ++i) {
    const ProxycclTrigger trigger = makeTrigger(PROXYCCL_OP_CUSTOM, channel.channel, 0, i, 0, producer, 0);
    const Fifo ring{channel.fifo};
    const unsigned long ticket = ring.push(trigger, channel.control);
    if (synced) ring.sync(ticket, channel.control);
  }
}
extern "C" __global__ void fill(DeviceHandle<ProxyChannel>* channels, int peers, unsigned long bytes, int times) {
  const int peer = blockIdx.x;
  if (threadIdx.x != 0) return;
  for (int i = 0; i < times; ++i) channels[peer].put(peer * bytes, 0, bytes);
  channels[peer].flush();
}
extern "C" __global__ void put_then_flush(DeviceHandle<ProxyChannel>* channels, int put_to, int flush_to,
                                          unsigned long bytes) {
  channels[put_to].put(0, 0, bytes);
  channels[flush_to].flush();
}
extern "C" __global__ void hold(const int* gate) {
  for (unsigned spins = 0; loadAcquireSystem(gate) == 0; ++spins) spinHint(spins);
}
extern "C" __global__ void put_and_flush_each(DeviceHandle<ProxyChannel>* channels, int* values, int times,
                                              int* wrong) {
  for (int i = 1; i <= times; ++i) {
    values[0] = i;  // the source may be overwritten after a flush
    channels[0].put(64, 0, 4);
    if (!channels[0].flush()) ++*wrong;
  }
}
"""


def copying_runtime(rank: int) -> Runtime:
    """Returns a runtime whose copies for the proxy run asynchronously, as on a GPU."""
    return HostRuntime(async_copies=True) if ON_HOST else rank_runtime(rank)


def assert_complete(seen: list[Trigger], producers: int, times: int) -> None:
    by_producer: dict[int, list[int]] = defaultdict(list)
    for trigger in seen:
        by_producer[trigger.src_offset].append(trigger.dst_offset)
    assert len(seen) == producers * times
    assert sorted(by_producer) == list(range(producers))
    assert all(sequence == list(range(times)) for sequence in by_producer.values())


@pytest.mark.parametrize("synced", [0, 1], ids=["push", "push-and-sync"])
@pytest.mark.parametrize(
    ("slots", "blocks", "threads", "times"),
    [(2, 1, 1, 100), (2, 4, 128, 4), (8, 8, 64, 4), (16, 16, 32, 4), (64, 2, 256, 4), (1024, 2, 256, 4)],
)
def test_nothing_is_lost_and_each_producers_order_is_kept(
    slots: int, blocks: int, threads: int, times: int, synced: int
) -> None:
    def body(comm: Communicator) -> None:
        seen: list[Trigger] = []
        channel = comm.handler_channel(seen.append)
        comm.compile(PRODUCE, "produce")(blocks, threads, channel, times, synced)
        comm.synchronize()
        comm.proxy.close()  # drains the ring
        assert_complete(seen, blocks * threads, times)

    run_ranks(1, body, fifo_size=slots)


@pytest.mark.parametrize(("fifos", "proxy_threads"), [(2, 1), (3, 2), (4, 4)])
def test_rings_and_threads_keep_the_order_of_each_channel(fifos: int, proxy_threads: int) -> None:
    def body(comm: Communicator) -> None:
        seen: list[list[Trigger]] = [[] for _ in range(2 * fifos)]
        kernel = comm.compile(PRODUCE, "produce")
        for log in seen:
            kernel(2, 32, comm.handler_channel(log.append), 6, 0, stream=comm.runtime.create_stream())
        comm.synchronize()
        assert len(comm.proxy.fifos) == fifos
        comm.proxy.close()
        for log in seen:
            assert_complete(log, 64, 6)

    run_ranks(1, body, fifos=fifos, proxy_threads=proxy_threads, fifo_size=8)


@pytest.mark.daemon
def test_each_peer_has_a_ring_of_its_own() -> None:
    def body(comm: Communicator) -> None:
        memory = comm.empty(16, "uint8")
        for _ in range(2):  # the second iteration reuses freed ids in another order
            sets = [comm.proxy_channels(memory, peers=peers) for peers in ([1, 2], [2, 1, 0], None)]
            rings = {
                peer: {comm.proxy.fifo_for(c.id) for each in sets for c in each if c.peer == peer} for peer in (1, 2)
            }
            if comm.rank == 0:
                assert len(rings[1]) == len(rings[2]) == 1
                assert rings[1] != rings[2]
            for channel in sets[1]:
                assert comm.proxy.fifo_for(channel.id) in comm.proxy.fifos
        assert len(comm.proxy.fifos) == 3

    run_ranks(3, body, fifos="peer")


def test_the_ring_survives_many_laps_of_transfers() -> None:
    """Each block puts to its own peer repeatedly, through a ring of two slots; the data must arrive complete."""

    def body(comm: Communicator) -> None:
        nbytes, peers, times = 256, comm.world_size - 1, 300
        out = comm.empty(nbytes * (peers + 1), "uint8").fill(comm.rank + 1)
        channels = comm.proxy_channels(out)
        barrier(comm)
        comm.compile(PRODUCE, "fill")(peers, 1, channels, peers, nbytes, times)
        comm.synchronize()
        barrier(comm)
        for channel in channels:
            assert channel.counters.puts == times
            assert channel.counters.bytes == times * nbytes
            assert channel.counters.flushes == 1
            assert channel.counters.triggers == times + 1

    run_ranks(3, body, fifo_size=2)


@pytest.mark.parametrize(
    "async_copies",
    [
        pytest.param(False, marks=pytest.mark.host_only(reason="copies of a GPU are asynchronous"), id="inline-copies"),
        pytest.param(True, id="asynchronous-copies"),
    ],
)
def test_a_flush_covers_the_puts_before_it(async_copies: bool) -> None:
    """The source is overwritten after each flush, so the flush must wait until the previous value has been sent."""

    def body(comm: Communicator) -> None:
        array = comm.empty(32, "int32").fill(0)
        wrong = comm.empty(1, "int32").fill(0)
        channels = comm.proxy_channels(array)
        barrier(comm)
        times = 200
        comm.compile(PRODUCE, "put_and_flush_each")(1, 1, channels, array, times, wrong)
        comm.synchronize()
        barrier(comm)
        assert wrong.numpy()[0] == 0
        assert array.numpy()[16] == times

    with Ranks(2, make_runtime=copying_runtime if async_copies else rank_runtime) as ranks:
        ranks.run(body)


@pytest.mark.own_proxy(reason="blocks a stream of the proxy's")
def test_a_flush_does_not_wait_for_other_channels() -> None:
    """While the stream to one peer is blocked, only a flush to the other peer completes."""

    def body(comm: Communicator) -> None:
        array = comm.empty(1024, "uint8").fill(comm.rank)
        channels = comm.proxy_channels(array)
        kernel = comm.compile(PRODUCE, "put_then_flush")
        barrier(comm)
        if comm.rank == 0:
            runtime = comm.runtime
            blocked, free, held = (runtime.create_stream() for _ in range(3))
            gate = comm.empty(1, "int32").fill(0)
            assert isinstance(comm.proxy, ProxyService)
            copies, _ = comm.proxy.engine_connections[comm.group.links.connection(1).number].owned
            comm.compile(PRODUCE, "hold")(1, 1, gate, stream=blocked)
            try:
                runtime.order_streams(blocked.handle, copies.handle)
                kernel(1, 1, channels, 0, 1, 64, stream=free)
                free.synchronize()
                assert channels[0].counters.puts == 1
                kernel(1, 1, channels, 0, 0, 64, stream=held)
                time.sleep(0.05)
                assert not held.query()
            finally:
                gate.fill(1)
            held.synchronize()
        barrier(comm)
        expected = 0 if comm.rank == 1 else comm.rank
        assert (array.numpy()[:64] == expected).all()

    with Ranks(3, make_runtime=copying_runtime) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("size", [0, 1, 3, 1000, -2, 1 << 21, "64", 2.0])
def test_a_ring_has_a_power_of_two_slots(size: object) -> None:
    with pytest.raises(ArgumentError, match="fifo_size"):
        run_ranks(1, lambda _: None, fifo_size=size)
