"""Packets: data that carries its own flag, so that no signal has to follow the message.

All ranks gather each other's numbers through putPackets and getPackets: once with 16-byte packets (two words of data
and two flags), once with 8-byte packets (one word and one flag). Every iteration has a new flag, which sender and
receiver know. A packet has arrived when it contains this flag.

Packets are stored directly into the peer's memory, so all ranks must be on one node.

    mpiexec -n 4 python -m mpi4py examples/packets.py
"""

from __future__ import annotations

import time

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

// Block b talks to peer b. In the channels' source, this rank's own memory, row r holds the data of rank r. The packet
// buffer has two halves, and its rows are twice as wide. Iterations use the halves in turn. That is safe: a rank that
// sends iteration i + 2 has received i + 1 from that peer, and the peer had read i before it sent i + 1.
template <class Packet>
__device__ void gather(DeviceHandle<SmChannel>* channels, int rank, int ranks, size_t bytes, int flag) {
  const DeviceHandle<SmChannel> channel = channels[blockIdx.x];
  const size_t half = flag % 2 * ranks * 2 * bytes;
  channel.putPackets<Packet>(/*dstOffset=*/half + rank * 2 * bytes, /*srcOffset=*/rank * bytes, bytes, threadIdx.x,
                             blockDim.x, flag);
  channel.getPackets<Packet>(/*dstOffset=*/half + channel.peer * 2 * bytes, /*srcOffset=*/channel.peer * bytes, bytes,
                             threadIdx.x, blockDim.x, flag);
}

extern "C" __global__ void gather_ll16(DeviceHandle<SmChannel>* channels, int rank, int ranks, size_t bytes, int flag) {
  gather<LL16Packet>(channels, rank, ranks, bytes, flag);
}
extern "C" __global__ void gather_ll8(DeviceHandle<SmChannel>* channels, int rank, int ranks, size_t bytes, int flag) {
  gather<LL8Packet>(channels, rank, ranks, bytes, flag);
}
"""
COUNT = 256  # numbers per rank
ITERATIONS = 100


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("packets.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        data = comm.empty((ranks, COUNT), "float32").fill(0)
        packets = comm.empty((2, ranks, 2 * COUNT), "float32").fill(0)
        channels = comm.sm_channels(packets, data)
        module = comm.compile(KERNEL)

        flag = 0  # the first flag is 1, because new memory holds 0
        for kernel in (module.gather_ll16, module.gather_ll8):
            began = time.perf_counter()
            for _ in range(ITERATIONS):
                flag += 1
                own = np.zeros((ranks, COUNT), np.float32)
                own[rank] = np.arange(COUNT) + 1000 * rank + flag
                data.upload(own)
                kernel(ranks - 1, 64, channels, rank, ranks, COUNT * 4, flag)
                comm.synchronize()
                expected = np.arange(COUNT) + 1000 * np.arange(ranks)[:, None] + flag
                assert np.array_equal(data.numpy(), expected), f"iteration with flag {flag}"
            if rank == 0:
                microseconds = (time.perf_counter() - began) / ITERATIONS * 1e6
                print(f"{kernel.name:12s} {ITERATIONS} iterations, {microseconds:.0f} us each, with upload and check")
        if rank == 0:
            print(f"OK: {ranks} ranks gathered each other's {COUNT} numbers, with the flags 1 to {flag}")


if __name__ == "__main__":
    main()
