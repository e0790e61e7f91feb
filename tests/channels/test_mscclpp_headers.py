"""Kernels written for MSCCL++ compile unchanged, and work on ProxyCCL's channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    AbortedError,
    Array,
    Communicator,
    CompileError,
    HandleTypeError,
    TriggerError,
    WaitTimeoutError,
)
from support.device_arrays import barrier, on_host
from support.kernels.mscclpp import MSCCLPP_KERNELS
from support.ranks import Ranks

pytestmark = pytest.mark.hip

THREADS = 32
HALF = 2048


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def shared(communicator: Communicator, values: np.ndarray) -> Array:
    """Returns a copy of `values` in memory that peers can access."""
    return communicator.empty(values.shape, values.dtype).upload(values)


def own_bytes(communicator: Communicator) -> np.ndarray:
    """Returns 2 * HALF bytes, whose values depend on the rank and on their position."""
    return (np.arange(2 * HALF) * 7 + 100 * communicator.rank).astype(np.uint8)


def test_a_memory_channel_puts_signals_and_gets_with_the_local_offset_first(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        data = shared(communicator, own_bytes(communicator))
        channels = communicator.sm_channels(data)
        kernels = communicator.compile(MSCCLPP_KERNELS)
        kernels.memory_put(1, THREADS, channels, HALF)
        communicator.synchronize()
        put = on_host(data)
        barrier(communicator)
        kernels.memory_get(1, THREADS, channels, 64, HALF, 100)
        communicator.synchronize()
        barrier(communicator)
        return put, on_host(data)

    for rank, (put, got) in enumerate(pair.run(body)):
        mine, theirs = ((np.arange(2 * HALF) * 7 + 100 * r).astype(np.uint8) for r in (rank, 1 - rank))
        np.testing.assert_array_equal(put, np.concatenate([mine[:HALF], theirs[:HALF]]))
        np.testing.assert_array_equal(got[HALF : HALF + 100], theirs[64:164])


def test_a_memory_channels_elements_members_and_packets(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        data = shared(communicator, np.zeros(4096, np.uint8))
        out = shared(communicator, np.zeros(THREADS, np.int32))
        kernels = communicator.compile(MSCCLPP_KERNELS)
        channels = communicator.sm_channels(data)
        kernels.memory_elements(1, THREADS, channels[0], out)
        communicator.synchronize()
        barrier(communicator)
        elements, copied = on_host(out), on_host(data)[128:192].view(np.int32)
        mine = own_bytes(communicator)[:256]
        communicator.runtime.copy(data.ptr, mine.ctypes.data, mine.nbytes)
        barrier(communicator)
        first = shared(communicator, np.zeros(2, np.uint32))
        kernels.memory_packets(1, THREADS, channels, 1024, 256, 3, first)
        communicator.synchronize()
        barrier(communicator)
        return elements, copied, on_host(data)[256:512], on_host(first)

    results = pair.run(body)
    for rank, (elements, copied, received, first) in enumerate(results):
        np.testing.assert_array_equal(elements, 2 * (100 + np.arange(THREADS)))
        np.testing.assert_array_equal(copied, 100 + np.arange(16))
        theirs = (np.arange(256) * 7 + 100 * (1 - rank)).astype(np.uint8)
        np.testing.assert_array_equal(received, theirs)
        np.testing.assert_array_equal(first, theirs[:8].view(np.uint32))


def test_port_channels_put_by_offsets_by_memory_ids_and_by_raw_triggers(pair: Ranks) -> None:
    def body(communicator: Communicator) -> list[np.ndarray]:
        memory = communicator.register(shared(communicator, own_bytes(communicator)))
        target_array = shared(communicator, np.zeros(2 * HALF, np.uint8))
        target = communicator.register(target_array)
        channels = communicator.proxy_channels(target, memory)
        peer = 1 - communicator.rank
        kernels = communicator.compile(MSCCLPP_KERNELS)
        seen = []

        def look() -> None:
            communicator.synchronize()
            barrier(communicator)
            seen.append(on_host(target_array))
            communicator.runtime.copy(target_array.ptr, np.zeros(2 * HALF, np.uint8).ctypes.data, 2 * HALF)
            barrier(communicator)

        kernels.port_put(1, THREADS, channels, HALF)
        look()
        kernels.base_port_put(1, THREADS, channels, target.peer_id(peer), memory.source_id(peer), HALF)
        look()
        handle = channels[0].device_handle
        kernels.raw_trigger(1, 1, handle, handle[: kernels.raw_trigger.parameters[1][0]], HALF)
        look()
        return seen

    for rank, (put, by_id, raw) in enumerate(pair.run(body)):
        theirs = (np.arange(2 * HALF) * 7 + 100 * (1 - rank)).astype(np.uint8)
        np.testing.assert_array_equal(put[HALF:], theirs[:HALF])
        assert not put[:HALF].any()
        np.testing.assert_array_equal(by_id, theirs)
        np.testing.assert_array_equal(raw[:HALF], theirs[:HALF])


def test_a_grid_has_syncers_semaphores_atomics_vectors_and_packets(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out = shared(communicator, np.zeros(2 * THREADS, np.int32))
        words = shared(communicator, np.zeros(2, np.int32))
        kernels = communicator.compile(MSCCLPP_KERNELS)
        kernels.grid(2, THREADS, out, words.ptr, words.ptr + 4)
        boxes = shared(communicator, np.zeros((8, 2), np.uint32))
        kernels.packets(1, 8, boxes)
        communicator.synchronize()
        return on_host(out), on_host(words), on_host(boxes)

    for out, words, boxes in pair.run(body):
        assert out[:3].tolist() == [6, 1, 4]
        np.testing.assert_array_equal(out[3:], [i % THREADS for i in range(3, 2 * THREADS)])
        assert words.tolist() == [0, 7]
        np.testing.assert_array_equal(boxes, [[i, 1] for i in range(8)])


WAITS = r"""
#include <mscclpp/assert_device.hpp>
#include <mscclpp/packet_device.hpp>
#include <mscclpp/poll_device.hpp>
extern "C" __global__ void spin(int* word) { POLL_MAYBE_JAILBREAK((*word == 0), -1); }
extern "C" __global__ void check(int* word) { MSCCLPP_ASSERT_DEVICE(*word != 0, "it has a value"); }
extern "C" __global__ void pack(int* word) { mscclpp::copyToPackets(nullptr, word, 12, 0, 1, 1); }
extern "C" __global__ void unpack(int* word) {
  mscclpp::getPackets<mscclpp::LL8Packet>(nullptr, 0, word, 0, 6, 0, 1, 1);
}
"""


@pytest.mark.parametrize(
    ("kernel", "error", "text"),
    [
        ("spin", WaitTimeoutError, "a condition of its kernel"),
        ("check", AbortedError, "ended the communicator"),
        (
            "pack",
            TriggerError,
            "called copyToPackets: 12 bytes at offset 0 of the memory; expected multiples of 8 bytes",
        ),
        ("unpack", TriggerError, "called copyFromPackets: 6 bytes .* expected multiples of 4 bytes"),
    ],
)
def test_waits_and_assertions_end_the_communicator(kernel: str, error: type[Exception], text: str) -> None:
    def body(communicator: Communicator) -> None:
        communicator.timeout = 0.2
        communicator.compile(WAITS, kernel)(1, 1, shared(communicator, np.zeros(1, np.int32)))
        with pytest.raises(error, match=text):
            communicator.synchronize()

    with Ranks(1) as alone:
        alone.run(body)


@pytest.mark.parametrize(
    ("header", "use"),
    [
        ("switch_channel_device.hpp", "mscclpp::SwitchChannelDeviceHandle{}.broadcast<float>(0, 1);"),
        ("switch_channel_device.hpp", "mscclpp::SwitchChannelDeviceHandle{}.relaxedSignal();"),
        ("bulk_device.hpp", "mscclpp::bulkFence();"),
        ("port_channel_device.hpp", "mscclpp::PortChannelDeviceHandle{}.atomicAdd(0, int64_t(1));"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(pair: Ranks, header: str, use: str) -> None:
    source = f'#include <mscclpp/{header}>\nextern "C" __global__ void uses() {{ {use} }}\n'

    def body(communicator: Communicator) -> Any:
        with pytest.raises(CompileError, match="is not offered") as refusal:
            communicator.compile(source)
        return refusal.value

    pair.run(body)


# The calls that the kernel `one_part` can make. WORDS gives the bytes per word, PACKETS the data bytes per packet. On
# every target, thread t moves words t, t + threads, ….
PUT_4, PUT_8, PUT, PUT_WHOLE_WORDS, GET_8, PUT_LL16, PUT_LL8, UNPACK_LL8, COPY_LL16 = range(9)
WORDS = {PUT_4: 4, PUT_8: 8, PUT: 16, PUT_WHOLE_WORDS: 16, GET_8: 8}
PACKETS = {PUT_LL16: 8, PUT_LL8: 4, COPY_LL16: 8}


def in_turn(word: int, first: int, nbytes: int, thread: int, threads: int) -> list[int]:
    """Returns the offsets of the bytes that a thread moves if `nbytes` bytes from offset `first` move word by word."""
    words = range(thread, nbytes // word, threads)
    return [first + word * i + byte for i in words for byte in range(word)]


def own_part(word: int, to: int, nbytes: int, thread: int, threads: int, *, remainder: bool = True) -> list[int]:
    """Returns the offsets of the bytes that a thread moves. Threads first move the aligned words, and then move the
    bytes before and after them in words of 4 bytes and as single bytes.
    """
    head = -to % word
    body = (nbytes - head) // word * word
    rest = [(to, head), (to + head + body, nbytes - head - body)] if remainder else []
    found = in_turn(word, to + head, body, thread, threads)
    for first, size in rest:
        found += in_turn(4, first, size, thread, threads)
        found += in_turn(1, first + size // 4 * 4, size % 4, thread, threads)
    return sorted(found)


def test_every_target_gives_a_thread_the_same_part_of_a_call(pair: Ranks) -> None:
    """MSCCL++'s kernels omit barriers where each thread sends the bytes that the thread itself has written."""
    to, start, nbytes, threads = 1024 + 4, 4, 150, 3
    content = np.arange(1, 2049, dtype=np.uint16).view(np.uint8).copy()
    content[content == 0] = 255  # bytes that are not moved stay 0

    def body(communicator: Communicator) -> list[tuple[int, int, list[int], list[int]]]:
        kernel = communicator.compile(MSCCLPP_KERNELS).one_part
        source = np.zeros(4096, np.uint8)
        source[:1024] = content[:1024]
        data = shared(communicator, source)
        (channel,) = communicator.sm_channels(data, packet_buffer=data, peers=[communicator.rank])

        def changed(call: int, at: int, of: int, size: int, thread: int) -> list[int]:
            data.upload(source)
            kernel(1, 1, channel, call, at, of, size, thread, threads)
            communicator.synchronize()
            return np.flatnonzero(on_host(data)[1024:]).tolist()

        seen = []
        for thread in (0, 2):
            for call, word in WORDS.items():
                expected = own_part(word, to, nbytes, thread, threads, remainder=call != PUT_WHOLE_WORDS)
                seen.append((call, thread, changed(call, to, start, nbytes, thread), [i - 1024 for i in expected]))
            for call, payload in PACKETS.items():
                expected = in_turn(2 * payload, 0, 2 * 8 * payload, thread, threads)
                found = changed(call, 1024, 8, 8 * payload, thread)
                whole = sorted({i // (2 * payload) for i in found})
                seen.append((call, thread, whole, sorted({i // (2 * payload) for i in expected})))
            packets = np.zeros((8, 2), np.uint32)
            packets[:, 0], packets[:, 1] = 0x01010101, 7
            source[512:576] = packets.view(np.uint8).ravel()
            seen.append(
                (UNPACK_LL8, thread, changed(UNPACK_LL8, 1024, 512, 32, thread), in_turn(4, 0, 32, thread, threads))
            )
        return seen

    for seen in pair.run(body):
        for call, thread, found, expected in seen:
            assert found == expected, (call, thread)


def test_threads_and_blocks_use_a_channel_at_once(pair: Ranks) -> None:
    def body(communicator: Communicator) -> np.ndarray:
        kernels = communicator.compile(MSCCLPP_KERNELS)
        sent, received = shared(communicator, np.arange(8, dtype=np.int32)), shared(communicator, np.zeros(8, np.int32))
        memory, ports = communicator.sm_channels(received), communicator.proxy_channels(received, sent)
        for _ in range(20):
            kernels.memory_at_once(2, 4, memory)
            kernels.port_at_once(2, 4, ports)
        communicator.synchronize()
        barrier(communicator)
        return on_host(received)

    for received in pair.run(body):
        np.testing.assert_array_equal(received, np.arange(8))


def test_semaphores_and_rings_are_arguments_and_other_kinds_of_handles_are_refused(pair: Ranks) -> None:
    def body(communicator: Communicator) -> tuple[list[int], list[str]]:
        kernels = communicator.compile(MSCCLPP_KERNELS)
        data, out = shared(communicator, np.zeros(64, np.uint8)), shared(communicator, np.zeros(3, np.uint64))
        by_rank = communicator.sm_channels(data, peers=range(2))
        (port,) = ports = communicator.proxy_channels(data)
        kernels.semaphores(1, 2, by_rank.semaphores, communicator.rank, 2)
        kernels.ring_and_semaphore(1, 1, port.fifo, port.semaphore, port.id, out)
        communicator.synchronize()
        barrier(communicator)
        refused = []
        for kernel, args in [
            (kernels.semaphores, (by_rank, 0, 2)),
            (kernels.semaphores, (ports.semaphores, 0, 2)),
            (kernels.memory_at_once, (ports,)),
            (kernels.port_at_once, (by_rank,)),
            (kernels.ring_and_semaphore, (port, port.semaphore, 0, out)),
            (kernels.ring_and_semaphore, (port.fifo, by_rank[0].semaphore, 0, out)),
        ]:
            with pytest.raises(HandleTypeError) as error:
                kernel(1, 1, *args)
            assert isinstance(error.value, TypeError)
            refused.append(str(error.value))
        return on_host(out).tolist(), refused

    for out, refused in pair.run(body):
        assert out == [1, 0, 1]
        assert refused[0] == "args[0] of kernel semaphores: expected semaphores of SmChannels, not SmChannels"
        assert refused[1].endswith("expected semaphores of SmChannels, not semaphores of ProxyChannels")
        assert refused[2].endswith("expected SmChannels, not ProxyChannels")
        assert refused[3].endswith("expected ProxyChannels, not SmChannels")
        assert refused[4].endswith("expected a ring of triggers (`fifo` of ProxyChannels), not ProxyChannels")
        assert refused[5].startswith("args[1] of kernel ring_and_semaphore: expected semaphores of ProxyChannels")


def test_members_element_types_and_vectors(pair: Ranks) -> None:
    def body(communicator: Communicator) -> np.ndarray:
        data, out = shared(communicator, np.zeros(64, np.uint8)), shared(communicator, np.zeros(32, np.float32))
        (memory,), (port,) = communicator.sm_channels(data), communicator.proxy_channels(data)
        communicator.compile(MSCCLPP_KERNELS).members(1, 1, memory, port, out)
        communicator.synchronize()
        barrier(communicator)
        return on_host(out)

    for out in pair.run(body):
        assert out[:12].tolist() == [2.5, 1, 65504, 3, 60000, 1, 6, 8, 1.75 + 1.875, 12, 7, 5]
        np.testing.assert_array_equal(out[16:28], out[:12])


BUILT_INS = r"""
#include <assert.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <mscclpp/memory_channel_device.hpp>
extern __shared__ float outside[];
extern "C" __global__ void __launch_bounds__(1024, 1) arithmetic(double* out) {
  int i = 0;
  auto put = [&](double value) { out[i++] = value; };
  put(min(3, 2) + max(2u, 7u) + min(2.5f, 1.0f) + max(1ll, 2));
  put(abs(-2) + fabsf(-0.5f) + fminf(1, 2) + fmaxf(1, 2));
  put(expf(0) + sqrtf(16) + rsqrtf(4) + floorf(2.5f) + powf(2, 3));
  put(__popc(0xffu) + __popcll(1ull << 40) + __clz(1) + __ffs(8) + __ldg(out));
  dim3 shape(2, 3);
  put(shape.x * shape.y * shape.z + (UINT32_MAX == 0xffffffffu) + sizeof(float4) + sizeof(uchar4));
  unsigned words[2] = {0, 9};
  memcpy(&words[0], &words[1], sizeof(unsigned));
  put(words[0] + atomicAdd(&words[1], 1) + words[1] + (clock64() > 0));
  put(float(__half(0.5f) + __float2half(2)) + __bfloat162float(__nv_bfloat16(3) * __nv_bfloat16(0.5f)));
  __half2 pair = __hadd2(__floats2half2_rn(1, 2), __float2half2_rn(1));
  put(__half22float2(pair).y + float(__hmin(pair.x, pair.y)) + (__float_as_int(1.0f) == 0x3f800000));
  assert(i == 8);
}
extern "C" __global__ void shared_memory(int* out) {
  extern __shared__ int4 inside[];
  inside[threadIdx.x].x = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = inside[blockDim.x - 1 - threadIdx.x].x + (reinterpret_cast<int*>(inside) == (int*)outside) +
                     100 * __syncthreads_count(threadIdx.x < 3) + 1000 * __syncthreads_or(threadIdx.x == 2);
}
extern "C" __global__ void fails(int* out) {
  printf("the assertion of thread %d %s\n", int(threadIdx.x), "fails");
  assert(out == nullptr);
}
"""


@pytest.mark.host_only(reason="on GPUs their compilers have them")
def test_the_host_runtime_has_cudas_built_in_functions() -> None:
    def body(communicator: Communicator) -> tuple[list[float], list[int]]:
        kernels = communicator.compile(BUILT_INS)
        out, numbers = shared(communicator, np.full(16, 4.0)), shared(communicator, np.zeros(8, np.int32))
        kernels.arithmetic(1, 1, out)
        kernels.shared_memory(1, 8, numbers, shared=8 * 16)
        communicator.synchronize()
        with pytest.raises(CompileError, match="kernel source: the host runtime has no __reduce_add_sync\n"):
            communicator.compile('extern "C" __global__ void k(int* o) { *o = __reduce_add_sync(~0u, 1); }')
        kernels.fails(1, 1, numbers)
        with pytest.raises(AbortedError, match="ended the communicator"):
            communicator.synchronize()
        return on_host(out)[:8].tolist(), on_host(numbers).tolist()

    with Ranks(1) as alone:
        ((arithmetic, numbers),) = alone.run(body)
    assert arithmetic == [2 + 7 + 1 + 2, 2.5 + 1 + 2, 1 + 4 + 0.5 + 2 + 8, 8 + 1 + 31 + 4 + 12, 6 + 1 + 16 + 4,
                          9 + 9 + 10 + 1, 2.5 + 1.5, 3 + 2 + 1]  # fmt: skip
    assert numbers == [7 - i + 1 + 300 + 1000 for i in range(8)]
