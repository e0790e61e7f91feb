"""all_to_all.py in Triton: each program exchanges data with one peer, over a channel that it picks from an array.

In step i, rank r sends to rank r + i and receives from rank r - i; a grid barrier ends the step.

    mpiexec -n 4 python -m mpi4py examples/triton_all_to_all.py

On the host runtime set TRITON_INTERPRET=1.
"""

import numpy as np
import triton
import triton.language as tl

import proxyccl.triton as pt
from proxyccl import Communicator


@triton.jit
def all_to_all(channels, barrier, rank, ranks, nbytes):
    number = tl.program_id(0)
    peer = number + (number >= rank).to(tl.int32)
    channel = pt.channel(channels, number)
    for i in range(1, ranks):
        if peer == (rank + i) % ranks:
            pt.put_with_signal_and_flush(channel, rank * nbytes, peer * nbytes, nbytes)
        if peer == (rank - i + ranks) % ranks:
            pt.wait(channel)
        pt.sync_grid(barrier)


COUNT = 10_000  # the number of integers that each rank sends to each other rank


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("triton_all_to_all.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")

        def message(source: int, target: int) -> np.ndarray:
            return np.arange(COUNT, dtype=np.int32) + 1_000_000 * source + 100_000 * target

        send = comm.empty((ranks, COUNT), "int32").upload([message(rank, peer) for peer in range(ranks)])
        receive = comm.empty((ranks, COUNT), "int32").fill(-1)
        channels, barrier = comm.proxy_channels(receive, send), pt.GridBarrier(comm)
        pt.compile(comm, all_to_all, grid=ranks - 1, num_warps=1)(channels, barrier, rank, ranks, COUNT * 4)
        comm.synchronize()

        received = receive.numpy()
        for peer in channels.peers:
            assert np.array_equal(received[peer], message(peer, rank)), f"wrong data from rank {peer}"
        assert np.all(received[rank] == -1)  # the kernel does not copy a rank's message to itself
        if rank == 0:
            print(f"OK: each of {ranks} ranks has received what the others sent")


if __name__ == "__main__":
    main()
