"""Makes ranks hang: kernels that wait, and a rank that waits for data that its peer never sends."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from proxyccl import Communicator, ProxyCCLError
from support.device_arrays import on_device
from support.running import impatient

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void send(DeviceHandle<ProxyChannel> channel, unsigned long bytes) {
  channel.putWithSignalAndFlush(0, 0, bytes);
}
extern "C" __global__ void wait(DeviceHandle<ProxyChannel> channel, int times) {
  for (int i = 0; i < times; ++i) channel.wait();
}
extern "C" __global__ void wait_mapped(DeviceHandle<SmChannel> channel) { channel.wait(); }
"""


def caught(action: Callable[[], object], within: float | None = None) -> ProxyCCLError | None:
    """Runs the action. Returns the library's error that the action raised, or None. Asserts that the error came within
    `within` seconds.
    """
    started = time.monotonic()
    try:
        action()
    except ProxyCCLError as error:
        assert within is None or time.monotonic() - started < within
        return error
    return None


def hang(comm: Communicator) -> ProxyCCLError | None:
    """Makes rank 1 wait for three puts from rank 0, which sends only two. Returns the time-out error."""
    data = comm.register(comm.empty(256, "uint8"))
    channels = comm.proxy_channels(data)
    kernels = comm.compile(KERNELS)
    comm.all_reduce(on_device(comm, np.ones(7, np.float32)))
    impatient(comm)
    if comm.rank == 0:
        for _ in range(2):
            kernels.send(1, 1, channels.to(1), 64)
        return caught(comm.synchronize) or caught(lambda: comm.barrier() or comm.synchronize())
    kernels.wait(1, 1, channels.to(0), 3)
    return caught(comm.synchronize)
