"""Runs every function of `proxyccl.numba` on two ranks with GPUs, then waits for a signal that never arrives."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from numba import cuda

import proxyccl.numba as pn
from proxyccl import Communicator, WaitTimeoutError
from support.kernels import numba as kernels

with Communicator() as comm:
    cuda.select_device(comm.runtime.device)
    u = comm.empty(8, "int32").upload(np.arange(8, dtype=np.int32) + 100 * comm.rank)
    out = comm.empty(3, "int32").upload(np.zeros(3, np.int32))
    channels = comm.proxy_channels(u)
    cuda.jit(kernels.everything)[1, 32](pn.address(channels), 0, 16, cuda.as_cuda_array(out))
    comm.synchronize()
    assert out.numpy().tolist() == [1, 2, 1], out.numpy()
    assert u.numpy()[4:].tolist() == [100 * (1 - comm.rank) + i for i in range(4)], u.numpy()
    assert (channels[0].counters.puts, channels[0].counters.flushes) == (3, 2), channels[0].counters

    comm.timeout = 0.5
    cuda.jit(kernels.waits)[1, 1](pn.address(channels[0]), cuda.as_cuda_array(out))
    try:
        comm.synchronize()
    except WaitTimeoutError as error:
        print(f"rank {comm.rank}: {error}")
