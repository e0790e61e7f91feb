"""Random operations of a kernel on a ProxyChannel (puts, gets, signals, flushes), and their expected results.

Each rank executes its own steps on two arrays that its peer does not access: one in its own memory, and one in the
peer's memory. The result must equal the result of sequential execution.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
struct Step { uint64_t kind, dst, src, size; };

extern "C" __global__ void work(DeviceHandle<ProxyChannel>* channels, const uint64_t* numbers, int count,
                                unsigned long signals, int* failures) {
  const ProxyChannelDeviceHandle& channel = channels[0];
  uint64_t ticket = channel.put(0, 0, 0);
  for (int i = 0; i < count; ++i) {
    const Step step = {numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2], numbers[4 * i + 3]};
    if (step.kind == 0) ticket = channel.put(step.dst, step.src, step.size);
    if (step.kind == 1) ticket = channel.get(step.dst, step.src, step.size);
    if (step.kind == 2) ticket = channel.putWithSignal(step.dst, step.src, step.size);
    if (step.kind == 3 && step.size == 1) ticket = channel.putValue(step.dst, static_cast<uint8_t>(step.src));
    if (step.kind == 3 && step.size == 2) ticket = channel.putValue(step.dst, static_cast<uint16_t>(step.src));
    if (step.kind == 3 && step.size == 4) ticket = channel.putValue(step.dst, static_cast<uint32_t>(step.src));
    if (step.kind == 3 && step.size == 8) ticket = channel.putValue(step.dst, step.src);
    if (step.kind == 4) channel.signal();
    if (step.kind == 5) *failures += !channel.flush();
    if (step.kind == 6) *failures += !channel.waitComplete(ticket) || !channel.isComplete(ticket);
  }
  *failures += !channel.flush() || !channel.waitUntil(signals);
}
"""
BYTES = 6000
_LONGEST = 400
_PUT, _GET, _PUT_WITH_SIGNAL, _VALUE, _SIGNAL = range(5)


def _array(seed: int, which: int) -> NDArray[np.uint8]:
    return np.random.default_rng([seed, which]).integers(0, 256, BYTES, np.uint8)


def _steps(seed: int, count: int, *, values: bool) -> Iterator[tuple[int, int, int, int]]:
    rng = random.Random(seed)
    kinds = [kind for kind in range(7) if values or kind != _VALUE]
    for _ in range(count):
        kind, size = rng.choice([*kinds, _GET]), rng.randint(0, _LONGEST)
        source = rng.randrange(BYTES - _LONGEST)
        if kind == _VALUE:
            size, source = rng.choice([1, 2, 4, 8]), rng.getrandbits(64)
        yield kind, rng.randrange(BYTES - _LONGEST), source, size


def run_random_transfers(comm: Communicator, seed: int, *, count: int = 300, values: bool = True) -> Any:
    """Runs random steps on both ranks concurrently, and checks this rank's arrays. Returns the channel.

    Args:
        comm: a communicator of two ranks, which both call this function.
        seed: seed of the steps, the same on both ranks.
        count: number of steps.
        values: whether the steps include puts of values.
    """
    peer = 1 - comm.rank
    seeds = [2 * seed + rank for rank in range(2)]
    owns = [_array(seed, 0) for seed in seeds]
    targets = [_array(seed, 1) for seed in seeds]  # targets[r]: the array that rank r writes in its peer's memory
    signals = [0, 0]
    for rank in range(2):
        for kind, dst, src, size in _steps(seeds[rank], count, values=values):
            if kind in (_PUT, _PUT_WITH_SIGNAL):
                targets[rank][dst : dst + size] = owns[rank][src : src + size]
            elif kind == _GET:
                owns[rank][dst : dst + size] = targets[rank][src : src + size]
            elif kind == _VALUE:
                targets[rank][dst : dst + size] = np.frombuffer(src.to_bytes(8, "little")[:size], np.uint8)
            signals[rank] += kind in (_PUT_WITH_SIGNAL, _SIGNAL)
    own = comm.empty(BYTES, "uint8").upload(_array(seeds[comm.rank], 0))
    target = comm.empty(BYTES, "uint8").upload(_array(seeds[peer], 1))
    steps = np.array(list(_steps(seeds[comm.rank], count, values=values)), np.uint64).reshape(-1)
    numbers = comm.empty(steps.size, "uint64").upload(steps)
    failures = comm.empty(1, "int32").fill(0)
    channels = comm.proxy_channels(target, own)
    comm.barrier()
    comm.compile(KERNEL, "work")(1, 1, channels, numbers, count, signals[peer], failures)
    comm.synchronize()
    assert failures.numpy()[0] == 0
    comm.barrier()  # after this barrier, the peer's operations are complete
    np.testing.assert_array_equal(own.numpy(), owns[comm.rank])
    np.testing.assert_array_equal(target.numpy(), targets[peer])
    assert channels[0].completed > 0
    comm.barrier()
    return channels[0]
