"""A halo exchange: heat spreads over a plate whose rows are divided among the ranks.

Each rank keeps a copy of its neighbours' adjacent rows, the halo. In every step, a rank puts its first and its last row
into the neighbours' halos, and waits for the neighbours' rows. No flush is needed in between; docs/tutorials/halo.md
says why.

    mpiexec -n 3 python -m mpi4py examples/halo_exchange.py

Any number of ranks works, even one: rows need not divide evenly, and the outermost ranks have one neighbour or none.
"""

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

// u is two plates of `room` rows of `width` cells, for even and for odd steps. A plate has a row of halo, this rank's
// `rows` rows, and a row of halo. `above` and `below` are the neighbours' places in `channels`, or -1 at the edge.
// `last` is the row in which the rank above has its lower halo.
extern "C" __global__ void spread(DeviceHandle<ProxyChannel>* channels, int above, int below, int last, float* u,
                                  int rows, int room, int width, int steps) {
  const uint64_t bytes = width * sizeof(float);
  for (int step = 0; step < steps; ++step) {
    const int now = step % 2 * room, next = room - now;  // each plate's first row
    if (threadIdx.x == 0) {
      if (above >= 0) channels[above].putWithSignal((now + last) * bytes, (now + 1) * bytes, bytes);
      if (below >= 0) channels[below].putWithSignal(now * bytes, (now + rows) * bytes, bytes);
      if (above >= 0) channels[above].wait();
      if (below >= 0) channels[below].wait();
    }
    __syncthreads();  // the halo may be read by all threads
    for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
      const int row = i / width, column = i % width;
      const float* cell = u + (now + 1 + row) * width + column;
      const float up = row > 0 || above >= 0 ? cell[-width] : *cell;
      const float down = row < rows - 1 || below >= 0 ? cell[width] : *cell;
      const float left = column > 0 ? cell[-1] : *cell, right = column < width - 1 ? cell[1] : *cell;
      u[(next + 1 + row) * width + column] = *cell + 0.125f * (up + down + left + right - 4 * *cell);
    }
    syncThreadsSystem();  // the next step's puts cover the rows that all threads wrote
  }
}
"""
HEIGHT, WIDTH, STEPS = 37, 53, 41

with Communicator() as comm:
    rank, ranks = comm.rank, comm.world_size
    shares = [len(share) for share in np.array_split(np.arange(HEIGHT), ranks)]  # rows of each rank, such as 13, 12, 12
    first, rows, room = sum(shares[:rank]), shares[rank], max(shares) + 2
    plate = np.random.default_rng(0).random((HEIGHT, WIDTH), np.float32)
    mine = np.zeros((2, room, WIDTH), np.float32)
    mine[0, 1 : rows + 1] = plate[first : first + rows]
    u = comm.empty(mine.shape, "float32").upload(mine)  # `u` has the same shape on all ranks

    channels = comm.proxy_channels(u)  # a channel to every other rank, in the order of ranks
    above = rank - 1 if rank > 0 else -1
    below = rank if rank < ranks - 1 else -1  # `channels` has no entry for this rank
    last = shares[rank - 1] + 1
    kernel = comm.compile(KERNEL, "spread")
    comm.barrier()  # no neighbour puts into u before this rank has filled it
    kernel(1, 128, channels, above, below, last, u, rows, room, WIDTH, STEPS)
    comm.synchronize()

    for _ in range(STEPS):
        around = np.pad(plate, 1, mode="edge")
        plate += np.float32(0.125) * (
            around[:-2, 1:-1] + around[2:, 1:-1] + around[1:-1, :-2] + around[1:-1, 2:] - 4 * plate
        )
    np.testing.assert_allclose(u.numpy()[STEPS % 2, 1 : rows + 1], plate[first : first + rows], atol=1e-5)
    if rank == 0:
        print(f"OK: {STEPS} steps of {HEIGHT} x {WIDTH} cells on {ranks} ranks")
