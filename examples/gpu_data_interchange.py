"""GPU data interchange: RDMA step by step, from finding the devices to a verified transfer.

The program treats every rank as a node, so that all transfers use RDMA. A kernel fills a buffer, which the proxy writes
into the next rank's memory by RDMA. Then the kernel checks the bytes that came from the previous rank. The steps and
the printed lines are those of MORI's simple_gpu_interchange; making a communicator does steps 3 to 5.

    mpiexec -n 2 python -m mpi4py examples/gpu_data_interchange.py

If a rank has no RDMA, the program names the missing requirement and exits with status 2.
"""

from __future__ import annotations

import contextlib
import sys

from proxyccl import Bootstrap, Communicator, MpiBootstrap, RuntimeUnavailableError, rdma_devices

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

constexpr int kThreads = 128;

// Run by one block. Sends n bytes of one value, and counts the received bytes with another value.
extern "C" __global__ void interchange(DeviceHandle<ProxyChannel> next, DeviceHandle<ProxyChannel> previous,
                                       uint8_t* sent, const uint8_t* received, int n, int value, int64_t* wrong) {
  __shared__ int counts[kThreads];
  for (int i = threadIdx.x; i < n; i += kThreads) sent[i] = value;
  syncThreadsSystem();  // the bytes of all threads are written before one thread has them sent
  if (threadIdx.x == 0) {
    next.putWithSignalAndFlush(/*dstOffset=*/0, /*srcOffset=*/0, n);
    previous.wait();
  }
  __syncthreads();
  counts[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) counts[threadIdx.x] += received[i] != value;
  __syncthreads();
  if (threadIdx.x != 0) return;
  *wrong = 0;
  for (int i = 0; i < kThreads; ++i) *wrong += counts[i];
}
"""
THREADS = 128
BYTES, VALUE = 1024, 42


def main(bootstrap: Bootstrap) -> int:
    """Runs the example on one rank. Returns the exit status."""
    rank, ranks = bootstrap.rank, bootstrap.world_size
    if ranks < 2:
        raise SystemExit("gpu_data_interchange.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say("=== Simple GPU Data Interchange Example ===")
    say(f"Transferring {BYTES} bytes with value {VALUE}\n")

    say("Step 1: Initializing RDMA context...")
    devices = rdma_devices()
    say(f"  Found {len(devices)} RDMA device(s)")
    say("Step 2: Getting RDMA devices...")
    active = [port for device in devices for port in device.ports if port.state == "active"]
    say(f"  Found {len(active)} active device port(s)")

    say("Step 3: Creating device contexts...")
    try:
        comm = Communicator(bootstrap, local_world_size=1, transport="verbs")
    except RuntimeUnavailableError as error:
        if rank == 0:
            print(f"gpu_data_interchange.py: {error}", file=sys.stderr, flush=True)
        bootstrap.all_gather(b"", 30, lambda: None)  # MPI ends all ranks when the first one exits with an error
        return 2
    with comm:
        next_rank, previous_rank = (rank + 1) % ranks, (rank - 1) % ranks
        comm.group.links.prepare([next_rank, previous_rank])
        own, peer = comm.group.links.remote.queue_pairs(next_rank)
        say("  Device contexts created")
        say("Step 4: Creating RDMA endpoints...")
        say(f"  Endpoints created (QPN: send={own}, recv={peer})")
        say("Step 5: Connecting endpoints...")
        say("  Endpoints connected")

        say("Step 6: Allocating and registering GPU buffers...")
        sent, received = (comm.register(comm.empty(BYTES, "uint8").fill(0)) for _ in range(2))
        channels = comm.proxy_channels(received, sent)
        say("  Buffers allocated and registered")

        say("Step 7: Launching GPU kernel for data interchange...")
        wrong = comm.empty(1, "int64")
        kernel = comm.compile(KERNEL, "interchange")
        kernel(1, THREADS, channels.to(next_rank), channels.to(previous_rank), sent, received, BYTES, VALUE, wrong)
        comm.synchronize()
        comm.all_reduce(wrong)
        comm.synchronize()
        failures = int(wrong.numpy()[0])
        if failures:
            say(f"Failure! {failures} of {ranks * BYTES} bytes arrived with a value other than {VALUE}")
        else:
            say(f"Success! All {BYTES} bytes verified with value {VALUE}")
        say("  Kernel execution completed")

        say("Step 8: Cleaning up resources...")
        received.close()
        sent.close()
    say("  Resources cleaned up\n")
    say(f"=== Example {'failed' if failures else 'completed successfully'}! ===")
    return 1 if failures else 0


if __name__ == "__main__":
    with contextlib.closing(MpiBootstrap()) as world:
        sys.exit(main(world))
