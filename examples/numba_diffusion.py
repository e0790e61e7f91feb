"""custom_kernel.py in Numba-CUDA: heat flows around a ring of cells that is spread over the ranks. It needs GPUs.

mpiexec -n 2 python -m mpi4py examples/numba_diffusion.py
"""

import numpy as np
from numba import cuda, float32

import proxyccl.numba as pn
from proxyccl import Communicator


# u has a row of n + 2 cells for even steps, and another for odd steps. The first and the last cell of a row are copies
# of the neighbours' cells.
@cuda.jit
def diffuse(left, right, u, n, steps):
    for step in range(steps):
        now = step % 2 * (n + 2)
        then = n + 2 - now
        if cuda.threadIdx.x == 0:  # one thread pushes both triggers; then the proxy moves the cells
            pn.put_with_signal(left, (now + n + 1) * 4, (now + 1) * 4, 4)
            pn.put_with_signal(right, now * 4, (now + n) * 4, 4)
            pn.wait(left)
            pn.wait(right)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x + 1, n + 1, cuda.blockDim.x):
            around = u[now + i - 1] - float32(2) * u[now + i] + u[now + i + 1]
            u[then + i] = u[now + i] + float32(0.25) * around
        cuda.syncthreads()  # all cells are written before the next step sends two of them


N, STEPS = 1000, 200


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if comm.runtime.name != "cuda":
            raise SystemExit("numba_diffusion.py needs NVIDIA GPUs")
        if ranks < 2:
            raise SystemExit("numba_diffusion.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        cuda.select_device(comm.runtime.device)
        heat = np.random.default_rng(0).random(ranks * N, np.float32)
        cells = np.zeros((2, N + 2), np.float32)
        cells[0, 1:-1] = heat[rank * N : (rank + 1) * N]
        u = comm.empty(cells.size, "float32").upload(cells.ravel())

        channels = comm.proxy_channels(u)
        left, right = channels.to((rank - 1) % ranks), channels.to((rank + 1) % ranks)
        diffuse[1, 128](pn.address(left), pn.address(right), cuda.as_cuda_array(u), N, STEPS)
        comm.synchronize()

        for _ in range(STEPS):
            heat += np.float32(0.25) * (np.roll(heat, 1) - 2 * heat + np.roll(heat, -1))
        result = u.numpy().reshape(cells.shape)[STEPS % 2, 1:-1]
        assert np.allclose(result, heat[rank * N : (rank + 1) * N], atol=1e-5)
        if rank == 0:
            print(f"OK: {STEPS} steps on {ranks} ranks; to the right: {right.counters}")


if __name__ == "__main__":
    main()
