"""The host runtime, which emulates a GPU: kernels, refused launches, streams, events, memory and compilation."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.device._native import ffi, lib
from proxyccl.device.build.compile_cache import cache_dir, loaded_object
from proxyccl.device.errors import ArgumentError, CompileError, KernelError
from proxyccl.device.host import HostRuntime
from proxyccl.device.host.compiler import find_compiler
from proxyccl.device.host.shipped_libraries import ships_kernels
from proxyccl.device.kernel import Module
from support.processes import shared_memory_names
from support.running import run_ranks
from support.stream_words import wait_value, write_value

pytestmark = pytest.mark.host_only(reason="the host runtime's own")

WARP = 32
FULL = 0xFFFFFFFF
WAIT = 30.0

SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

extern "C" __global__ void indices(uint32_t* out) {
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const uint32_t at = block * blockDim.x * blockDim.y * blockDim.z + thread;
  const uint32_t digits[6] = {blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z};
  for (int i = 0; i < 6; ++i) out[6 * at + i] = digits[i];
}

// Sums of all threads' numbers, through static shared memory, in log2 steps that each need the barrier.
extern "C" __global__ void block_sum(uint32_t* out) {
  __shared__ uint32_t values[1024];
  values[threadIdx.x] = threadIdx.x + blockIdx.x;
  for (uint32_t step = blockDim.x / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) values[threadIdx.x] += values[threadIdx.x + step];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = values[0];
}

// The upper half of the block ends; the remaining threads still meet.
extern "C" __global__ void early_exit(uint32_t* out) {
  uint32_t* values = static_cast<uint32_t*>(dynamicShared());
  if (threadIdx.x >= blockDim.x / 2) return;
  values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = values[blockDim.x / 2 - 1 - threadIdx.x];
  __syncthreads();
}

extern "C" __global__ void reverse_dynamic(double* out) {
  double* values = static_cast<double*>(dynamicShared());
  values[threadIdx.x] = threadIdx.x + 0.5;
  __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void shuffles(uint32_t mask, int* out) {
  const int lane = threadIdx.x % 32, n = blockDim.x;
  if (!(mask >> lane & 1)) return;
  out[0 * n + threadIdx.x] = __shfl_sync(mask, 100 + lane, 3);
  out[1 * n + threadIdx.x] = __shfl_xor_sync(mask, 100 + lane, 1);
  out[2 * n + threadIdx.x] = __shfl_up_sync(mask, 100 + lane, 2);
  out[3 * n + threadIdx.x] = __shfl_down_sync(mask, 100 + lane, 2);
  out[4 * n + threadIdx.x] = static_cast<int>(__ballot_sync(mask, lane % 3 == 0));
  out[5 * n + threadIdx.x] = __any_sync(mask, lane == 5) + 2 * __all_sync(mask, lane < 31);
  out[6 * n + threadIdx.x] = static_cast<int>(1000.0 * __shfl_sync(mask, lane + 0.25, 2));  // 8 bytes
}

// Both halves of a warp meet among themselves, a different number of times.
extern "C" __global__ void disjoint_masks(uint32_t* out) {
  __shared__ uint32_t turns[2];
  const uint32_t half = threadIdx.x / 16, mask = half ? 0xffff0000u : 0x0000ffffu;
  for (uint32_t turn = 0; turn < 3 + 4 * half; ++turn) {
    __syncwarp(mask);
    if (threadIdx.x % 16 == turn % 16) turns[half] = turn;
    __syncwarp(mask);
    out[threadIdx.x] = turns[half] + 1;
  }
}

extern "C" __global__ void atomics(int* ints, uint64_t* wide, float* sum, double* wide_sum) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&ints[0], 1);
  atomicAdd_system(&ints[1], 2);
  atomicMax(&ints[2], thread);
  atomicMin(&ints[3], -thread);
  for (int seen = ints[4], before; (before = atomicCAS(&ints[4], seen, seen + 1)) != seen;) seen = before;
  if (atomicExch(&ints[5], 1) == 0) atomicAdd(&ints[6], 1);
  atomicAdd(&wide[0], uint64_t{1} << 32);
  atomicAdd(sum, 0.5f);
  atomicAdd(wide_sum, 0.25);
}

extern "C" __global__ void grid_barrier(DeviceSyncer* syncer, uint32_t* values, uint32_t* wrong, int turns) {
  for (int turn = 1; turn <= turns; ++turn) {
    if (threadIdx.x == 0) values[blockIdx.x] = turn;
    syncer->sync(gridDim.x);
    for (uint32_t block = 0; block < gridDim.x; ++block)
      if (values[block] != static_cast<uint32_t>(turn)) atomicAdd(wrong, 1u);
    syncer->sync(gridDim.x);
  }
}

extern "C" __global__ void count_blocks(uint32_t* seen) { atomicAdd(&seen[blockIdx.x], 1u); }

extern "C" __global__ void unreachable_barrier() {
  if (threadIdx.x % 2 == 0) __syncthreads();
  if (threadIdx.x % 2 == 1) __syncwarp(0xffffffffu);
}

// Uses the stack down to `left` bytes from its end.
extern "C" __global__ void dig(uint64_t left, int* out) {
  struct Digger {
    static int down(uint64_t left) {
      volatile char frame[512];
      for (int i = 0; i < 512; ++i) frame[i] = static_cast<char>(i);
      const uint64_t above = reinterpret_cast<uint64_t>(frame) % host::kStackBytes;
      return above <= left ? frame[7] : down(left) + frame[0];
    }
  };
  *out = Digger::down(left);
}

struct Pair { int32_t first; float second; };
extern "C" __global__ void parameters(int8_t a, uint16_t b, int32_t c, uint64_t d, float e, double f, const char* g,
                                      Pair h, bool i, double* out) {
  const double values[] = {double(a), double(b), double(c), double(d), e, f, double(*g), double(h.first), h.second,
                           double(i)};
  for (int k = 0; k < 10; ++k) out[k] = values[k];
}

extern "C" __global__ void convert(const uint16_t* halves, float* widened, const float* floats, uint16_t* narrowed,
                                   uint32_t count, uint32_t float_count) {
  forEach(count, threadIdx.x, blockDim.x, [&](size_t i) { widened[i] = halfToFloat(halves[i]); });
  forEach(float_count, threadIdx.x, blockDim.x, [&](size_t i) { narrowed[i] = floatToHalf(floats[i]); });
}

extern "C" __global__ void wait_for(const uint32_t* word, uint32_t* out, uint32_t value) {
  while (loadAcquireSystem(word) == 0) spinHint(0);
  *out = value;
}
extern "C" __global__ void assign(uint32_t* out, uint32_t value) { *out = value; }
extern "C" __global__ void copy_word(uint32_t* out, const uint32_t* in) { *out = *in; }
"""


@pytest.fixture(scope="module")
def runtime() -> HostRuntime:
    return HostRuntime()


@pytest.fixture(scope="module")
def kernels(runtime: HostRuntime) -> Module:
    return runtime.compile(SOURCE)


def zeros(count: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
    return np.zeros(count, dtype)


# -- threads, barriers, shared memory ---


@pytest.mark.parametrize(
    ("grid", "block"), [(3, 5), ((2, 3), (4, 2)), ((2, 1, 3), (3, 2, 2)), (1, 1024), ((1, 1, 2), 1)]
)
def test_every_thread_runs_once_with_its_own_indices(
    runtime: HostRuntime, kernels: Module, grid: Any, block: Any
) -> None:
    shape = [(*np.atleast_1d(dims).tolist(), 1, 1)[:3] for dims in (grid, block)]
    out = np.full(6 * int(np.prod(shape)), -1, np.int32)
    kernels.indices(grid, block, out)
    runtime.synchronize()
    (gx, gy, gz), (bx, by, bz) = shape
    expected = [(x, y, z, i, j, k) for z, y, x, k, j, i in np.ndindex(gz, gy, gx, bz, by, bx)]
    assert np.array_equal(out.reshape(-1, 6), expected)


@pytest.mark.parametrize("threads", [1, 2, 64, 1024])
def test_static_shared_memory_belongs_to_a_block(runtime: HostRuntime, kernels: Module, threads: int) -> None:
    out = zeros(7)
    kernels.block_sum(7, threads, out)
    runtime.synchronize()
    assert np.array_equal(out, threads * (threads - 1) // 2 + threads * np.arange(7))


def test_a_barrier_waits_only_for_threads_that_have_not_ended(runtime: HostRuntime, kernels: Module) -> None:
    out = zeros(50)
    kernels.early_exit(1, 100, out, shared=400)
    runtime.synchronize()
    assert np.array_equal(out, np.arange(50)[::-1])


def test_dynamic_shared_memory_has_the_size_of_the_launch(runtime: HostRuntime, kernels: Module) -> None:
    for threads in (1, 33, 1024):
        out = zeros(threads, np.float64)
        kernels.reverse_dynamic(1, threads, out, shared=8 * threads)
        runtime.synchronize()
        assert np.array_equal(out, np.arange(threads)[::-1] + 0.5)


# -- warps ---


@pytest.mark.parametrize("threads", [32, 64, 40])  # with 40 threads the second warp has eight lanes
@pytest.mark.parametrize("mask", [FULL, 0x0000FFFF, 0x5555555D])
def test_warp_operations_exchange_among_the_lanes_of_the_mask(
    runtime: HostRuntime, kernels: Module, threads: int, mask: int
) -> None:
    out = np.full((7, threads), -7, np.int32)
    kernels.shuffles(1, threads, mask, out)
    runtime.synchronize()
    for thread in range(threads):
        lane = thread % WARP
        lanes = [i for i in range(WARP) if mask >> i & 1 and thread - lane + i < threads]
        if lane not in lanes:
            assert np.all(out[:, thread] == -7)
            continue

        def source(wanted: int, own: int = lane, members: list[int] = lanes) -> int:
            # Reading from a lane outside the mask gives the reader's own value.
            return wanted if wanted in members else own

        expected = [
            100 + source(3),
            100 + source(lane ^ 1),
            100 + (source(lane - 2) if lane >= 2 else lane),
            100 + (source(lane + 2) if lane + 2 < WARP else lane),
            int(np.array(sum(1 << i for i in lanes if i % 3 == 0), np.uint32).astype(np.int32)),
            (5 in lanes) + 2 * all(i < 31 for i in lanes),
            int(1000 * (source(2) + 0.25)),
        ]
        assert out[:, thread].tolist() == expected


def test_parts_of_a_warp_meet_on_their_own(runtime: HostRuntime, kernels: Module) -> None:
    out = zeros(32)
    kernels.disjoint_masks(1, 32, out)
    runtime.synchronize()
    assert out.tolist() == [3] * 16 + [7] * 16


# -- blocks that wait for each other ---


def test_atomics_count_every_thread_of_every_block(runtime: HostRuntime, kernels: Module) -> None:
    ints, wide, total, wide_total = zeros(7, np.int32), zeros(1, np.uint64), zeros(1, np.float32), zeros(1, np.float64)
    kernels.atomics(8, 100, ints, wide, total, wide_total)
    runtime.synchronize()
    assert ints.tolist() == [800, 1600, 799, -799, 800, 1, 1]
    assert wide[0] == 800 << 32
    assert (total[0], wide_total[0]) == (400, 200)


def test_the_grid_barrier_serves_any_number_of_blocks_in_turn(runtime: HostRuntime, kernels: Module) -> None:
    syncer, values, wrong = zeros(2), zeros(16), zeros(1)
    for blocks in (4, 1, 16, 2, 7):
        kernels.grid_barrier(blocks, 33, syncer, values, wrong, 5)
    runtime.synchronize()
    assert wrong[0] == 0


def test_more_blocks_than_are_resident_all_run(runtime: HostRuntime, kernels: Module) -> None:
    blocks = 3 * lib.PROXYCCL_HOST_MAX_RESIDENT_BLOCKS + 1
    seen = zeros(blocks)
    kernels.count_blocks(blocks, 2, seen)
    runtime.synchronize()
    assert np.all(seen == 2)


def test_stacks_of_a_block_are_one_mapping(runtime: HostRuntime, kernels: Module) -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    blocks = 16
    syncer, values, wrong = zeros(2), zeros(blocks), zeros(1)
    before = mappings()
    kernels.grid_barrier(blocks, 256, syncer, values, wrong, 1)  # blocks that wait for each other have OS threads
    runtime.synchronize()
    assert mappings() - before < 256  # 4096 OS threads, one per GPU thread, would need far more


def test_16_bit_floats_convert_as_ieee_says(runtime: HostRuntime, kernels: Module) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    exact = halves.view(np.float16).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)].astype(np.float64))
    ties = np.append((finite[1:] + finite[:-1]) / 2, [65520, -65520]).astype(np.float32)
    up, down = np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))
    floats = np.concatenate([exact, ties, up, down])
    widened, narrowed = zeros(len(halves), np.float32), zeros(len(floats), np.uint16)
    kernels.convert(1, 32, halves, widened, floats, narrowed, len(halves), len(floats))
    runtime.synchronize()
    with np.errstate(over="ignore"):
        expected = floats.astype(np.float16)
    for seen, wanted in ((widened, exact), (narrowed.view(np.float16), expected)):
        assert np.array_equal(seen, wanted, equal_nan=True)
        assert np.array_equal(np.signbit(seen), np.signbit(wanted))


# -- launches that fail ---


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [(1, 1025, 0), (1, (32, 32, 2), 0), (1, 1, lib.PROXYCCL_HOST_MAX_SHARED_BYTES + 1), ((1 << 16, 1 << 16), 1, 0)],
)
def test_a_launch_beyond_the_limits_is_refused(kernels: Module, grid: Any, block: Any, shared: int) -> None:
    with pytest.raises(KernelError, match="block_sum with grid"):
        kernels.block_sum(grid, block, zeros(1), shared=shared)


@pytest.mark.parametrize("shape", [0, -1, (), (1, 0), (1, 1, 1, 1), 1.5, "1", 1 << 32])
def test_a_shape_that_is_none_is_refused_by_name(kernels: Module, shape: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^grid: "):
        kernels.block_sum(shape, 1, zeros(1))
    with pytest.raises(ArgumentError, match=r"^block: "):
        kernels.block_sum(1, shape, zeros(1))


@pytest.mark.parametrize("shared", [-1, 1 << 32, 1.5])
def test_shared_memory_of_no_size_is_refused(kernels: Module, shared: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^shared: "):
        kernels.block_sum(1, 1, zeros(1), shared=shared)


def test_a_barrier_that_threads_miss_fails_the_kernel_alone(runtime: HostRuntime, kernels: Module) -> None:
    for _ in range(3):
        kernels.unreachable_barrier(2, 64)
        with pytest.raises(KernelError, match="barrier"):
            runtime.synchronize()
        out = zeros(2)
        kernels.block_sum(2, 64, out)
        runtime.synchronize()
        assert out.tolist() == [2016, 2080]


def test_a_stack_overflow_fails_the_kernel_alone(runtime: HostRuntime, kernels: Module) -> None:
    out = zeros(1, np.int32)
    kernels.dig(1, 1, 16384, out)
    runtime.synchronize()
    assert out[0] == 7
    for _ in range(2):
        kernels.dig(1, 4, 4096, out)
        with pytest.raises(KernelError, match="stack"):
            runtime.synchronize()
    kernels.dig(1, 4, 16384, out)
    runtime.synchronize()


# -- arguments ---


def arguments(**changes: Any) -> list[Any]:
    values = {
        "a": -5, "b": 65535, "c": -(1 << 31), "d": 1 << 52, "e": 0.1, "f": 0.1, "g": np.array([42], np.int8),
        "h": struct.pack("<if", -3, 1.5), "i": True, "out": zeros(10, np.float64),
    }  # fmt: skip
    return list({**values, **changes}.values())


def test_arguments_arrive_as_the_kernel_declares_them(runtime: HostRuntime, kernels: Module) -> None:
    values = arguments()
    kernels.parameters(1, 1, *values)
    runtime.synchronize()
    expected = [-5, 65535, -(1 << 31), 1 << 52, float(np.float32(0.1)), 0.1, 42, -3, 1.5, 1]
    assert values[-1].tolist() == expected


def test_prepared_arguments_can_be_launched_again(runtime: HostRuntime, kernels: Module) -> None:
    out = zeros(1)
    launch = kernels.assign.prepare(1, 1, out, 7)
    for _ in range(2):
        out[0] = 0
        launch()
        runtime.synchronize()
        assert out[0] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": 256}, r"args\[0\] of kernel parameters: 256 does not fit in 8 bits"),
        ({"b": -32769}, r"args\[1\].*does not fit in 16 bits"),
        ({"c": 1.0}, r"args\[2\].*expected an integer, not float"),
        ({"d": None}, r"args\[3\].*expected an integer, not NoneType"),
        ({"e": "1"}, r"args\[4\].*expected a number, not str"),
        ({"e": 1e60}, r"args\[4\].*does not fit in a float of 4 bytes"),
        ({"g": -1}, r"args\[6\].*expected an address .*, not -1"),
        ({"g": 1 << 64}, r"args\[6\].*expected an address"),
        ({"g": "text"}, r"args\[6\]"),
        ({"h": b"1234"}, r"args\[7\].*expected a struct of 8 bytes, not 4"),
        ({"h": 8}, r"args\[7\].*expected a struct of 8 bytes, not int"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_its_place(
    kernels: Module, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kernels.parameters(1, 1, *arguments(**changes))


@pytest.mark.parametrize("count", [0, 9, 11])
def test_a_wrong_number_of_arguments_is_refused(kernels: Module, count: int) -> None:
    with pytest.raises(ArgumentError, match=f"kernel parameters takes 10 arguments, not {count}"):
        kernels.parameters(1, 1, *[*arguments(), 0][:count])


def test_a_kernel_that_ends_has_its_proxy_look_for_what_it_pushed_last(runtime: HostRuntime, kernels: Module) -> None:
    waits: list[int] = []
    helper = ffi.callback("int(void *, int)", lambda _, waiting: waits.append(waiting) or 0)
    argument, word, out = ffi.new("char *"), np.ones(1, np.uint32), zeros(1)
    lib.proxyccl_host_add_helper(helper, argument)
    try:
        kernels.wait_for(1, 1, word, out, 5)  # the kernel need not wait, because the word is set
        runtime.synchronize()
    finally:
        lib.proxyccl_host_remove_helper(argument)
    assert out[0] == 5
    assert waits == [0]


# -- streams and events ---


def test_a_stream_keeps_its_order_and_others_do_not_wait(runtime: HostRuntime, kernels: Module) -> None:
    blocked, free = runtime.create_stream(), runtime.create_stream()
    word, out, other = zeros(1), zeros(1), zeros(1)
    kernels.wait_for(1, 1, word, out, 1, stream=blocked)
    kernels.assign(1, 1, out, 2, stream=blocked)
    kernels.assign(1, 1, other, 3, stream=free)
    free.synchronize()
    assert other[0] == 3
    assert free.query()
    assert not blocked.query()
    assert out[0] == 0
    word[0] = 1
    blocked.synchronize()
    assert out[0] == 2
    assert blocked.query()


def test_an_event_orders_streams(runtime: HostRuntime, kernels: Module) -> None:
    first, second = runtime.create_stream(), runtime.create_stream()
    word, value, out = zeros(1), zeros(1), zeros(1)
    event = runtime.create_event()
    kernels.wait_for(1, 1, word, value, 5, stream=first)
    event.record(first)
    runtime.wait_event(second.handle, event)
    kernels.copy_word(1, 1, out, value, stream=second)
    assert not event.query()
    word[0] = 1
    event.synchronize()
    assert event.query()
    second.synchronize()
    assert out[0] == 5


def test_a_wait_is_for_the_record_that_an_event_had_whatever_it_records_later(runtime: HostRuntime) -> None:
    word = runtime.allocate(8)
    held, waiting, idle = (runtime.create_stream() for _ in range(3))
    event, after = runtime.create_event(), runtime.create_event()
    wait_value(runtime, word.ptr, 1, held)
    event.record(held)
    runtime.wait_event(waiting.handle, event)
    after.record(waiting)
    event.record(idle)
    idle.synchronize()
    assert event.query()
    assert not after.query()
    write_value(runtime, word.ptr, 1, idle)
    waiting.synchronize()
    assert after.query()


def test_events_tell_the_time_between_them(runtime: HostRuntime, kernels: Module) -> None:
    stream = runtime.create_stream()
    word, out = zeros(1), zeros(1)
    start, end = runtime.create_event(), runtime.create_event()
    start.record(stream)
    kernels.wait_for(1, 1, word, out, 1, stream=stream)
    end.record(stream)
    start.synchronize()
    with pytest.raises(KernelError, match="not ready"):
        end.elapsed(start)
    began = time.perf_counter()
    while (time.perf_counter() - began) * 1000 < 5:
        pass
    word[0] = 1
    end.synchronize()
    assert 5 <= end.elapsed(start) <= WAIT * 1000


def test_copies_and_fills_take_their_turn_in_a_stream(runtime: HostRuntime, kernels: Module) -> None:
    stream = runtime.create_stream()
    word, out, copy = zeros(1), zeros(1), zeros(1)
    kernels.wait_for(1, 1, word, out, 9, stream=stream)
    runtime.copy(copy.ctypes.data, out.ctypes.data, 4, stream)
    runtime.fill(out.ctypes.data, 0xFF, 4, stream)
    assert (out[0], copy[0]) == (0, 0)
    word[0] = 1
    stream.synchronize()
    assert (out[0], copy[0]) == (FULL, 9)


def test_a_stream_in_the_caller_is_done_when_a_call_returns(runtime: HostRuntime, kernels: Module) -> None:
    stream, event = runtime.create_stream(in_caller=True), runtime.create_event()
    word, out, copy = zeros(1, np.uint64), zeros(1), zeros(1)
    kernels.assign(1, 1, out, 2, stream=stream)
    runtime.copy(copy.ctypes.data, out.ctypes.data, 4, stream)
    assert copy[0] == 2
    write_value(runtime, word.ctypes.data, 3, stream)
    wait_value(runtime, word.ctypes.data, 3, stream)
    event.record(stream)
    assert event.query()
    assert stream.query()


def test_a_stream_in_the_caller_runs_one_thing_at_a_time(runtime: HostRuntime, kernels: Module) -> None:
    stream = runtime.create_stream(in_caller=True)
    word, value, out = zeros(1), zeros(1), zeros(1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: kernels.wait_for(1, 1, word, value, 5, stream=stream))
        try:
            deadline = time.monotonic() + WAIT
            while stream.query():
                assert time.monotonic() < deadline
            second = threads.submit(lambda: kernels.copy_word(1, 1, out, value, stream=stream))
            assert not stream.query()
            assert not first.done()
        finally:
            word[0] = 1
        first.result(WAIT)
        second.result(WAIT)
    assert out[0] == 5


def test_a_failure_in_the_caller_is_told_when_the_stream_is_synchronized(runtime: HostRuntime, kernels: Module) -> None:
    stream = runtime.create_stream(in_caller=True)
    out = zeros(1)
    kernels.unreachable_barrier(2, 64, stream=stream)
    kernels.assign(1, 1, out, 2, stream=stream)
    with pytest.raises(KernelError, match="barrier"):
        stream.synchronize()
    stream.synchronize()
    assert out[0] == 2


def test_collectives_have_as_many_blocks_as_the_runtime_allows() -> None:
    def body(comm: Communicator) -> int:
        return comm.collectives.team().grid(1 << 30, "default")

    assert run_ranks(2, body, make_runtime=lambda _: HostRuntime()) == [1, 1]
    assert run_ranks(2, body, make_runtime=lambda _: HostRuntime(blocks=3)) == [3, 3]


@pytest.mark.parametrize("blocks", [0, 513, 1.0, "2"])
def test_a_number_of_blocks_that_is_none_is_refused(blocks: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^blocks: expected an integer from 1 to 512"):
        HostRuntime(blocks=blocks)


def test_a_closed_or_foreign_stream_is_refused(runtime: HostRuntime, kernels: Module) -> None:
    stream = runtime.create_stream()
    stream.close()
    for wrong in (stream, 12345, "stream"):
        with pytest.raises(ArgumentError, match=r"^stream: "):
            kernels.assign(1, 1, zeros(1), 1, stream=wrong)


# -- memory ---

OWNER = """
import os, sys
from proxyccl.device.host import HostRuntime
runtime = HostRuntime()
memory = runtime.allocate(12288)
runtime.fill(memory.ptr, 7, 12288)
print(runtime.export(memory.ptr + 4096, 8192).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Any:
    """Starts a process that exports memory. Yields the process and the memory's handle."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    handle = bytes.fromhex(process.stdout.readline())
    yield process, handle
    process.kill()
    process.communicate(timeout=WAIT)


def read(runtime: HostRuntime, address: int, nbytes: int) -> bytes:
    out = zeros(nbytes, np.uint8)
    runtime.copy(out.ctypes.data, address, nbytes)
    return out.tobytes()


def test_memory_of_another_process_can_be_opened_and_outlives_it(runtime: HostRuntime, owner: Any) -> None:
    process, handle = owner
    memory = runtime.open(handle)
    assert memory.nbytes == 8192
    assert read(runtime, memory.ptr, 8192) == b"\7" * 8192
    process.kill()
    process.communicate(timeout=WAIT)
    runtime.fill(memory.ptr, 8, 8192)
    assert read(runtime, memory.ptr, 8192) == b"\x08" * 8192
    with pytest.raises(ArgumentError, match="can't be opened"):
        runtime.open(handle)
    memory.close()
    memory.close()
    assert memory.closed


def test_a_killed_owner_leaves_nothing_behind(owner: Any) -> None:
    process, _ = owner
    before = shared_memory_names()
    process.kill()
    process.communicate(timeout=WAIT)
    assert shared_memory_names() <= before
    assert not any("proxyccl" in name for name in shared_memory_names())


def test_memory_opened_in_its_own_process_is_the_same(runtime: HostRuntime) -> None:
    memory = runtime.allocate(4096)
    opened = runtime.open(runtime.export(memory.ptr + 16, 100))
    assert opened.ptr == memory.ptr + 16
    runtime.fill(memory.ptr, 3, 4096)
    memory.close()
    assert read(runtime, opened.ptr, 100) == b"\3" * 100


def test_bytes_that_are_no_handle_are_refused(runtime: HostRuntime) -> None:
    memory = runtime.allocate(4096)
    handle = runtime.export(memory.ptr, 4096)
    beyond = handle[:-8] + struct.pack("<Q", 4097)
    for wrong in (b"", handle[:-1], handle + b"\0", b"X" + handle[1:], bytes(len(handle)), beyond):
        with pytest.raises(ArgumentError, match=r"^handle: "):
            runtime.open(wrong)
    memory.close()
    with pytest.raises(ArgumentError, match=r"^handle: "):
        runtime.open(handle)


def test_memory_that_is_not_the_runtimes_own_is_not_exported(runtime: HostRuntime) -> None:
    private = zeros(16)
    memory = runtime.allocate(64)
    for address, nbytes in ((private.ctypes.data, 64), (memory.ptr, 65), (memory.ptr + 1, 64), (memory.ptr - 1, 2)):
        with pytest.raises(ArgumentError, match=r"^array: "):
            runtime.export(address, nbytes)


# -- compilation ---


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path))


def compiled_files() -> set[Path]:
    return set(cache_dir().glob("*.so"))


def one_kernel(body: str) -> str:
    return f'extern "C" __global__ void kernel(int* out) {{ {body} }}'


@pytest.mark.usefixtures("own_cache")
def test_a_source_is_compiled_once(runtime: HostRuntime) -> None:
    source = one_kernel("*out = 11;")
    before = compiled_files()
    runtime.compile(source)
    after = compiled_files()
    assert len(after - before) == 1
    stamp = {path: path.stat().st_mtime_ns for path in after}
    for other in (runtime, HostRuntime()):
        out = zeros(1, np.int32)
        other.compile(source)(1, 1, out)
        other.synchronize()
        assert out[0] == 11
    assert {path: path.stat().st_mtime_ns for path in compiled_files()} == stamp


def test_a_cache_that_cannot_be_written_is_done_without(runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_CACHE", "/dev/null/nowhere")
    out = zeros(1, np.int32)
    with pytest.warns(RuntimeWarning, match="the cache of compiled kernels in /dev/null/nowhere can't be used"):
        runtime.compile(one_kernel("*out = 12;"))(1, 1, out)
    runtime.synchronize()
    assert out[0] == 12
    runtime.compile(one_kernel("*out = 13;"))  # without another warning

    def no_file(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    source = one_kernel("*out = 14;")
    monkeypatch.setattr(os, "memfd_create", no_file)
    with pytest.raises(CompileError, match=r"can't be used \(.*\), nor can a file in memory: .*; set PROXYCCL_CACHE"):
        loaded_object((source,), lambda: b"", lambda _: None)


def test_another_option_is_another_compilation(runtime: HostRuntime) -> None:
    for value in (1, 2, 1):
        out = zeros(1, np.int32)
        runtime.compile(one_kernel("*out = VALUE;"), options=(f"-DVALUE={value}",))(1, 1, out)
        runtime.synchronize()
        assert out[0] == value


def test_a_changed_header_is_another_compilation(runtime: HostRuntime, tmp_path: Path) -> None:
    for value in (3, 4):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        out = zeros(1, np.int32)
        source = '#include "value.h"\n' + one_kernel("*out = VALUE;")
        runtime.compile(source, include_dirs=(str(tmp_path),))(1, 1, out)
        runtime.synchronize()
        assert out[0] == value


@pytest.mark.usefixtures("own_cache")
def test_a_compile_error_carries_the_compilers_text(runtime: HostRuntime) -> None:
    source = "// line 1\n// line 2\n" + one_kernel("*out = undeclared_name;")
    before = compiled_files()
    with pytest.raises(CompileError) as caught:
        runtime.compile(source)
    assert "kernel source:3" in caught.value.log
    assert "undeclared_name" in caught.value.log
    assert caught.value.log in str(caught.value)
    assert compiled_files() == before


def test_a_missing_header_is_a_compile_error(runtime: HostRuntime) -> None:
    for options in ((), ("-DA",)):
        with pytest.raises(CompileError, match=r"no_such_header\.h"):
            runtime.compile('#include "no_such_header.h"\n' + one_kernel(""), options=options)


def test_a_source_without_a_kernel_is_refused(runtime: HostRuntime) -> None:
    with pytest.raises(ArgumentError, match=r"^source: "):
        runtime.compile('// extern "C" __global__ void in_a_comment() {}\nvoid f() {}')


def test_kernels_are_found_by_name(kernels: Module) -> None:
    assert kernels["assign"].name == "assign"
    with pytest.raises(ArgumentError, match="unknown kernel 'absent'"):
        _ = kernels["absent"]
    with pytest.raises(AttributeError, match="unknown kernel 'absent'"):
        _ = kernels.absent
    with pytest.raises(ArgumentError, match="say which"):
        kernels(1, 1)


@pytest.mark.parametrize("environment", [{"PATH": "/nonexistent"}, {"CXX": "no-such-compiler -O2"}])
def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path, environment: dict[str, str]) -> None:
    program = textwrap.dedent(
        """
        import numpy as np
        from proxyccl.device.errors import CompileError
        from proxyccl.device.host import HostRuntime
        runtime = HostRuntime()
        for use in (
            lambda: runtime.compile('extern "C" __global__ void kernel() {}'),
            lambda: runtime.shipped("moves.h", "barrier"),
        ):
            try:
                use()
            except CompileError as error:
                print(error)
        """
    )
    variables = {key: value for key, value in os.environ.items() if key != "CXX"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PROXYCCL_CACHE": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    own, *shipped = result.stdout.splitlines()
    assert "apt install g++" in own
    if not ships_kernels():
        assert "Or install the wheel" in shipped[0]


def test_a_compiler_that_takes_a_second_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 1.2\nexec {" ".join(find_compiler())} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path / "cache"))
    HostRuntime().compile('extern "C" __global__ void awaited() {}')
    assert f"proxyccl: compiling awaited for the CPU, at first use; kept in {tmp_path}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "runs"), [(("-O1", "-g", "-fsanitize=undefined"), 0), (("-DUNUSED",), 1)], ids=["known", "others"]
)
def test_only_options_that_may_include_files_make_a_cached_kernel_run_the_compiler(
    options: tuple[str, ...], runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, counted = tmp_path / "log", tmp_path / "counted"
    counted.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo ran >> {log}\nexec {" ".join(find_compiler())} "$@"\n')
    counted.chmod(0o755)
    monkeypatch.setenv("CXX", str(counted))
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path / "cache"))
    for each in range(2):
        HostRuntime(cxxflags=options).shipped("signal_peer.h", "signal_peer")
        if each == 0:
            log.write_text("")
    assert log.read_text().count("ran") == runs


def test_arguments_outlive_the_launch_that_uses_them() -> None:
    runtime = HostRuntime()
    kernel = runtime.compile(
        'extern "C" __global__ void late(const int* in, int* out) {\n'
        "  const uint64_t start = proxyccl::nanoseconds();\n"
        "  while (proxyccl::nanoseconds() - start < 50000000) proxyccl::spinHint(1);\n"
        "  *out = *in;\n"
        "}"
    )
    out = np.zeros(40, np.int32)
    for i in range(out.size // 20):
        for j in range(20):
            kernel(1, 1, np.full(100_000, 20 * i + j, np.int32), out[20 * i + j :])
        runtime.synchronize()
    assert np.array_equal(out, np.arange(40))


def test_streams_come_and_go_while_others_wait_for_all() -> None:
    """Ranks that are threads may share a runtime; one rank closes its streams while another rank synchronizes."""
    runtime, ended = HostRuntime(), threading.Event()

    def wait_for_all() -> None:
        while not ended.is_set():
            runtime.synchronize()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_for_all) for _ in range(2)]
        try:
            for _ in range(500):
                runtime.create_stream().close()
        finally:
            ended.set()
        for done in waiting:
            done.result(WAIT)


def run_in_little_memory(mebibytes: int, work: str) -> list[str]:
    """Runs `work` in a program with `mebibytes` MiB of memory left, and returns the lines that it prints. `work` can
    call `kernel(blocks, threads, out)`, whose blocks synchronize.
    """
    program = """
        import resource
        import numpy as np
        from proxyccl.device.errors import KernelError, ResourceError
        from proxyccl.device.host import HostRuntime

        runtime, out = HostRuntime(), np.zeros(2, np.uint32)
        kernel = runtime.compile(
            'extern "C" __global__ void meet(volatile uint32_t* out) {'
            "  atomicAdd(const_cast<uint32_t*>(out), 1u);"
            "  for (uint32_t spins = 0; out[0] < gridDim.x * blockDim.x; ++spins) proxyccl::spinHint(spins);"
            "  atomicAdd(const_cast<uint32_t*>(out) + 1, 1u);"
            "}"
        )
        kernel(1, 1, out)
        runtime.synchronize()
        size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
        limits = resource.getrlimit(resource.RLIMIT_AS)
        def limit(mebibytes):
            resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + (mebibytes << 20), limits[1]))
    """
    program = textwrap.dedent(program) + f"limit({mebibytes})\n" + textwrap.dedent(work)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


NO_ROOM = "this process can start no more threads, or map no more memory"


def test_a_launch_or_a_stream_without_threads_fails_and_runs_nothing() -> None:
    work = """
        out[:] = 0
        for make in (lambda: kernel(64, 32, out), lambda: [runtime.create_stream() for _ in range(64)]):
            try:
                make()
                runtime.synchronize()
            except (KernelError, ResourceError) as error:
                print(type(error).__name__, error)
        print(*out)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        kernel(64, 32, out)
        runtime.synchronize()
        print(*out)
    """
    assert run_in_little_memory(24, work) == [
        f"KernelError stream synchronize: {NO_ROOM}",
        f"ResourceError stream create: {NO_ROOM}",
        "0 0",
        "2048 2048",
    ]


def test_no_block_runs_if_one_has_no_stacks() -> None:
    work = """
        out[:] = 0
        try:
            kernel(4, 1024, out)
            runtime.synchronize()
        except KernelError as error:
            print(error)
        print(*out)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        out[:] = 0
        kernel(4, 1024, out)
        runtime.synchronize()
        print(*out)
    """
    assert run_in_little_memory(300, work) == [f"stream synchronize: {NO_ROOM}", "0 0", "4096 4096"]


def test_a_call_without_memory_reports_it_and_queues_nothing(tmp_path: Path) -> None:
    source, library = tmp_path / "new.cpp", tmp_path / "new.so"
    source.write_text("""
        #include <cstdlib>
        #include <new>
        static thread_local int failing;
        extern "C" void fail(int on) { failing = on; }
        void* operator new(std::size_t bytes) {
          void* made = failing ? nullptr : std::malloc(bytes);
          if (made == nullptr) throw std::bad_alloc();
          return made;
        }
        void operator delete(void* made) noexcept { std::free(made); }
        void operator delete(void* made, std::size_t) noexcept { std::free(made); }
    """)
    subprocess.run([*find_compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    program = """
        import ctypes
        import numpy as np
        from proxyccl.device.errors import KernelError, ProxyCCLError
        from proxyccl.device.host import HostRuntime
        from proxyccl.device.stream_operations import StreamOperations, WriteValue

        fail = ctypes.CDLL(None).fail
        runtime, words = HostRuntime(), np.zeros(4, np.uint64)
        at = words.ctypes.data
        kernel = runtime.compile('extern "C" __global__ void add(uint64_t* word) { *word += 1; }').add
        kernel(1, 1, words)
        runtime.synchronize()
        stream, event = runtime.create_stream(), runtime.create_event()
        event.record(stream)
        stream.synchronize()
        calls = {
            "copy": lambda: runtime.copy(at, at + 8, 8, stream),
            "fill": lambda: runtime.fill(at, 1, 8, stream),
            "write": lambda: StreamOperations(runtime, [WriteValue(at, 1)])(stream),
            "launch": lambda: kernel(1, 1, words, stream=stream),
            "record": lambda: event.record(stream),
            "wait": lambda: runtime.wait_event(stream.handle, event),
            "stream": runtime.create_stream,
            "event": runtime.create_event,
            "memory": lambda: runtime.allocate(64),
        }
        for name, call in calls.items():
            fail(1)
            try:
                call()
            except ProxyCCLError as error:
                print(name)
            finally:
                fail(0)
        stream.synchronize()
        print(event.query(), *words)
        for call in calls.values():
            call()
        stream.synchronize()
        print(event.query(), *words)
    """
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    names = ["copy", "fill", "write", "launch", "record", "wait", "stream", "event", "memory"]
    assert done.stdout.splitlines() == [*names, "True 1 0 0 0", "True 2 0 0 0"]


def test_variables_beyond_the_stack_are_a_compile_error(runtime: HostRuntime) -> None:
    with pytest.raises(CompileError, match="frame size"):
        runtime.compile(
            'extern "C" __global__ void large(int* out) {\n'
            "  volatile char space[140000];\n"
            "  space[*out] = 1;\n"
            "  *out = space[0];\n"
            "}"
        )
