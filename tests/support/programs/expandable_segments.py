"""Runs two ranks whose torch allocator uses expandable segments. Each rank's kernels and proxy write into the peer's
tensors.

Run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, on two processes, or on one process with --threads. Each rank
prints OK.
"""

from __future__ import annotations

import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from proxyccl import Communicator, ThreadBootstrap

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void sm_put(DeviceHandle<SmChannel>* channels, unsigned long bytes) {
  channels[0].put(0, 0, bytes, threadIdx.x, blockDim.x);
  syncThreadsSystem();
  if (threadIdx.x == 0) { channels[0].signal(); channels[0].wait(); }
}
extern "C" __global__ void proxy_put(DeviceHandle<ProxyChannel>* channels, unsigned long bytes) {
  channels[0].putWithSignalAndFlush(0, 0, bytes);
  channels[0].wait();
}
"""
SMALL, SEVERAL_BLOCKS = 1000, 50 << 20


def exchange(comm: Communicator, nbytes: int) -> None:
    """Puts whole tensors to the peer by both kinds of channel, and checks what arrives."""
    device = torch.device("cuda", comm.runtime.device)
    module = comm.compile(KERNELS)
    theirs = torch.arange(nbytes, dtype=torch.int64, device=device).to(torch.uint8) + (1 - comm.rank)
    for kernel, connect in (("sm_put", comm.sm_channels), ("proxy_put", comm.proxy_channels)):
        mine = torch.arange(nbytes, dtype=torch.int64, device=device).to(torch.uint8) + comm.rank
        got = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        channels: Any = connect(got, mine)
        module[kernel](1, 256 if kernel == "sm_put" else 1, channels, nbytes)
        comm.synchronize()
        assert torch.equal(got, theirs), kernel
        comm.all_gather_bytes(b"")  # no rank may free memory that its peer still writes


def run(bootstrap: Any = None) -> None:
    with Communicator(bootstrap) as comm, torch.cuda.device(comm.runtime.device):
        for nbytes in (SMALL, SEVERAL_BLOCKS):
            exchange(comm, nbytes)
        torch.cuda.empty_cache()  # torch unmaps blocks that the peer has mapped, and maps new blocks instead
        exchange(comm, SEVERAL_BLOCKS)
        print("OK", flush=True)


def main() -> None:
    if "--threads" not in sys.argv:
        run()
        return
    # Allocate before threads start: at its first allocation torch chooses a type of handles, which is not thread-safe.
    for device in range(2):
        torch.zeros(1, device=torch.device("cuda", device))
    with ThreadPoolExecutor(2) as pool:
        errors = [done.exception() for done in [pool.submit(run, b) for b in ThreadBootstrap.create(2)]]
    for error in filter(None, errors):  # print all errors, because the first may only be a consequence of the second
        traceback.print_exception(error)
    sys.exit(any(errors))


if __name__ == "__main__":
    main()
