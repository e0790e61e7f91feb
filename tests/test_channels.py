"""SmChannel and ProxyChannel: every method that a kernel can call, at offsets, and between memories given by number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_arrays import barrier
from ranks import Ranks

from proxyccl import ArgumentError, Communicator

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Sm = DeviceHandle<SmChannel>;
using Proxy = DeviceHandle<ProxyChannel>;

extern "C" __global__ void sm_put(Sm* channels, unsigned long dst, unsigned long src, unsigned long bytes) {
  channels[0].put(dst, src, bytes, threadIdx.x, blockDim.x);
  syncThreadsSystem();
  if (threadIdx.x == 0) { channels[0].signal(); channels[0].wait(); }
}
extern "C" __global__ void sm_put_same(Sm* channels, unsigned long offset, unsigned long bytes) {
  channels[0].put(offset, bytes, threadIdx.x, blockDim.x);
  syncThreadsSystem();
  if (threadIdx.x == 0) { channels[0].signal(); channels[0].wait(); }
}
extern "C" __global__ void sm_get(Sm* channels, unsigned long dst, unsigned long src, unsigned long bytes) {
  channels[0].get(dst, src, bytes, threadIdx.x, blockDim.x);
}
extern "C" __global__ void sm_get_same(Sm* channels, unsigned long offset, unsigned long bytes) {
  channels[0].get(offset, bytes, threadIdx.x, blockDim.x);
}
extern "C" __global__ void sm_read_write(Sm* channels, int* out) {
  channels[0].write<int>(threadIdx.x, 100 + threadIdx.x);
  syncThreadsSystem();
  if (threadIdx.x == 0) { channels[0].relaxedSignal(); channels[0].wait(); }
  __syncthreads();
  out[threadIdx.x] = channels[0].read<int>(threadIdx.x);
}
extern "C" __global__ void sm_packets16(Sm* channels, unsigned long dst, unsigned long src, unsigned long to,
                                        unsigned long bytes, unsigned flag) {
  channels[0].putPackets(dst, src, bytes, threadIdx.x, blockDim.x, flag);
  channels[0].getPackets(dst, to, bytes, threadIdx.x, blockDim.x, flag);
}
extern "C" __global__ void sm_packets8(Sm* channels, unsigned long dst, unsigned long src, unsigned long to,
                                       unsigned long bytes, unsigned flag) {
  channels[0].putPackets<LL8Packet>(dst, src, bytes, threadIdx.x, blockDim.x, flag);
  channels[0].getPackets<LL8Packet>(dst, to, bytes, threadIdx.x, blockDim.x, flag);
}
extern "C" __global__ void sm_signals(Sm* channels, int rank, int* polls) {
  if (rank == 0) {
    for (int i = 0; i < 5; ++i) channels[0].signal();
    channels[0].wait();
  } else {
    for (int i = 0; i < 3; ++i) channels[0].wait();
    while (!channels[0].poll()) spinHint(0);
    while (!channels[0].poll()) spinHint(0);
    polls[0] = channels[0].poll();
    channels[0].signal();
  }
}

extern "C" __global__ void proxy_put(Proxy* channels, unsigned long dst, unsigned long src, unsigned long bytes) {
  channels[0].put(dst, src, bytes);
  channels[0].signal();
  channels[0].wait();
}
extern "C" __global__ void proxy_put_same(Proxy* channels, unsigned long offset, unsigned long bytes) {
  channels[0].put(offset, bytes);
  channels[0].putWithSignal(offset, 0);
  channels[0].wait();
}
extern "C" __global__ void proxy_put_with_signal(Proxy* channels, unsigned long dst, unsigned long src,
                                                 unsigned long bytes) {
  channels[0].putWithSignal(dst, src, bytes);
  channels[0].wait();
}
extern "C" __global__ void proxy_put_with_signal_and_flush(Proxy* channels, unsigned long dst, unsigned long src,
                                                           unsigned long bytes) {
  channels[0].putWithSignalAndFlush(dst, src, bytes);
  channels[0].wait();
}
extern "C" __global__ void proxy_put_ids(Proxy* channels, unsigned dst_memory, unsigned long dst, unsigned src_memory,
                                         unsigned long src, unsigned long bytes) {
  channels[0].putWithSignal(dst_memory, dst, src_memory, src, bytes);
  channels[0].wait();
}
extern "C" __global__ void proxy_signals(Proxy* channels, int rank, int* polls) {
  if (rank == 0) {
    for (int i = 0; i < 5; ++i) channels[0].signal();
    channels[0].flush();
    channels[0].wait();
  } else {
    for (int i = 0; i < 3; ++i) channels[0].wait();
    while (!channels[0].poll()) spinHint(0);
    while (!channels[0].poll()) spinHint(0);
    polls[0] = channels[0].poll();
    channels[0].signal();
  }
}
"""
SIZE = 64 * 1024


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def values(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.mark.parametrize("kernel", ["sm_put", "proxy_put", "proxy_put_with_signal", "proxy_put_with_signal_and_flush"])
@pytest.mark.parametrize(
    ("dst", "src", "nbytes"), [(0, 0, 16), (5, 3, 1), (16, 48, 4096), (1001, 77, 50_003), (8, 8, 0)]
)
def test_put_moves_bytes_between_any_offsets(ranks: Ranks, kernel: str, dst: int, src: int, nbytes: int) -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(SIZE, "uint8").fill(0xEE), comm.empty(SIZE, "uint8").upload(values(comm.rank))
        channels = (comm.sm_channels if kernel.startswith("sm") else comm.proxy_channels)(target, source)
        comm.compile(KERNELS, kernel)(1, 64 if kernel.startswith("sm") else 1, channels, dst, src, nbytes)
        comm.synchronize()
        expected = np.full(SIZE, 0xEE, np.uint8)
        expected[dst : dst + nbytes] = values(1 - comm.rank)[src : src + nbytes]
        assert np.array_equal(target.numpy(), expected)
        barrier(comm)

    ranks.run(body)


@pytest.mark.parametrize("kernel", ["sm_put_same", "proxy_put_same"])
def test_put_with_one_offset_uses_it_on_both_sides(ranks: Ranks, kernel: str) -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(SIZE, "uint8").fill(0), comm.empty(SIZE, "uint8").upload(values(comm.rank))
        channels = (comm.sm_channels if kernel.startswith("sm") else comm.proxy_channels)(target, source)
        comm.compile(KERNELS, kernel)(1, 1, channels, 300, 500)
        comm.synchronize()
        assert np.array_equal(target.numpy()[300:800], values(1 - comm.rank)[300:800])
        assert not target.numpy()[:300].any()
        assert not target.numpy()[800:].any()
        barrier(comm)

    ranks.run(body)


def test_get_reads_the_peers_memory_into_the_own(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        remote, own = comm.empty(SIZE, "uint8").upload(values(comm.rank)), comm.empty(SIZE, "uint8").fill(0)
        channels = comm.sm_channels(remote, own)
        barrier(comm)
        kernels = comm.compile(KERNELS)
        kernels.sm_get(1, 64, channels, 100, 7, 30_001)
        kernels.sm_get_same(1, 64, channels, 50_000, 100)
        comm.synchronize()
        expected = np.zeros(SIZE, np.uint8)
        theirs = values(1 - comm.rank)
        expected[7 : 7 + 30_001] = theirs[100 : 100 + 30_001]
        expected[50_000:50_100] = theirs[50_000:50_100]
        assert np.array_equal(own.numpy(), expected)
        barrier(comm)

    ranks.run(body)


def test_read_and_write_touch_single_elements(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        array, out = comm.empty(64, "int32").fill(0), comm.empty(64, "int32").fill(0)
        channels = comm.sm_channels(array)
        barrier(comm)
        comm.compile(KERNELS, "sm_read_write")(1, 64, channels, out)
        comm.synchronize()
        barrier(comm)
        assert np.array_equal(array.numpy(), 100 + np.arange(64))
        assert np.array_equal(out.numpy(), 100 + np.arange(64))

    ranks.run(body)


@pytest.mark.parametrize(("kernel", "payload"), [("sm_packets16", 8), ("sm_packets8", 4)])
@pytest.mark.parametrize("count", [1, 3, 64, 1000])
def test_packets_carry_their_own_signal(ranks: Ranks, kernel: str, payload: int, count: int) -> None:
    """The same packets again and again, with a new flag each time; even and odd flags, and the largest."""

    def body(comm: Communicator) -> None:
        nbytes = payload * count
        packets = comm.empty(4 * SIZE, "uint8").fill(0)
        local = comm.empty(2 * SIZE, "uint8").fill(0)
        channels = comm.sm_channels(packets, local)
        launch = comm.compile(KERNELS, kernel)
        for turn, flag in enumerate((1, 2, 0x7FFFFFFF, 0xFFFFFFFF)):
            local.upload(np.concatenate([np.roll(values(comm.rank), turn), np.zeros(SIZE, np.uint8)]))
            launch(1, 32, channels, 64, 32, SIZE + 16, nbytes, flag)
            comm.synchronize()
            received = local.numpy()[SIZE + 16 : SIZE + 16 + nbytes]
            assert np.array_equal(received, np.roll(values(1 - comm.rank), turn)[32 : 32 + nbytes])
            assert not local.numpy()[SIZE + 16 + nbytes :].any()
            barrier(comm)

    ranks.run(body)


def test_packets_may_arrive_in_a_buffer_of_their_own(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = comm.empty(1024, "uint8").fill(0)
        local = comm.empty(1024, "uint8").upload(values(comm.rank)[:1024])
        channels = comm.sm_channels(buffer, local, packet_buffer=buffer)
        comm.compile(KERNELS, "sm_packets16")(1, 8, channels, 0, 0, 512, 256, 9)
        comm.synchronize()
        assert np.array_equal(local.numpy()[512:768], values(1 - comm.rank)[:256])
        barrier(comm)

    ranks.run(body)


@pytest.mark.parametrize("kind", ["sm", "proxy"])
def test_signals_are_counted_one_by_one(ranks: Ranks, kind: str) -> None:
    def body(comm: Communicator) -> None:
        polls = comm.empty(1, "int32").fill(-1)
        channels = (comm.sm_channels if kind == "sm" else comm.proxy_channels)(comm.empty(16))
        launch = comm.compile(KERNELS, f"{kind}_signals")
        for _ in range(3):
            launch(1, 1, channels, comm.rank, polls)
            comm.synchronize()
            if comm.rank == 1:
                assert polls.numpy()[0] == 0
        barrier(comm)

    ranks.run(body)


def test_a_put_may_name_other_memories_by_number(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(16))
        target, source = comm.empty(SIZE, "uint8").fill(0), comm.empty(SIZE, "uint8").upload(values(comm.rank))
        dst, src = comm.register(target), comm.register(source)
        peer = 1 - comm.rank
        comm.compile(KERNELS, "proxy_put_ids")(1, 1, channels, dst.peer_id(peer), 9, src.id, 4, 1000)
        comm.synchronize()
        assert np.array_equal(target.numpy()[9:1009], values(peer)[4:1004])
        barrier(comm)

    ranks.run(body)


@pytest.mark.own_proxy(reason="another process can't reach it")
@pytest.mark.host_only(reason="a GPU's memory is shared whoever allocated it")
def test_private_memory_is_a_good_source_of_a_put(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        source, target = values(comm.rank), comm.empty(SIZE, "uint8").fill(0)
        channels = comm.proxy_channels(target, source)
        comm.compile(KERNELS, "proxy_put")(1, 1, channels, 0, 0, SIZE)
        comm.synchronize()
        assert np.array_equal(target.numpy(), values(1 - comm.rank))
        barrier(comm)

    ranks.run(body)


def test_windows_beyond_4_gib_are_reached_by_both_kinds_of_channel(ranks: Ranks) -> None:
    """The host's memory is sparse: only the pages that are touched exist."""

    def body(comm: Communicator) -> None:
        size, far = (9 << 30) + 4096, (8 << 30) + 1234
        array = comm.empty(size, "uint8")
        memory = comm.register(array)
        edge = (4 << 30) - 100  # a transfer that begins in one window and ends in the next

        def write(at: int, data: np.ndarray) -> None:
            comm.runtime.copy(array.ptr + at, data.ctypes.data, data.nbytes)

        def holds(at: int, data: np.ndarray) -> bool:
            found = np.empty_like(data)
            comm.runtime.copy(found.ctypes.data, array.ptr + at, found.nbytes)
            return np.array_equal(found, data)

        write(1000, values(comm.rank)[:1000])
        write(edge + 5000, values(comm.rank)[:200])
        sm, proxy = comm.sm_channels(memory), comm.proxy_channels(memory)
        barrier(comm)
        kernels = comm.compile(KERNELS)
        kernels.proxy_put(1, 1, proxy, far, 1000, 1000)
        kernels.proxy_put(1, 1, proxy, edge, edge + 5000, 200)
        kernels.sm_put(1, 8, sm, far + 5000, 1000, 1000)
        comm.synchronize()
        theirs = values(1 - comm.rank)
        assert holds(far, theirs[:1000])
        assert holds(far + 5000, theirs[:1000])
        assert holds(edge, theirs[:200])
        assert memory.peer_id(1 - comm.rank) != memory.id
        barrier(comm)

    ranks.run(body)


def test_channels_come_in_the_order_of_their_peers() -> None:
    with Ranks(4) as ranks:

        def body(comm: Communicator) -> None:
            others = [rank for rank in range(4) if rank != comm.rank]
            channels = comm.sm_channels(comm.empty(16))
            assert channels.peers == others
            assert [channel.peer for channel in channels] == others
            assert channels.to(others[1]) is channels[1]
            assert [channel.peer for channel in channels[1:]] == others[1:]
            assert f"to rank {others[0]}" in repr(channels[0])
            assert repr(others) in repr(channels)
            with pytest.raises(KeyError):
                channels.to(comm.rank)
            partner = comm.proxy_channels(comm.empty(16), peers=[comm.rank ^ 1])
            assert partner.peers == [comm.rank ^ 1]
            assert partner[0].transport == "copy"
            assert len(comm.proxy_channels(comm.empty(16), peers=[])) == 0

        ranks.run(body)


@pytest.mark.parametrize("peers", [[0], [2], [-1], [1, 1], ["1"]])
def test_peers_must_be_other_ranks(peers: list[int]) -> None:
    with Ranks(2) as ranks:

        def body(comm: Communicator) -> None:
            chosen = [peer ^ comm.rank if peer in (0, 1) else peer for peer in peers]
            for connect in (comm.sm_channels, comm.proxy_channels):
                with pytest.raises(ArgumentError, match="peers"):
                    connect(comm.empty(16), peers=chosen)

        ranks.run(body)


def test_memory_of_another_node_is_no_sm_channels() -> None:
    with Ranks(4, local_world_size=2) as ranks:

        def body(comm: Communicator) -> None:
            memory = comm.register(comm.empty(16))
            with pytest.raises(ArgumentError, match="use a ProxyChannel"):
                comm.sm_channels(memory)
            assert comm.sm_channels(memory, peers=[comm.rank ^ 1]).peers == [comm.rank ^ 1]
            assert len(comm.proxy_channels(memory)) == 3
            barrier(comm)

        ranks.run(body)
