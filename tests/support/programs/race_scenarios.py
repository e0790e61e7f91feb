"""Scenarios that test_sanitizer.py runs under ThreadSanitizer, with ranks as threads and few GPU threads.

Scenarios whose names begin with "planted" contain a race on purpose. All other scenarios must be free of races.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import proxyccl.device
from proxyccl import Communicator, DispatchCombine, EPAll2AllLayer, WaitTimeoutError
from proxyccl.channels.transfers.blocks import Rows
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.host import HostRuntime
from proxyccl.transfer import Agent, State, strided
from support.agents import PATHS
from support.cases.span_calls import COLLECTIVES, SpanCalls
from support.devices import runtime_with_blocks, runtime_with_lines
from support.ranks import Ranks
from support.running import impatient, run_ranks

Values = NDArray[np.uint8]
SIDES = np.array([1, 1, 0], np.uint64)
"""Which numbers of a block are addresses."""
NBYTES = 3 << 20
KERNELS = Path(proxyccl.device.__file__).parent / "kernels"


def run(world_size: int, body: Callable[[Communicator], None], **options: Any) -> None:
    own = {} if "runtime" in options else {"make_runtime": runtime_with_blocks}
    run_ranks(world_size, body, **{"timeout": 60.0, **own, **options})


# -- the shipped kernels ---

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy")


def all_reduce() -> None:
    def body(comm: Communicator) -> None:
        for algorithm in ALGORITHMS:
            for _ in range(3):  # the third call reuses the first of two buffers
                x = np.arange(1001, dtype=np.float32) + comm.rank
                comm.all_reduce(x, algorithm=algorithm)
                assert np.array_equal(x, 3 * np.arange(1001, dtype=np.float32) + 3)

    run(3, body)


def lines() -> None:
    """Makes calls that send packets as 128-byte lines, reuse the lines' memory, and fill some lines only partly."""

    def body(comm: Communicator) -> None:
        for algorithm in ("one_shot", "two_shot_packets"):
            for count in (1001, 60_000, 1001):
                x = np.arange(count, dtype=np.float32) + comm.rank
                comm.all_reduce(x, algorithm=algorithm)
                assert np.array_equal(x, 3 * np.arange(count, dtype=np.float32) + 3)

    run(3, body, make_runtime=runtime_with_lines)


def all_reduce_on_streams() -> None:
    """Queues all-reduces on a stream without synchronisation, each longer than one round of packets."""

    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        x = comm.empty(20000, "float32").fill(1)
        for algorithm in ALGORITHMS:
            comm.all_reduce(x, algorithm=algorithm, stream=stream)
        comm.synchronize(stream)
        assert np.all(x.numpy() == 2 ** len(ALGORITHMS))

    run(2, body)


def moves() -> None:
    def body(comm: Communicator) -> None:
        ranks = comm.world_size
        mine = np.arange(64 * ranks, dtype=np.float32) + 1000 * comm.rank
        for algorithm in (None, "proxy"):
            for _ in range(3):
                gathered = comm.all_gather(mine, algorithm=algorithm)
                assert gathered[-1] == 64 * ranks - 1 + 1000 * (ranks - 1)
                swapped = comm.all_to_all(mine, algorithm=algorithm)
                assert np.array_equal(swapped[::64], 64 * comm.rank + 1000 * np.arange(ranks))
                scattered = comm.reduce_scatter(mine, algorithm=algorithm)
                assert scattered[0] == ranks * 64 * comm.rank + 1000 * sum(range(ranks))
                assert comm.broadcast(mine.copy(), root=1, algorithm=algorithm)[0] == 1000
            comm.barrier()

    run(3, body)


def transfers() -> None:
    """Makes transfers that reuse buffer slots within one transfer and in the next transfer."""

    def body(comm: Communicator) -> None:
        rank, peer = comm.rank, 1 - comm.rank
        for size in (100, 900_001, 70_000):
            sent, received = np.full(size, rank + 1, np.uint8), np.zeros(size, np.uint8)
            with comm.transfers() as group:
                group.send(sent, peer)
                group.recv(received, peer)
            assert np.all(received == peer + 1)

    run(2, body)
    run(2, body, local_world_size=1)
    run(2, body, make_runtime=runtime_with_lines)


def symmetric_memory() -> None:
    """Alternates calls that write directly into peers' outputs with staged calls. All-reduces have one piece or several
    pieces.
    """

    def body(comm: Communicator) -> None:
        ranks, count = comm.world_size, 8 * 1024
        source, target = comm.empty(2 * PIECE, "float32"), comm.empty(ranks * count, "float32")
        for array in (source, target):
            comm.register(array)
            array.fill(0)
        unknown = np.zeros(ranks * count, np.float32)
        for turn in range(3):
            for out in (target, unknown if comm.rank == turn else target):
                mine = np.asarray(source)[: ranks * count]
                mine[:] = comm.rank
                comm.all_gather(mine[:count], out=out)
                comm.all_to_all(mine, out=out)
                assert np.array_equal(np.asarray(out)[::count], range(ranks))
                comm.broadcast(mine, root=turn, out=out)
                comm.all_reduce(mine, out=out, algorithm="two_shot")
                assert np.all(np.asarray(out) == sum(range(ranks)))
        whole = np.asarray(source)
        whole[:] = 1
        comm.all_reduce(source, algorithm="two_shot")
        assert np.all(whole == ranks)
        for _ in range(3):  # peers read each other's arrays in these short calls
            whole[:1001] = 1 + comm.rank
            comm.all_reduce(whole[:1001], algorithm="two_shot")
            assert np.all(whole[:1001] == sum(range(1, ranks + 1)))

    run(3, body)


PIECE = 1 << 20  # number of elements, larger than a pipeline buffer


def dispatch_combine() -> None:
    """Dispatches and combines tokens, in rounds that reuse the buffers with different numbers of tokens."""

    def body(comm: Communicator) -> None:
        experts = 2 * comm.world_size
        for algorithm in (None, "proxy"):
            moe = DispatchCombine(
                comm, hidden=33, max_tokens=40, experts_per_rank=2, topk=3, dtype="float32", algorithm=algorithm
            )
            for tokens in (40, 7 * comm.rank, 40):
                x = np.full((tokens, 33), 1 + comm.rank, np.float32)
                ids = (np.arange(3 * tokens, dtype=np.int32) % (experts + 1)).reshape(tokens, 3)
                moe.prepare(x, ids, np.ones((tokens, 3), np.float32))
                rows, _ = moe.dispatch()
                assert np.array_equal(moe.combine(rows), x * (ids < experts).sum(axis=1, keepdims=True))

    run(3, body)


def expert_parallel() -> None:
    """Alternates two layers, one of which has blocks that only send, on one communicator. The number of tokens changes
    between calls. Some calls are split, so that a dispatch begins during a combine.
    """

    def body(comm: Communicator) -> None:
        experts, node = 2 * comm.world_size, (comm.local_world_size, comm.world_size)
        layers = [
            EPAll2AllLayer(comm, most, hidden, 3, comm.rank, experts, *node, dtype="float32", num_sm=3)
            for most, hidden in ((40, 33), (100, 8))
        ]
        for tokens in (40, 7 * comm.rank, 40):
            for layer, hidden in zip(layers, (33, 8), strict=True):
                x = np.full((tokens, hidden), 1 + comm.rank, np.float32)
                ids = (np.arange(3 * tokens, dtype=np.int32) % (experts + 1)).reshape(tokens, 3)
                kept = (ids < experts).sum(axis=1, keepdims=True)
                rows, weights, desc = layer.dispatch(x, ids, np.full((tokens, 3), 2, np.float32))
                assert np.array_equal(layer.combine(rows, desc, weights=weights), 2 * x * kept)
                pending = layer.combine_send(layer.redispatch(2 * x, desc), desc)
                sent = layer.dispatch_send(x, ids)
                assert np.array_equal(layer.combine_recv(pending), 2 * x * kept)
                assert np.array_equal(layer.dispatch_recv(sent)[0], rows)
            layer.ep_barrier_all()
        for layer in layers:
            layer.finalize()

    run(3, body)
    run(4, body, local_world_size=2)


def expert_layouts() -> None:
    """Uses each layout of rows (one row per rank, padded, with gaps). Dispatches announce ids or only counts, and are
    whole or split calls.
    """

    def body(comm: Communicator) -> None:
        experts, node = 2 * comm.world_size, (comm.local_world_size, comm.world_size)
        layouts: list[tuple[str, int, int | None]] = [("rank", 40, None), ("rank", 8, None), ("padded", 8, None)]
        layouts.append(("padded", 100, None))  # dispatch announces counts, because there are too many ids
        for layout, most, alignment in (*layouts, ("expert", 40, 4), ("expert", 8, 4)):
            sizes = (most, 33, 3, comm.rank, experts, *node)
            options = {"dtype": "float32", "num_sm": 3, "layout": layout, "expert_alignment": alignment}
            layer = EPAll2AllLayer(comm, *sizes, **options)
            for tokens in (most, comm.rank):
                x = np.full((tokens, 33), 1 + comm.rank, np.float32)
                ids = (np.arange(3 * tokens, dtype=np.int32) % (experts + 1)).reshape(tokens, 3)
                of_part = 2 if layout == "rank" else 1  # number of experts that share a token's row
                parts = [{each // of_part for each in row if each < experts} for row in ids.tolist()]
                expected = x * np.array([len(of_token) for of_token in parts], np.float32).reshape(tokens, 1)
                rows, _, desc = layer.dispatch(x, ids, np.full((tokens, 3), 2, np.float32))
                assert np.array_equal(layer.combine(rows, desc), expected)
                rows, _, desc = layer.dispatch_recv(layer.dispatch_send(x, ids))
                assert np.array_equal(layer.combine_recv(layer.combine_send(rows, desc)), expected)
            layer.finalize()

    run(3, body)


# -- ring, engine and channels ---

RING = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
// Every thread puts its own word repeatedly; the last flush of each thread covers its own puts.
extern "C" __global__ void producers(DeviceHandle<ProxyChannel>* channels, uint32_t* words, int repeats) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const DeviceHandle<ProxyChannel>& channel = channels[0];
  for (int i = 0; i < repeats; ++i) {
    words[thread] = thread + 1;
    channel.put((threads + thread) * sizeof(uint32_t), thread * sizeof(uint32_t), sizeof(uint32_t));
    channel.flush();
  }
}
"""


def ring() -> None:
    """Pushes triggers to two rings, each with its own proxy thread, from more GPU threads than a ring has slots."""

    def body(comm: Communicator) -> None:
        words = comm.empty(2 * 96, "uint32").fill(0)
        for _ in range(2):
            channels = comm.proxy_channels(words)
            comm.compile(RING, "producers")(3, 32, channels, words, 10)
            comm.synchronize()
            assert channels[0].counters.puts == 960
        comm.barrier()
        assert np.array_equal(words.numpy()[96:], np.arange(1, 97))

    run(2, body, fifo_size=4, fifos=2, proxy_threads=2)


def copy_streams() -> None:
    """Executes the proxy's copies (for schedules and for kernels' triggers) in separate threads, like a copy engine."""

    def body(comm: Communicator) -> None:
        moe = DispatchCombine(
            comm, hidden=33, max_tokens=40, experts_per_rank=2, topk=3, dtype="float32", algorithm="proxy"
        )
        ids = np.arange(120, dtype=np.int32).reshape(40, 3) % (2 * comm.world_size)
        for _ in range(4):
            x = np.full(5000, comm.rank, np.float32)
            comm.all_reduce(x, algorithm="proxy")
            assert np.all(x == 3)
            tokens = np.full((40, 33), 1 + comm.rank, np.float32)
            moe.prepare(tokens, ids, np.ones((40, 3), np.float32))
            rows, _ = moe.dispatch()
            assert np.array_equal(moe.combine(rows), 3 * tokens)

    with Ranks(3, make_runtime=lambda _: HostRuntime(async_copies=True), timeout=60.0) as ranks:
        ranks.run(body)


PINNED = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void exchange_pinned(DeviceHandle<ProxyChannel> channel, DeviceHandle<ProxyChannel> credits,
                                           uint32_t source, uint32_t destination, uint32_t* outbox, uint32_t* inbox,
                                           uint32_t words, uint32_t* sum) {
  for (uint32_t round = 0; round < 6; ++round) {
    const uint32_t count = round % 3 == 1 ? words : 100;  // the CPU copies 100 words unless more is under way
    for (uint32_t i = 0; i < count; ++i) outbox[i] = round;
    channel.put(destination, 0, source, 0, 4 * count);
    channel.putWithSignal(destination, 0, source, 0, 40);
    channel.wait();
    for (uint32_t i = 0; i < count; ++i) *sum += inbox[i];
    channel.flush();
    credits.signal();  // the inbox may be written again
    credits.wait();
  }
}
extern "C" __global__ void reuse_pinned(DeviceHandle<ProxyChannel>* channels, uint32_t source, uint32_t destination,
                                        uint32_t* outbox) {
  outbox[0] = 1;
  channels[0].put(destination, 0, source, 0, 4);
  outbox[0] = 2;  // no flush() before it: the proxy may not have read it yet
  channels[0].flush();
}
"""


def _pinned(comm: Communicator, nbytes: int) -> tuple[list[int], Any, Any]:
    """Allocates pinned memory. Returns the ids of two memories (this rank's outbox and the next rank's inbox) in a
    list, and this rank's outbox and inbox.
    """
    outbox, inbox = (comm.runtime.allocate_pinned(nbytes) for _ in range(2))
    theirs = comm.runtime.open_pinned(comm.all_gather_bytes(inbox.handle)[(comm.rank + 1) % comm.world_size])
    return [comm.proxy.add_pinned_memory(memory) for memory in (outbox, theirs)], outbox, inbox


def pinned_memory() -> None:
    """Copies outboxes to inboxes. The CPU makes short copies, unless the driver is still copying earlier data."""
    words = 20_000

    def body(comm: Communicator) -> None:
        channels = [comm.proxy_channels(comm.empty(16))[0] for _ in range(2)]
        ids, outbox, inbox = _pinned(comm, 4 * words)
        total = comm.empty(1, "uint32").fill(0)
        stream = comm.runtime.create_stream()
        exchange = comm.compile(PINNED, "exchange_pinned")
        exchange(1, 1, *channels, *ids, outbox.ptr, inbox.ptr, words, total, stream=stream)
        comm.synchronize(stream)
        assert int(total.numpy()[0]) == 100 * (2 + 3 + 5) + words * (1 + 4)

    run(2, body)
    run(2, body, runtime=HostRuntime(async_copies=True))


def schedules() -> None:
    """Makes calls by schedules, between a stream's writes to the input and reads of the output."""
    share, rounds = 777, 4

    def body(comm: Communicator) -> None:
        runtime, stream = comm.runtime, comm.runtime.create_stream()
        calls = SpanCalls(comm, share * comm.world_size)
        kept = [comm.empty(share * comm.world_size, "uint8") for _ in range(rounds * len(COLLECTIVES))]
        for i, copy in enumerate(kept):
            x, out = calls.spans(COLLECTIVES[i % 3], share, i, in_place=False)
            runtime.fill(x.ptr, 16 * i + comm.rank, x.nbytes, stream)
            runtime.fill(out.ptr, 255, out.nbytes, stream)
            calls.issue(COLLECTIVES[i % 3], x, out, i % comm.world_size, stream)
            runtime.copy(copy.ptr, out.ptr, out.nbytes, stream)
        comm.synchronize(stream)
        for i, copy in enumerate(kept):
            ranks = [i % comm.world_size] if COLLECTIVES[i % 3] == "broadcast" else range(comm.world_size)
            expected = np.repeat([16 * i + rank for rank in ranks], share).astype(np.uint8)
            assert np.array_equal(copy.numpy()[: len(expected)], expected)

    run(3, body)
    run(3, body, runtime=HostRuntime(async_copies=True), fifos=2, proxy_threads=2)


CHANNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
constexpr uint32_t kBytes = 1024;

extern "C" __global__ void sm(DeviceHandle<SmChannel>* channels, uint32_t* data, uint32_t rank, int round) {
  const DeviceHandle<SmChannel>& channel = channels[0];
  const uint32_t thread = threadIdx.x, threads = blockDim.x;
  forEach(kBytes / 4, thread, threads, [&](size_t i) { data[i] = 100 * round + rank; });
  __syncthreads();
  channel.put(kBytes, 0, kBytes, thread, threads);
  syncThreadsSystem();
  if (thread == 0) {
    channel.signal();
    channel.wait();
  }
  __syncthreads();
  forEach(kBytes / 4, thread, threads, [&](size_t i) { data[i] += data[kBytes / 4 + i]; });
  // What was put has been read, on both sides, before it is put again; and the sum is complete before the peer gets it.
  syncThreadsSystem();
  if (thread == 0) {
    channel.signal();
    while (!channel.poll()) spinHint(0);
  }
  __syncthreads();
  channel.get(2 * kBytes, 0, kBytes, thread, threads);
  syncThreadsSystem();
  if (thread == 0) {
    channel.signal();
    channel.wait();
  }
}

extern "C" __global__ void packets(DeviceHandle<SmChannel>* channels, int rounds) {
  const DeviceHandle<SmChannel>& channel = channels[0];
  for (int round = 0; round < rounds; ++round) {
    // Two alternating buffers, like those of the shipped packet algorithms.
    const uint64_t at = 4 * kBytes + (round & 1) * 4 * kBytes;
    channel.putPackets(at, 0, kBytes, threadIdx.x, blockDim.x, 2 * round + 1);
    channel.getPackets(at, kBytes, kBytes, threadIdx.x, blockDim.x, 2 * round + 1);
    __syncthreads();  // the other kind of packets divides the same words among threads in another way
    channel.putPackets<LL8Packet>(at + 2 * kBytes, 0, kBytes, threadIdx.x, blockDim.x, 2 * round + 2);
    channel.getPackets<LL8Packet>(at + 2 * kBytes, kBytes, kBytes, threadIdx.x, blockDim.x, 2 * round + 2);
    __syncthreads();
  }
}

extern "C" __global__ void proxy(DeviceHandle<ProxyChannel>* channels, uint32_t* data, uint32_t rank, int rounds) {
  const DeviceHandle<ProxyChannel>& channel = channels[0];
  for (int round = 0; round < rounds; ++round) {
    data[threadIdx.x] = 100 * round + rank;
    syncThreadsSystem();
    if (threadIdx.x == 0) {
      if (round & 1) {
        channel.putWithSignalAndFlush(kBytes, 0, blockDim.x * 4);
      } else {
        channel.put(kBytes, 0, blockDim.x * 4);
        channel.signal();
        channel.flush();
      }
      channel.wait();
    }
    __syncthreads();
    data[2 * kBytes / 4 + threadIdx.x] = data[kBytes / 4 + threadIdx.x];
    syncThreadsSystem();
    if (threadIdx.x == 0) {  // read: the peer may put again
      channel.signal();
      channel.wait();
    }
    __syncthreads();
  }
}
"""


def channels() -> None:
    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        data = comm.empty(4096, "uint32").fill(0)
        module = comm.compile(CHANNELS)
        direct, proxied = comm.sm_channels(data), comm.proxy_channels(data)

        def settle() -> np.ndarray[Any, Any]:
            """Waits for both ranks' kernels, because memory that a peer may still write must not be read."""
            comm.synchronize()
            comm.barrier()
            values = data.numpy()
            comm.barrier()
            return values

        for round_ in range(3):
            module.sm(1, 64, direct, data, comm.rank, round_)
        values = settle()
        assert np.all(values[:256] == 401)
        assert np.all(values[512:768] == 401)
        module.packets(1, 64, direct, 5)
        assert np.all(settle()[256:512] == 401)
        module.proxy(1, 64, proxied, data, comm.rank, 6)
        assert np.all(settle()[512:576] == 500 + peer)

    run(2, body)


# -- agents ---


def agents() -> None:
    """Makes threads share two agents over each path: the threads start, wait for, poll and cancel transfers, send
    messages, and deregister memory. TCP is also tested with device memory, which both agents stage.
    """
    random = np.random.default_rng(1)
    runtime = HostRuntime()
    for path, staged in (*((path, False) for path in PATHS), ("tcp", True)):
        with Agent("a", listen=["127.0.0.1"], paths=[path]) as a, Agent("b", listen=["127.0.0.1"]) as b:
            ours, theirs, spare = (
                Array(runtime, runtime.allocate(NBYTES), (NBYTES,), as_dtype("uint8"))
                if staged
                else np.zeros(NBYTES, np.uint8)
                for _ in range(3)
            )
            near, far = a.register(ours), b.register(theirs)
            a.add(b.metadata())
            small = strided(near.address, far.address, 100, 500, 300)

            def work(number: int, a: Agent = a, b: Agent = b, small: Rows = small, spare: Any = spare) -> None:
                transfer = a.prepare("write" if number % 2 else "read", "b", small + np.uint64(number << 18) * SIDES)
                for step in range(4):
                    transfer.start(b"%d" % step)
                    while number == 0 and not transfer.done():
                        pass
                    transfer.wait(60)
                    transfer.start()
                    transfer.cancel()
                    b.messages()
                    a.notify("b", b"x" * 1000)
                    if number == 0:
                        b.deregister(b.register(spare))

            whole = a.read("b", [(near.address + (1 << 20), far.address + (1 << 20), 2 << 20)], message=b"long")
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            whole.wait(60)
            for thread in threads:
                thread.join()
            a.write("b", [(near.address, far.address, 100)]).wait(60)  # arrives after canceled transfers' data
            values = random.integers(0, 256, NBYTES, dtype=np.uint8)
            if isinstance(theirs, Array):
                theirs.upload(values)
            else:
                theirs[:] = values
            a.read("b", [(near.address, far.address, NBYTES)]).wait(60)
            assert np.array_equal(ours.numpy() if isinstance(ours, Array) else ours, values)
            left = a.read("b", [(near.address, far.address, NBYTES)])  # the peer closes during this transfer
        assert left.state is not State.ACTIVE


# -- the emulator itself ---

GRID = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void grid(DeviceSyncer* syncer, uint32_t* values, uint32_t* sum) {
  __shared__ uint32_t partial[2];
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  uint32_t total = 0;
  for (int turn = 0; turn < 4; ++turn) {
    values[thread] = turn + 1;
    syncer->sync(gridDim.x);
    uint32_t mine = values[threads - 1 - thread];
    for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
    __syncthreads();
    total += partial[0] + partial[1];
    syncer->sync(gridDim.x);
  }
  if (threadIdx.x == 0) atomicAdd(sum, total);
}
"""


def grid() -> None:
    runtime = HostRuntime()
    kernel = runtime.compile(GRID)
    syncer, values, total = runtime.allocate(8), runtime.allocate(4 * 512), np.zeros(1, np.uint32)
    streams = [runtime.create_stream() for _ in range(2)]
    for blocks in (1, 4, 2, 7):
        kernel(blocks, 64, syncer.ptr, values.ptr, total, stream=streams[0])
        event = runtime.create_event()
        event.record(streams[0])
        runtime.wait_event(streams[1].handle, event)
        streams.reverse()
    runtime.synchronize()
    assert total[0] == 64 * 10 * (1 + 4 + 2 + 7)


def timeout() -> None:
    """Makes a wait end by its time-out."""
    missed = threading.Event()  # rank 1 waits for this event, because rank 1's exit would end the call early

    def body(comm: Communicator) -> None:
        comm.collectives.team()  # sets collectives up on all ranks, so that only the all_reduce times out
        impatient(comm, 1)
        if comm.rank == 0:
            x = np.zeros(8, np.float32)
            try:
                comm.all_reduce(x, algorithm="two_shot")
            finally:
                missed.set()
        else:
            missed.wait(60)

    try:
        run(2, body)
    except WaitTimeoutError:
        return
    raise AssertionError("no rank timed out while it waited for its peer")


# -- races on purpose ---

MISSING_BARRIER = r"""
#include "proxyccl/proxyccl.h"
extern "C" __global__ void reverse(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[63 - threadIdx.x];  // no __syncthreads() before it
}
"""


def planted_missing_barrier() -> None:
    runtime = HostRuntime()
    out = runtime.allocate(4 * 64)
    runtime.compile(MISSING_BARRIER)(1, 64, out.ptr)
    runtime.synchronize()


MISSING_GRID_BARRIER = r"""
#include "proxyccl/proxyccl.h"
extern "C" __global__ void exchange(int* values) {
  values[blockIdx.x] = 1;
  values[2 + blockIdx.x] = values[1 - blockIdx.x];  // no DeviceSyncer::sync() before it
}
"""


def planted_missing_grid_barrier() -> None:
    runtime = HostRuntime()
    values = runtime.allocate(4 * 4)
    runtime.compile(MISSING_GRID_BARRIER)(2, 1, values.ptr)
    runtime.synchronize()


RELAXED_SIGNAL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void pass(DeviceHandle<SmChannel>* channels, uint32_t* data, uint32_t rank) {
  if (rank == 0) {
    channels[0].wait();  // both kernels run by now, so no launch orders the one's accesses before the other's
    channels[0].write<uint32_t>(0, 42);
    channels[0].relaxedSignal();  // orders nothing: signal() is wanted
  } else {
    channels[0].relaxedSignal();
    channels[0].wait();
    data[1] = data[0];
  }
}
"""


def planted_relaxed_signal() -> None:
    def body(comm: Communicator) -> None:
        data = comm.empty(2, "uint32").fill(0)
        channels = comm.sm_channels(data)
        comm.compile(RELAXED_SIGNAL, "pass")(1, 1, channels, data, comm.rank)
        comm.synchronize()

    run(2, body)


MISSING_MEETING = r"""
#include "exchange.h"
#include "outputs.h"
extern "C" __global__ void gather_unmet(const ProxycclTeam team, const char* in, char* out, uint64_t bytes) {
  const proxyccl::Exchange exchange(team);
  const proxyccl::Outputs outputs(team);
  const uint32_t peer = 1 - team.rank;
  outputs.tell();
  outputs.learn();
  exchange.copy(outputs.of(peer) + team.rank * bytes, in, bytes);
  exchange.copy(out + 2 * bytes, out + peer * bytes, bytes);  // no post and await before it
}
"""


def planted_missing_meeting() -> None:
    def body(comm: Communicator) -> None:
        data = comm.empty(3 * 4096, "uint8").fill(0)
        comm.register(data)
        parameter = bytearray(comm.collectives.team().parameter())
        comm.group.symmetric.update()
        announced = comm.group.symmetric.find(data.ptr, data.nbytes)
        assert announced is not None
        reached_at = announced.known[0]  # `data` starts at the first byte of the announced range
        assert reached_at is not None
        struct.pack_into(f"<{len(reached_at)}Q", parameter, ffi.offsetof("ProxycclTeam", "reached_at"), *reached_at)
        gather = comm.compile(MISSING_MEETING, "gather_unmet", include_dirs=[str(KERNELS)])
        gather(1, 64, bytes(parameter), comm.empty(4096, "uint8"), data, 4096)
        comm.synchronize()

    run(2, body)


REUSED_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void reuse(DeviceHandle<ProxyChannel>* channels, uint32_t* data) {
  data[0] = 1;
  channels[0].put(4, 0, 4);
  data[0] = 2;  // no flush() before it: the proxy may not have read it yet
  channels[0].flush();
}
"""


def planted_reused_source() -> None:
    def body(comm: Communicator) -> None:
        data = comm.empty(2, "uint32").fill(0)
        channels = comm.proxy_channels(data)
        comm.compile(REUSED_SOURCE, "reuse")(1, 1, channels, data)
        comm.synchronize()

    run(2, body)


def planted_reused_outbox() -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(16))
        ids, outbox, _ = _pinned(comm, 64)
        comm.compile(PINNED, "reuse_pinned")(1, 1, channels, *ids, outbox.ptr)
        comm.synchronize()

    run(2, body)


def planted_write_beside_a_schedule() -> None:
    def body(comm: Communicator) -> None:
        calls, other = SpanCalls(comm, 1000), comm.runtime.create_stream()
        x, out = calls.spans("all_gather", 500, 0, in_place=False)
        comm.runtime.fill(out.ptr, 1, out.nbytes, other)  # `other` is not ordered with the call's stream
        calls.issue("all_gather", x, out)
        comm.synchronize()

    run(2, body)


def planted_read_before_the_end() -> None:
    half = 4 << 20
    memory = np.repeat(np.array([0, 7], np.uint8), half)
    with Agent("a", listen=()) as agent:
        address = agent.register(memory).address
        transfer = agent.read("a", [(address, address + half, half)])
        while memory[half - 1] == 0:  # polls, because in wait() this thread would copy data too
            time.sleep(0.001)
        ctypes.memmove(ctypes.create_string_buffer(8), address + half - 8, 8)
        transfer.wait()
