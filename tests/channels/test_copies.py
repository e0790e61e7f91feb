"""The device functions of `copy.h` copy exactly the given range, whatever the alignment of both addresses."""

from __future__ import annotations

import numpy as np
import pytest

from proxyccl import Communicator
from support.device_arrays import on_device, on_host
from support.running import run_ranks

pytestmark = pytest.mark.hip

# Block 16 * d + s copies from offset s to offset d of the block's own part.
KERNEL = """
#include "proxyccl/proxyccl.h"
extern "C" __global__ void copy(char* to, const char* from, unsigned long part, unsigned long bytes, int shifted) {
  char* dst = to + blockIdx.x * part + blockIdx.x / 16;
  const char* src = from + blockIdx.x % 16;
  if (shifted) {
    proxyccl::copyShifted(dst, src, bytes, threadIdx.x, blockDim.x);
  } else {
    proxyccl::copyBytes(dst, src, bytes, threadIdx.x, blockDim.x);
  }
}
"""
PART = 1088
THREADS = 8


@pytest.mark.parametrize("shifted", [False, True], ids=["bytes", "shifted"])
def test_bytes_are_copied_whatever_the_alignment(shifted: bool) -> None:
    source = np.random.default_rng(0).integers(0, 256, PART, np.uint8)

    def body(comm: Communicator) -> None:
        kernel, given = comm.compile(KERNEL, "copy"), on_device(comm, source)
        for size in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 500, 1041):
            target = comm.empty((256, PART), "uint8").fill(0xEE)
            kernel(256, THREADS, target, given, PART, size, shifted)
            expected = np.full((256, PART), 0xEE, np.uint8)
            for block in range(256):
                expected[block, block // 16 : block // 16 + size] = source[block % 16 : block % 16 + size]
            assert np.array_equal(on_host(target), expected), size

    run_ranks(1, body)
