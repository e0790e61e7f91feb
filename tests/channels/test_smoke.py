"""The shortest proof that a build works: one trigger, one copy, one signal, and every all-reduce algorithm."""

from __future__ import annotations

import numpy as np
import pytest

from proxyccl import Communicator
from support.device_arrays import on_device, on_host
from support.running import run_ranks

pytestmark = pytest.mark.hip

PUT_WITH_SIGNAL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void exchange(DeviceHandle<ProxyChannel>* channels, int bytes) {
  if (threadIdx.x != 0) return;
  // The flush makes this rank's counters final: the peer's signal only shows that the peer's trigger is done.
  channels[0].putWithSignalAndFlush(/*dstOffset=*/bytes, /*srcOffset=*/0, bytes);
  channels[0].wait();
}
"""


def test_a_kernel_moves_data_through_the_proxy() -> None:
    def body(comm: Communicator) -> None:
        buffer = comm.empty(2 * 256, "int32").fill(0)
        values = np.zeros(512, np.int32)
        values[:256] = np.arange(256) + 1000 * comm.rank
        buffer.upload(values)
        channels = comm.proxy_channels(buffer)
        kernel = comm.compile(PUT_WITH_SIGNAL, "exchange")
        kernel(1, 32, channels, 1024)
        comm.synchronize()
        assert np.array_equal(buffer.numpy()[256:], np.arange(256) + 1000 * (1 - comm.rank))
        assert channels[0].counters.triggers == 1
        assert channels[0].counters.bytes == 1024

    run_ranks(2, body)


@pytest.mark.parametrize(
    "algorithm", ["one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy"]
)
def test_all_reduce_sums(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(comm, np.arange(1001, dtype=np.float32) + comm.rank)
        comm.all_reduce(x, algorithm=algorithm)
        assert np.array_equal(on_host(x), 3 * np.arange(1001, dtype=np.float32) + 3)

    run_ranks(3, body)
