"""A custom all-to-all kernel, copied from MSCCL++'s design document with a namespace alias.

Each block exchanges data with one peer. In step i, rank r sends to rank r + i and receives from rank r - i. So each
rank sends one message and receives one message at a time.

    mpiexec -n 4 python -m mpi4py examples/all_to_all.py
"""

from __future__ import annotations

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
namespace mscclpp = proxyccl;

template <class T>
using DeviceHandle = mscclpp::DeviceHandle<T>;
__device__ mscclpp::DeviceSyncer deviceSyncer;

__device__ void localAlltoall(DeviceHandle<mscclpp::ProxyChannel>* proxyChans, int rank, int nRanksPerNode,
                              size_t nElements) {
  int remoteRank = ((int)blockIdx.x < rank) ? blockIdx.x : blockIdx.x + 1;
  for (int i = 1; i < nRanksPerNode; i++) {
    DeviceHandle<mscclpp::ProxyChannel> proxyChan = proxyChans[blockIdx.x];
    if (threadIdx.x == 0 && remoteRank % nRanksPerNode == (rank + i) % nRanksPerNode) {
      proxyChan.putWithSignalAndFlush(rank * nElements * sizeof(int), remoteRank * nElements * sizeof(int),
                                      nElements * sizeof(int));
    }
    // wait for the data from GPU (rank-i) % nRanksPerNode to arrive
    if (threadIdx.x == 0 && remoteRank % nRanksPerNode == (rank - i + nRanksPerNode) % nRanksPerNode) {
      proxyChan.wait();
    }
    deviceSyncer.sync(nRanksPerNode - 1);
  }
}

extern "C" __global__ void alltoall(DeviceHandle<mscclpp::ProxyChannel>* proxyChans, int rank, int nRanks,
                                    size_t nElements) {
  localAlltoall(proxyChans, rank, nRanks, nElements);
}
"""
COUNT = 10_000  # the number of integers that each rank sends to each other rank


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("all_to_all.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")

        def message(source: int, target: int) -> np.ndarray:
            return np.arange(COUNT, dtype=np.int32) + 1_000_000 * source + 100_000 * target

        send = comm.empty((ranks, COUNT), "int32").upload([message(rank, peer) for peer in range(ranks)])
        receive = comm.empty((ranks, COUNT), "int32").fill(-1)
        channels = comm.proxy_channels(receive, send)
        kernel = comm.compile(KERNEL, "alltoall")
        kernel(ranks - 1, 32, channels, rank, ranks, COUNT)
        comm.synchronize()

        received = receive.numpy()
        for peer in channels.peers:
            assert np.array_equal(received[peer], message(peer, rank)), f"wrong data from rank {peer}"
        assert np.all(received[rank] == -1)  # The kernel does not copy a rank's message to itself.
        # Each put was flushed, so the proxy has counted all puts.
        counters = [channel.counters for channel in channels]
        assert [c.bytes for c in counters] == [COUNT * 4] * (ranks - 1)
        if rank == 0:
            for channel, c in zip(channels, counters, strict=True):
                print(f"rank 0 to {channel.peer}: {c.triggers} trigger, {c.bytes} bytes, transport {channel.transport}")
            print(f"OK: each of {ranks} ranks has received what the others sent")


if __name__ == "__main__":
    main()
