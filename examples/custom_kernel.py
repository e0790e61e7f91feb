"""A custom kernel: heat flows around a ring of cells that is spread over the ranks.

In every step, a rank sends its outermost cells to its neighbours and computes the next temperatures.

    mpiexec -n 4 python -m mpi4py examples/custom_kernel.py
"""

import numpy as np

from proxyccl import Communicator

KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

// u has one row of n + 2 cells for even steps and one for odd steps. The first and the last cell of a row are copies of
// the neighbours' cells.
extern "C" __global__ void diffuse(DeviceHandle<ProxyChannel> left, DeviceHandle<ProxyChannel> right, float* u, int n,
                                   int steps) {
  for (int step = 0; step < steps; ++step) {
    const int now = step % 2 * (n + 2), next = n + 2 - now;
    if (threadIdx.x == 0) {  // one thread pushes two triggers; the proxy moves the cells
      left.putWithSignal(/*dstOffset=*/(now + n + 1) * 4, /*srcOffset=*/(now + 1) * 4, /*size=*/4);
      right.putWithSignal(/*dstOffset=*/now * 4, /*srcOffset=*/(now + n) * 4, /*size=*/4);
      left.wait();
      right.wait();
    }
    __syncthreads();
    for (int i = threadIdx.x + 1; i <= n; i += blockDim.x)
      u[next + i] = u[now + i] + 0.25f * (u[now + i - 1] - 2 * u[now + i] + u[now + i + 1]);
    syncThreadsSystem();  // all cells are written before the next step sends two of them
  }
}
"""
N, STEPS = 1000, 200

with Communicator() as comm:
    rank, ranks = comm.rank, comm.world_size
    if ranks < 2:
        raise SystemExit("custom_kernel.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
    heat = np.random.default_rng(0).random(ranks * N, np.float32)
    cells = np.zeros((2, N + 2), np.float32)
    cells[0, 1:-1] = heat[rank * N : (rank + 1) * N]
    u = comm.empty(cells.shape, "float32").upload(cells)

    channels = comm.proxy_channels(u)
    left, right = channels.to((rank - 1) % ranks), channels.to((rank + 1) % ranks)
    comm.compile(KERNEL, "diffuse")(1, 128, left, right, u, N, STEPS)
    comm.synchronize()

    for _ in range(STEPS):
        heat += np.float32(0.25) * (np.roll(heat, 1) - 2 * heat + np.roll(heat, -1))
    assert np.allclose(u.numpy()[STEPS % 2, 1:-1], heat[rank * N : (rank + 1) * N], atol=1e-5)
    if rank == 0:
        print(f"OK: {STEPS} steps on {ranks} ranks; to the right: {right.counters}")
