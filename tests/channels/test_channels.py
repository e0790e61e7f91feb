"""Kernels call every method of SmChannel and ProxyChannel, at offsets and with ids of memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import AbortedError, ArgumentError, Communicator
from proxyccl.proxy.transports.table import TRANSPORTS
from support.device_arrays import barrier, on_device, on_host
from support.ranks import Ranks

pytestmark = [pytest.mark.daemon, pytest.mark.hip]

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
extern "C" __global__ void sm_get(Sm* channels, unsigned long target, unsigned long origin, unsigned long bytes) {
  channels[0].get(target, origin, bytes, threadIdx.x, blockDim.x);
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
struct Pair { float first; int second; };
struct Colour { uint8_t red, green, blue; };
struct Eight { int4 low, high; };
template <class T>
__device__ void exchangeElement(Sm& channel, uint64_t at, const T& mine, T* theirs) {
  Sm there = channel;
  there.dst += at;  // each type has its own place, where index 1 is the second element
  there.write<T>(1, mine);
  syncThreadsSystem();
  if (threadIdx.x == 0) { channel.signal(); channel.wait(); }
  __syncthreads();
  *theirs = there.read<T>(1);
}
extern "C" __global__ void sm_elements(Sm* channels, int rank, char* out) {
  const int r = 10 * rank;
  exchangeElement<int4>(channels[0], 0, make_int4(r, r + 1, r + 2, r + 3), reinterpret_cast<int4*>(out));
  exchangeElement<LL16Packet>(channels[0], 64, LL16Packet{1u + rank, 9, 3, 9}, reinterpret_cast<LL16Packet*>(out + 16));
  exchangeElement<Pair>(channels[0], 128, Pair{r + 0.5f, r}, reinterpret_cast<Pair*>(out + 32));
  const uint8_t shade = static_cast<uint8_t>(r);
  exchangeElement<Colour>(channels[0], 192, Colour{shade, 2, 3}, reinterpret_cast<Colour*>(out + 40));
  exchangeElement<bool>(channels[0], 256, rank == 0, reinterpret_cast<bool*>(out + 43));
  exchangeElement<Half>(channels[0], 320, Half{static_cast<uint16_t>(r)}, reinterpret_cast<Half*>(out + 44));
  exchangeElement<Eight>(channels[0], 384, Eight{make_int4(r, 1, 2, 3), make_int4(4, 5, 6, r)},
                         reinterpret_cast<Eight*>(out + 48));
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
// One thread polls, and another sends the signal for which the peer's thread polls.
template <class Channel>
__device__ void pollWithoutAHint(Channel& channel, int* polls) {
  const uint64_t start = nanoseconds();
  if (threadIdx.x == 0) {
    while (!channel.poll() && nanoseconds() - start < 3'000'000'000) ++*polls;
  } else if (threadIdx.x == 1) {
    channel.signal();
  }
  if (threadIdx.x == 0 && nanoseconds() - start >= 3'000'000'000) *polls = -1;
}
extern "C" __global__ void sm_poll(Sm* channels, int* polls) { pollWithoutAHint(channels[0], polls); }
extern "C" __global__ void proxy_poll(Proxy* channels, int* polls) { pollWithoutAHint(channels[0], polls); }
extern "C" __global__ void sm_poll_until_aborted(Sm* channels, int* polls) {
  while (!channels[0].poll())
    if (aborted(channels[0].control)) return;
  *polls = 1;
}

extern "C" __global__ void proxy_put(Proxy* channels, unsigned long dst, unsigned long src, unsigned long bytes) {
  channels[0].put(dst, src, bytes);
  channels[0].signal();
  channels[0].wait();
}
extern "C" __global__ void newer_names(DeviceHandle<MemoryChannel>* memory, DeviceHandle<PortChannel>* port) {
  MemoryChannelDeviceHandle& mapped = memory[0];
  PortChannelDeviceHandle& proxied = port[0];
  mapped.put(0, 0, 64, threadIdx.x, blockDim.x);
  syncThreadsSystem();
  if (threadIdx.x == 0) {
    mapped.signal();
    mapped.wait();
    proxied.putWithSignal(64, 0, 64);
    proxied.wait();
  }
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


@pytest.mark.parametrize("kernel", ["sm_put", "proxy_put_with_signal"])
def test_a_channel_to_oneself_is_like_any_other(ranks: Ranks, kernel: str) -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(SIZE, "uint8").fill(0), comm.empty(SIZE, "uint8").upload(values(comm.rank))
        make = comm.sm_channels if kernel.startswith("sm") else comm.proxy_channels
        channels = make(target, source, peers=[comm.rank, 1 - comm.rank])
        assert [channel.peer for channel in channels] == [comm.rank, 1 - comm.rank]
        comm.compile(KERNELS, kernel)(1, 64 if kernel.startswith("sm") else 1, channels, 5, 100, 3000)
        comm.synchronize()
        expected = np.zeros(SIZE, np.uint8)
        expected[5:3005] = values(comm.rank)[100:3100]
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


def test_channels_have_the_newer_names_too(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(SIZE, "uint8").fill(0), comm.empty(SIZE, "uint8").upload(values(comm.rank))
        mapped, proxied = comm.sm_channels(target, source), comm.proxy_channels(target, source)
        comm.compile(KERNELS, "newer_names")(1, 32, mapped, proxied)
        comm.synchronize()
        theirs = values(1 - comm.rank)[:64]
        assert np.array_equal(target.numpy()[:128], np.concatenate([theirs, theirs]))
        barrier(comm)

    ranks.run(body)


def test_get_reads_the_peers_memory_into_the_own(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        remote, own = comm.empty(SIZE, "uint8").upload(values(comm.rank)), comm.empty(SIZE, "uint8").fill(0)
        channels = comm.sm_channels(remote, own)
        barrier(comm)
        kernels = comm.compile(KERNELS)
        kernels.sm_get(1, 64, channels, 7, 100, 30_001)  # copies 30001 bytes from offset 100 to offset 7
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


def test_elements_may_be_of_any_type_that_can_be_copied(ranks: Ranks) -> None:
    """Elements may be vectors, packets, and structs of any alignment, also structs longer than 16 bytes."""
    types = np.dtype(
        [
            ("vector", "4i4"),
            ("packet", "4u4"),
            ("pair", [("first", "f4"), ("second", "i4")]),
            ("colour", "3u1"),
            ("flag", "?"),
            ("half", "u2"),
            ("padding", "2u1"),
            ("eight", "8i4"),
        ]
    )

    def body(comm: Communicator) -> None:
        array, out = comm.empty(512, "uint8").fill(0xEE), comm.empty(types.itemsize, "uint8").fill(0)
        channels = comm.sm_channels(array)
        barrier(comm)
        comm.compile(KERNELS, "sm_elements")(1, 1, channels, comm.rank, out)
        comm.synchronize()
        barrier(comm)
        # The kernel stored this rank's element in the peer's memory and loaded it again.
        r, read = 10 * comm.rank, out.numpy().view(types)[0]
        assert read["vector"].tolist() == [r, r + 1, r + 2, r + 3]
        assert read["packet"].tolist() == [1 + comm.rank, 9, 3, 9]
        assert read["pair"].tolist() == (r + 0.5, r)
        assert read["colour"].tolist() == [r, 2, 3]
        assert read["flag"] == (comm.rank == 0)
        assert read["half"] == r
        assert read["eight"].tolist() == [r, 1, 2, 3, 4, 5, 6, r]
        theirs = array.numpy()
        assert theirs[16:32].view(np.int32).tolist() == [10 * (1 - comm.rank) + i for i in range(4)]
        assert (theirs[:16] == 0xEE).all()

    ranks.run(body)


@pytest.mark.parametrize(("kernel", "payload"), [("sm_packets16", 8), ("sm_packets8", 4)])
@pytest.mark.parametrize("count", [1, 3, 64, 1000])
def test_packets_carry_their_own_signal(ranks: Ranks, kernel: str, payload: int, count: int) -> None:
    """Ranks send the same packets repeatedly, with a new flag each time: even and odd flags, and the largest flag."""

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


@pytest.mark.parametrize("kind", ["sm", "proxy"])
def test_a_thread_that_polls_lets_the_others_of_its_block_run(ranks: Ranks, kind: str) -> None:
    def body(comm: Communicator) -> None:
        polls = comm.empty(1, "int32").fill(0)
        channels = (comm.sm_channels if kind == "sm" else comm.proxy_channels)(comm.empty(16))
        comm.compile(KERNELS, f"{kind}_poll")(1, 2, channels, polls)
        comm.synchronize()
        assert polls.numpy()[0] >= 0
        barrier(comm)

    ranks.run(body)


def test_a_loop_of_polls_sees_the_communicators_end() -> None:
    with Ranks(2) as ranks:

        def body(comm: Communicator) -> None:
            polls = comm.empty(1, "int32").fill(0)
            channels, kernels = comm.sm_channels(comm.empty(16)), comm.compile(KERNELS)
            comm.all_gather_bytes(b"")
            if comm.rank == 0:
                kernels.sm_poll_until_aborted(1, 1, channels, polls)
                with pytest.raises(AbortedError):
                    comm.synchronize()
                assert polls.numpy()[0] == 0
            else:
                comm.abort("nothing is signalled")

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


def test_both_kinds_of_channel_reach_beyond_4_gib(ranks: Ranks) -> None:
    """On the host, memory of more than 4 GiB is sparse: only pages that are touched exist."""

    def body(comm: Communicator) -> None:
        size, far = (9 << 30) + 4096, (8 << 30) + 1234
        array = comm.empty(size, "uint8")
        memory = comm.register(array)
        edge = (4 << 30) - 100  # a transfer of more than 100 bytes from this offset crosses 4 GiB

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
            with pytest.raises(ArgumentError, match=rf"no channel leads to rank {comm.rank}; expected one of") as none:
                channels.to(comm.rank)
            assert isinstance(none.value, KeyError)
            partner = comm.proxy_channels(comm.empty(16), peers=[comm.rank ^ 1])
            assert partner.peers == [comm.rank ^ 1]
            assert partner[0].transport == "copy"
            assert len(comm.proxy_channels(comm.empty(16), peers=[])) == 0

        ranks.run(body)


@pytest.mark.own_proxy(reason="the daemon is another process, with its own table")
def test_a_chosen_transport_that_copies_carries_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "other", replace(TRANSPORTS["copy"], name="other"))

    def body(comm: Communicator) -> None:
        assert comm.proxy_channels(comm.empty(16))[0].transport == comm.transport(1 - comm.rank) == "other"
        x = on_device(comm, np.ones(1000, np.float32))
        assert (on_host(comm.all_reduce(x, algorithm="proxy")) == 2).all()

    with Ranks(2, transport="other") as ranks:
        ranks.run(body)


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        ([2], "2 is not a rank; expected 0 to 1"),
        ([-1], "-1 is not a rank"),
        ([1, 1], "is given twice"),
        (["1"], "'1' is not a rank"),
    ],
)
def test_peers_must_be_other_ranks(peers: list[int], message: str) -> None:
    with Ranks(2) as ranks:

        def body(comm: Communicator) -> None:
            chosen = [peer ^ comm.rank if peer in (0, 1) else peer for peer in peers]
            for connect in (comm.sm_channels, comm.proxy_channels):
                with pytest.raises(ArgumentError, match=f"peers: .*{message}"):
                    connect(comm.empty(16), peers=chosen)

        ranks.run(body)


def test_memory_of_another_node_is_no_sm_channels() -> None:
    with Ranks(4, local_world_size=2) as ranks:

        def body(comm: Communicator) -> None:
            memory = comm.register(comm.empty(16))
            first, second = (2, 3) if comm.rank < 2 else (0, 1)
            apart = ", on another node, as local_world_size counts them; "
            unreached = f"of rank {first}{apart}of rank {second}{apart}use a ProxyChannel"
            with pytest.raises(ArgumentError, match=f"^peers: kernels of rank {comm.rank} can't .*{unreached}"):
                comm.sm_channels(memory)
            with pytest.raises(ArgumentError, match=f"^peer: .* of rank {first}{apart}use a ProxyChannel"):
                memory.peer_ptr(first)
            assert comm.sm_channels(memory, peers=[comm.rank ^ 1]).peers == [comm.rank ^ 1]
            assert len(comm.proxy_channels(memory)) == 3
            barrier(comm)

        ranks.run(body)
