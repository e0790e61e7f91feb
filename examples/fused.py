"""Fusion of computation and communication: a matrix product whose tiles travel as soon as they are ready.

The product A @ B is split along its inner dimension, as in a tensor-parallel layer. Each rank has some columns of A and
the matching rows of B, and computes a partial product. Rank r receives the r-th strip of rows of all partial products
and sums them. All of this is one kernel. Block p computes the tiles of rank p's strip and puts each tile through the
proxy. At the same time, the block for this rank's own strip adds up the tiles that arrive.

    mpiexec -n 2 python -m mpi4py examples/fused.py
"""

from __future__ import annotations

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

// a: [ranks * rows, depth], b: [depth, columns], out: [rows, columns]. partial: [ranks, rows, columns], the summands
// that this rank computes, by owner. inbox: the same shape, the summands that it gets, by source. Grid: one block for
// each rank.
extern "C" __global__ void matmul_reduce_scatter(DeviceHandle<ProxyChannel>* channels, const float* a, const float* b,
                                                 float* partial, const float* inbox, float* out, int rank, int rows,
                                                 int depth, int columns, int tileRows) {
  const int ranks = gridDim.x, owner = blockIdx.x;
  const size_t strip = static_cast<size_t>(rows) * columns, tile = static_cast<size_t>(tileRows) * columns;

  for (size_t first = 0; first < strip; first += tile) {
    const float* left = a + (owner * strip + first) / columns * depth;
    float* result = partial + owner * strip + first;
    forEach(tile, threadIdx.x, blockDim.x, [&](size_t i) {
      float sum = 0;
      for (int k = 0; k < depth; ++k) sum += left[i / columns * depth + k] * b[k * columns + i % columns];
      result[i] = sum;
    });
    syncThreadsSystem();  // the whole tile is written before one thread has it sent

    if (owner != rank) {
      if (threadIdx.x == 0)
        channels[owner < rank ? owner : owner - 1].putWithSignal(
            /*dstOffset=*/(rank * strip + first) * sizeof(float),
            /*srcOffset=*/(owner * strip + first) * sizeof(float), tile * sizeof(float));
      continue;
    }
    // A peer's tiles arrive in the order of its pushes, so its n-th signal is that of its n-th tile.
    if (threadIdx.x == 0)
      for (int channel = 0; channel < ranks - 1; ++channel) channels[channel].wait();
    __syncthreads();
    forEach(tile, threadIdx.x, blockDim.x, [&](size_t i) {
      float sum = 0;
      for (int source = 0; source < ranks; ++source)
        sum += source == rank ? result[i] : inbox[source * strip + first + i];
      out[first + i] = sum;
    });
  }
}
"""
ROWS, TILE_ROWS, DEPTH, COLUMNS = 64, 16, 64, 96


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("fused.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        rng = np.random.default_rng(0)  # every rank makes the whole matrices for the check, but uses its part
        whole_a = rng.random((ranks * ROWS, ranks * DEPTH), np.float32)
        whole_b = rng.random((ranks * DEPTH, COLUMNS), np.float32)
        part = slice(rank * DEPTH, (rank + 1) * DEPTH)
        a = comm.empty((ranks * ROWS, DEPTH), "float32").upload(whole_a[:, part])
        b = comm.empty((DEPTH, COLUMNS), "float32").upload(whole_b[part])
        partial, inbox = (comm.empty((ranks, ROWS, COLUMNS), "float32").fill(0) for _ in range(2))
        out = comm.empty((ROWS, COLUMNS), "float32").fill(0)

        channels = comm.proxy_channels(inbox, partial)
        kernel = comm.compile(KERNEL, "matmul_reduce_scatter")
        kernel(ranks, 128, channels, a, b, partial, inbox, out, rank, ROWS, DEPTH, COLUMNS, TILE_ROWS)
        comm.synchronize()

        expected = (whole_a @ whole_b)[rank * ROWS : (rank + 1) * ROWS]
        assert np.allclose(out.numpy(), expected, rtol=1e-4), "the product is wrong"
        if rank == 0:
            tiles, nbytes = ROWS // TILE_ROWS, TILE_ROWS * COLUMNS * 4
            print(f"each rank sent {tiles} tiles of {nbytes} bytes to each other rank, with one trigger for each tile")
            print(f"OK: the {ranks * ROWS} x {COLUMNS} product is right; each rank has a strip of {ROWS} rows")


if __name__ == "__main__":
    main()
