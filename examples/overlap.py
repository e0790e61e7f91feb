"""Overlap: one kernel starts a transfer and keeps computing while the proxy moves the data.

The first thread pushes a trigger, which sends a vector to the next rank. All threads then multiply two matrices, tile
by tile. Between tiles, the first thread checks whether the previous rank's vector has arrived. The kernel logs the time
of each event, and rank 0 prints its own log.

    mpiexec -n 2 python -m mpi4py examples/overlap.py
"""

from __future__ import annotations

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

constexpr int kTile = 16;
enum Event { kPushed, kFirstTile, kArrived, kLastTile, kTilesBeforeArrival };

// One tile of c = a * b, all n by n, by kTile * kTile threads.
__device__ void multiplyTile(const float* a, const float* b, float* c, int n, int tile) {
  __shared__ float left[kTile][kTile], right[kTile][kTile];
  const int y = threadIdx.x / kTile, x = threadIdx.x % kTile;
  const int row = tile / (n / kTile) * kTile + y, column = tile % (n / kTile) * kTile + x;
  float sum = 0;
  for (int k = 0; k < n; k += kTile) {
    left[y][x] = a[row * n + k + x];
    right[y][x] = b[(k + y) * n + column];
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += left[y][i] * right[i][x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

extern "C" __global__ void put_and_multiply(DeviceHandle<ProxyChannel> next, DeviceHandle<ProxyChannel> previous,
                                            size_t bytes, const float* a, const float* b, float* c, int n,
                                            uint64_t* events) {
  const bool leader = blockIdx.x == 0 && threadIdx.x == 0;
  if (leader) {
    events[kPushed] = nanoseconds();
    next.putWithSignal(/*dstOffset=*/0, /*srcOffset=*/0, bytes);
    events[kFirstTile] = nanoseconds();
  }
  bool arrived = false;
  int done = 0;
  for (int tile = blockIdx.x; tile < (n / kTile) * (n / kTile); tile += gridDim.x, ++done) {
    if (leader && !arrived && previous.poll()) {
      arrived = true;
      events[kArrived] = nanoseconds();
      events[kTilesBeforeArrival] = done;
    }
    multiplyTile(a, b, c, n, tile);
  }
  if (!leader) return;
  events[kLastTile] = nanoseconds();
  if (arrived) return;
  previous.wait();
  events[kArrived] = nanoseconds();
  events[kTilesBeforeArrival] = done;
}
"""
PUSHED, FIRST_TILE, ARRIVED, LAST_TILE, TILES_BEFORE_ARRIVAL, EVENTS = range(6)
COUNT = 1024 * 1024  # The number of floats in the sent vector.
N = 192  # The number of rows and of columns of each matrix.
TILE = 16
BLOCKS = 2


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("overlap.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        rng = np.random.default_rng(rank)
        left, right = rng.random((2, N, N), np.float32)

        send = comm.empty(COUNT, "float32").upload(np.arange(COUNT) + rank)
        receive = comm.empty(COUNT, "float32").fill(-1)
        a, b = comm.empty((N, N), "float32").upload(left), comm.empty((N, N), "float32").upload(right)
        c = comm.empty((N, N), "float32").fill(0)
        events = comm.empty(EVENTS, "int64").fill(0)
        channels = comm.proxy_channels(receive, send)
        kernel = comm.compile(KERNEL, "put_and_multiply")
        comm.barrier()  # without this barrier, the log would include the time between the ranks' starts
        kernel(BLOCKS, TILE * TILE, channels.to(after), channels.to(before), send.nbytes, a, b, c, N, events)
        comm.synchronize()

        assert np.array_equal(receive.numpy(), np.arange(COUNT, dtype=np.float32) + before)
        assert np.allclose(c.numpy(), left @ right, rtol=1e-4)
        if rank == 0:
            log = events.numpy()
            tiles = -(-((N // TILE) ** 2) // BLOCKS)
            happened = [
                (PUSHED, f"pushed a trigger: {send.nbytes} bytes from rank 0 to rank {after}"),
                (FIRST_TILE, f"began to multiply {tiles} tiles in this block"),
                (ARRIVED, f"the data of rank {before} had arrived, after {log[TILES_BEFORE_ARRIVAL]} tiles"),
                (LAST_TILE, "finished the last tile"),
            ]
            for event, text in sorted(happened, key=lambda entry: log[entry[0]]):
                print(f"{(log[event] - log[PUSHED]) / 1e3:10.1f} us  {text}")
            print(f"OK: on {ranks} ranks the data and the product are right")


if __name__ == "__main__":
    main()
