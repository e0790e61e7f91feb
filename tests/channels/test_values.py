"""Triggers that carry a value: puts of a value, and signals that raise a peer's count to a value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl import Communicator, TriggerError
from support.devices import rank_runtime
from support.ranks import Ranks

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Proxy = DeviceHandle<ProxyChannel>;
using Sm = DeviceHandle<SmChannel>;
struct Pair { uint16_t a, b; };

extern "C" __global__ void each_size(Proxy* channels, unsigned long at) {
  const Proxy& channel = channels[0];
  channel.putValue(at, static_cast<uint8_t>(0x81));
  channel.putValue(at + 1, static_cast<int16_t>(-2));
  channel.putValue(at + 3, 1.5f);
  channel.putValue(at + 7, Pair{0x1234, 0x5678});
  channel.putValueWithSignal(at + 11, -3.25);
  channel.wait();
  channel.flush();
}
// Puts of memory, each followed by a value over its middle: the last value stays.
extern "C" __global__ void in_order(Proxy* channels, int turns, unsigned long bytes) {
  for (int i = 0; i < turns; ++i) {
    channels[0].put(0, 0, bytes);
    channels[0].putValue(bytes / 2, i);
  }
  channels[0].signal();
  channels[0].wait();
}
extern "C" __global__ void many(Proxy* channels, unsigned count) {
  for (unsigned i = 0; i < count; ++i) channels[0].putValue(4 * i, i);
  channels[0].signal();
  channels[0].wait();
}
extern "C" __global__ void leaves(Proxy* channels, unsigned long at) {
  channels[0].putValue(at, 1ul);
  channels[0].flush();  // the proxy has seen the trigger when the kernel ends
}

template <class Channel>
__device__ void raise(const Channel& channel, int rank, int* seen) {
  if (rank == 0) {
    channel.signal(3);
    channel.signal();
    channel.signal(100);
    channel.wait();
    return;
  }
  for (int i = 0; i < 3; ++i) channel.wait();
  seen[0] = channel.waitUntil(2);   // consumed before
  seen[1] = channel.waitUntil(4);
  seen[2] = channel.waitUntil(99);
  while (!channel.poll()) spinHint(0);
  seen[3] = channel.poll();
  channel.signal();
}
extern "C" __global__ void proxy_raise(Proxy* channels, int rank, int* seen) { raise(channels[0], rank, seen); }
extern "C" __global__ void sm_raise(Sm* channels, int rank, int* seen) { raise(channels[0], rank, seen); }
template <class Channel>
__device__ void lower(const Channel& channel, int rank) {
  if (rank == 1) channel.wait();
  if (rank == 1) return;
  channel.signal(5);
  channel.signal(5);
}
extern "C" __global__ void proxy_lower(Proxy* channels, int rank) {
  lower(channels[0], rank);
  channels[0].flush();  // the proxy has seen the triggers when the kernel ends
}
extern "C" __global__ void sm_lower(Sm* channels, int rank) { lower(channels[0], rank); }
"""
SIZE = 4096


def run_on_all(comm: Communicator, kernel: str, *arguments: object) -> None:
    """Runs a kernel on all ranks, and waits until it ends or the communicator fails."""
    comm.compile(KERNELS, kernel)(1, 1, *arguments)
    comm.synchronize()
    comm.barrier()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


@pytest.mark.parametrize("at", [0, 5])
def test_a_value_of_each_size_arrives_at_any_offset(ranks: Ranks, at: int) -> None:
    def body(comm: Communicator) -> None:
        target = comm.empty(SIZE, "uint8").fill(0xEE)
        channels = comm.proxy_channels(target, target)
        comm.compile(KERNELS, "each_size")(1, 1, channels, at)
        comm.synchronize()
        sent = np.uint8(0x81).tobytes() + np.int16(-2).tobytes() + np.float32(1.5).tobytes()
        sent += np.array([0x1234, 0x5678], np.uint16).tobytes() + np.float64(-3.25).tobytes()
        got = target.numpy().tobytes()
        assert got == b"\xee" * at + sent + b"\xee" * (SIZE - at - len(sent))
        counters = channels[0].counters
        assert (counters.puts, counters.bytes, counters.signals) == (5, len(sent), 1)
        comm.barrier()

    ranks.run(body)


def test_values_and_puts_keep_their_order(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(SIZE, "uint8").fill(0), comm.empty(SIZE, "uint8").fill(comm.rank + 1)
        comm.compile(KERNELS, "in_order")(1, 1, comm.proxy_channels(target, source), 300, SIZE)
        comm.synchronize()
        got = target.numpy()
        assert got[SIZE // 2 : SIZE // 2 + 4].view(np.int32)[0] == 299
        got[SIZE // 2 : SIZE // 2 + 4] = 2 - comm.rank
        assert (got == 2 - comm.rank).all()
        comm.barrier()

    ranks.run(body)


def test_more_values_arrive_than_can_be_on_their_way(ranks: Ranks) -> None:
    count = 5000

    def body(comm: Communicator) -> None:
        target = comm.empty(count, "uint32").fill(7)
        comm.compile(KERNELS, "many")(1, 1, comm.proxy_channels(target, target), count)
        comm.synchronize()
        assert (target.numpy() == np.arange(count)).all()
        comm.barrier()

    ranks.run(body)


@pytest.mark.parametrize(("kind", "adds"), [("proxy", True), ("sm", True), ("sm", False)])
def test_a_signal_raises_the_count_to_its_value(
    ranks: Ranks, kind: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the link to the peer supports no atomic additions, the kernel stores the new count."""
    if not adds:
        monkeypatch.setattr(type(rank_runtime(0)), "adds_at_peer", lambda *_: False)

    def body(comm: Communicator) -> None:
        memory, seen = comm.empty(8, "uint8"), comm.empty(4, "int32").fill(-1)
        channels = (comm.proxy_channels if kind == "proxy" else comm.sm_channels)(memory, memory)
        comm.compile(KERNELS, f"{kind}_raise")(1, 1, channels, comm.rank, seen)
        comm.synchronize()
        if comm.rank == 1:
            assert seen.numpy().tolist() == [1, 1, 1, 0]
        comm.barrier()

    ranks.run(body)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("proxy", "pushed a trigger that was refused: signal"),
        ("sm", "rank 0 signalled rank 1 with the value 5; expected one above the count of signals, 5"),
    ],
)
def test_a_count_that_does_not_rise_is_refused(kind: str, message: str) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.empty(8, "uint8")
        channels = (comm.proxy_channels if kind == "proxy" else comm.sm_channels)(memory, memory)
        with pytest.raises(TriggerError) as caught:
            run_on_all(comm, f"{kind}_lower", channels, comm.rank)
        if comm.rank == (0 if kind == "proxy" else 1):
            assert message in str(caught.value)

    with Ranks(2) as pair:
        pair.run(body)


@pytest.mark.parametrize("at", [SIZE - 7, 1 << 33])
def test_a_value_that_leaves_the_memory_is_refused(at: int) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(SIZE, "uint8"), comm.empty(SIZE, "uint8"))
        with pytest.raises(TriggerError, match="of 8 bytes at offset"):
            run_on_all(comm, "leaves", channels, at)

    with Ranks(2) as pair:
        pair.run(body)
