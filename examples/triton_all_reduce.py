"""A one-shot all-reduce over SmChannels in Triton: every rank sends its values to all ranks, and sums all values.

Values are sent as packets, which need no signal. Calls alternate between two halves of the packet buffer, because a
rank may begin the next call while a peer still reads packets of this call. The packets' flag is the number of the call.
Each program counts calls in device memory, so that a captured graph can be replayed.

    mpiexec -n 4 python -m mpi4py examples/triton_all_reduce.py

On the host runtime set TRITON_INTERPRET=1.
"""

import numpy as np
import triton
import triton.language as tl

import proxyccl.triton as pt
from proxyccl import Communicator


@triton.jit
def one_shot(x, channels, calls, rank, ranks, n, BLOCK: tl.constexpr):
    call = tl.load(calls + tl.program_id(0)) + 1
    start = tl.program_id(0) * BLOCK
    count = tl.minimum(n - start, BLOCK)
    i = start + tl.arange(0, BLOCK)
    own = tl.load(x + i, i < n, other=0.0)
    half = call % 2 * ranks  # each half has a slot for each sender
    for peer in range(ranks - 1):
        offset = ((half + rank) * n + start) * 8
        pt.put_packets(pt.channel(channels, peer), offset, own, call, count=count)
    total = tl.zeros([BLOCK], tl.float32)
    for sender in range(ranks):  # sums in the order of ranks, so that all ranks get the same bits
        if sender == rank:
            total += own
        else:
            channel = pt.channel(channels, sender - (sender > rank).to(tl.int32))
            total += pt.get_packets(channel, ((half + sender) * n + start) * 8, call, BLOCK, tl.float32, count=count)
    tl.store(x + i, total, i < n)
    tl.store(calls + tl.program_id(0), call)


N, BLOCK, CALLS = 3000, 1024, 3


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("triton_all_reduce.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        values = [np.random.default_rng(r).random(N, np.float32) for r in range(ranks)]
        x = comm.empty(N, "float32").upload(values[rank])
        channels = comm.sm_channels(comm.empty(2 * ranks * N, "uint64").fill(0))
        programs = triton.cdiv(N, BLOCK)
        calls = comm.empty(programs, "int32").fill(0)
        kernel = pt.compile(comm, one_shot, grid=programs)
        for _ in range(CALLS):
            kernel(x, channels, calls, rank, ranks, N, BLOCK=BLOCK)
        comm.synchronize()

        expected = np.sum(values, axis=0) * ranks ** (CALLS - 1)
        assert np.allclose(x.numpy(), expected, rtol=1e-5)
        if rank == 0:
            print(f"OK: {CALLS} all-reduces of {N} values on {ranks} ranks")


if __name__ == "__main__":
    main()
