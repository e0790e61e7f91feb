"""custom_kernel.py in Triton: heat flows around a ring of cells that is spread over the ranks.

    mpiexec -n 4 python -m mpi4py examples/triton_diffusion.py

On the host runtime set TRITON_INTERPRET=1.
"""

import numpy as np
import triton
import triton.language as tl

import proxyccl.triton as pt
from proxyccl import Communicator


# u has a row of n + 2 cells for even steps, and another for odd steps. The first and the last cell of a row are copies
# of the neighbours' cells.
@triton.jit
def diffuse(left, right, u, n, steps, BLOCK: tl.constexpr):
    for step in range(steps):
        now = step % 2 * (n + 2)
        then = n + 2 - now
        pt.put_with_signal(left, (now + n + 1) * 4, (now + 1) * 4, 4)  # the proxy moves the cells
        pt.put_with_signal(right, now * 4, (now + n) * 4, 4)
        pt.wait(left)
        pt.wait(right)
        for start in range(1, n + 1, BLOCK):
            i = start + tl.arange(0, BLOCK)
            here = tl.load(u + now + i, i <= n)
            around = tl.load(u + now + i - 1, i <= n) - 2 * here + tl.load(u + now + i + 1, i <= n)
            tl.store(u + then + i, here + 0.25 * around, i <= n)
        pt.sync_threads_system()  # all cells are written before the next step sends two of them


N, STEPS = 1000, 20


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("triton_diffusion.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        heat = np.random.default_rng(0).random(ranks * N, np.float32)
        cells = np.zeros((2, N + 2), np.float32)
        cells[0, 1:-1] = heat[rank * N : (rank + 1) * N]
        u = comm.empty(cells.shape, "float32").upload(cells)

        channels = comm.proxy_channels(u)
        left, right = channels.to((rank - 1) % ranks), channels.to((rank + 1) % ranks)
        pt.compile(comm, diffuse, grid=1)(left, right, u, N, STEPS, BLOCK=1024)
        comm.synchronize()

        for _ in range(STEPS):
            heat += np.float32(0.25) * (np.roll(heat, 1) - 2 * heat + np.roll(heat, -1))
        assert np.allclose(u.numpy()[STEPS % 2, 1:-1], heat[rank * N : (rank + 1) * N], atol=1e-5)
        if rank == 0:
            print(f"OK: {STEPS} steps on {ranks} ranks; to the right: {right.counters}")


if __name__ == "__main__":
    main()
