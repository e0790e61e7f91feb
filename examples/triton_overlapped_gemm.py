"""Matrix products that overlap with communication, in Triton: the proxy moves data while the kernel multiplies.

- GEMM + all-reduce: each rank has a share of the inner dimension, and C is the sum of the ranks' products. Rank r owns
  the r-th share of C's rows. A rank first computes the rows that other ranks own, and sends them as soon as they are
  complete.
- All-gather + GEMM: each rank has a share of A's rows, and needs all rows of A * B. A kernel sends its own rank's rows
  and multiplies them at the same time, and then multiplies the other ranks' rows as these arrive.

    mpiexec -n 2 python -m mpi4py examples/triton_overlapped_gemm.py

On the host runtime set TRITON_INTERPRET=1.
"""

import numpy as np
import triton
import triton.language as tl

import proxyccl.triton as pt
from proxyccl import Communicator


@triton.jit
def multiply_tile(a, b, c, row, column, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Computes one tile of c = a * b. The matrices are stored row by row: a has K columns, b and c have N columns."""
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


@triton.jit
def gemm_all_reduce(
    a, b, memory, done, channels, barrier, rank, ranks, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """`memory` holds this rank's products [M, N], the partial products that other ranks send [ranks, M / ranks, N], and
    the sum [M, N].

    `done` counts the complete tiles of each share, and must start at 0.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = M // ranks  # rows
    elements = share * N
    inbox = memory + M * N
    out = inbox + M * N
    tiles = share // BM * (N // BN)
    for tile in range(program, tiles * ranks, programs):
        owner = (rank + 1 + tile // tiles) % ranks  # own rows last
        within = tile % tiles
        row = owner * share + within // (N // BN) * BM
        multiply_tile(a, b, memory, row, within % (N // BN) * BN, N, K, BM, BN, BK)
        pt.sync_threads_system()
        if tl.atomic_add(done + owner, 1, sem="acq_rel", scope="gpu") == tiles - 1:  # This program completed the share.
            tl.store(done + owner, 0)  # Resets the count for the next launch.
            if owner != rank:
                channel = pt.channel(channels, owner - (owner > rank).to(tl.int32))
                pt.put_with_signal(channel, (M * N + rank * elements) * 2, owner * elements * 2, elements * 2)
    if program == 0:
        for i in range(ranks - 1):
            pt.wait(pt.channel(channels, i))
    pt.sync_grid(barrier)
    BLOCK: tl.constexpr = BM * BN
    for start in range(program * BLOCK, elements, programs * BLOCK):
        i = start + tl.arange(0, BLOCK)
        total = tl.load(memory + rank * elements + i, i < elements, other=0.0).to(tl.float32)
        for sender in range(ranks):
            if sender != rank:
                total += tl.load(inbox + sender * elements + i, i < elements, other=0.0).to(tl.float32)
        tl.store(out + rank * elements + i, total.to(tl.float16), i < elements)
    pt.sync_grid(barrier)
    if program == 0:
        mine = (2 * M * N + rank * elements) * 2
        for i in range(ranks - 1):
            pt.put_with_signal(pt.channel(channels, i), mine, mine, elements * 2)
        for i in range(ranks - 1):
            pt.wait(pt.channel(channels, i))
            pt.flush(pt.channel(channels, i))  # after the flush, the next launch may overwrite the products


@triton.jit
def all_gather_gemm(
    a, b, c, channels, barrier, rank, ranks, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """`a` is [M, K]. This rank's share of the rows of `a` is filled before the launch; the kernel receives the other
    shares.

    All ranks must synchronize before the next launch sends new rows, because a rank may still multiply the old rows.
    """
    program = tl.program_id(0)
    share = M // ranks
    mine = rank * share * K * 2
    if program == 0:
        for i in range(ranks - 1):
            pt.put_with_signal(pt.channel(channels, i), mine, mine, share * K * 2)
    tiles = share // BM * (N // BN)
    for step in range(ranks):
        owner = (rank + step) % ranks
        if step > 0:
            if program == 0:
                pt.wait(pt.channel(channels, owner - (owner > rank).to(tl.int32)))
            pt.sync_grid(barrier)
        for tile in range(program, tiles, tl.num_programs(0)):
            row = owner * share + tile // (N // BN) * BM
            multiply_tile(a, b, c, row, tile % (N // BN) * BN, N, K, BM, BN, BK)
    if program == 0:
        for i in range(ranks - 1):
            pt.flush(pt.channel(channels, i))  # after the flush, this rank's rows of `a` may be overwritten


TILES = {"BM": 16, "BN": 16, "BK": 16}
PROGRAMS = 2


def main() -> None:
    with Communicator() as comm:
        rank, ranks = comm.rank, comm.world_size
        if ranks < 2:
            raise SystemExit("triton_overlapped_gemm.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        rng = np.random.default_rng(0)
        barrier = pt.GridBarrier(comm)

        m, n, k = 16 * ranks, 32, 32
        lefts, rights = rng.random((ranks, m, k)).astype(np.float16), rng.random((ranks, k, n)).astype(np.float16)
        a, b = (comm.empty(x.shape, "float16").upload(x) for x in (lefts[rank], rights[rank]))
        memory, done = comm.empty((3, m, n), "float16"), comm.empty(ranks, "int32").fill(0)
        channels = comm.proxy_channels(memory)
        kernel = pt.compile(comm, gemm_all_reduce, grid=PROGRAMS)
        kernel(a, b, memory, done, channels, barrier, rank, ranks, m, n, k, **TILES)
        comm.synchronize()
        expected = sum(left.astype(np.float32) @ right for left, right in zip(lefts, rights, strict=True))
        assert np.allclose(memory.numpy()[2], expected, rtol=1e-2)

        rows = rng.random((m, k)).astype(np.float16)
        own = np.zeros_like(rows)
        own[rank * m // ranks : (rank + 1) * m // ranks] = rows[rank * m // ranks : (rank + 1) * m // ranks]
        a, c = comm.empty((m, k), "float16").upload(own), comm.empty((m, n), "float16")
        channels = comm.proxy_channels(a)
        pt.compile(comm, all_gather_gemm, grid=PROGRAMS)(a, b, c, channels, barrier, rank, ranks, m, n, k, **TILES)
        comm.synchronize()
        assert np.allclose(c.numpy(), rows.astype(np.float32) @ rights[rank], rtol=1e-2)
        if rank == 0:
            print(f"OK: on {ranks} ranks both products are right; to rank 1: {channels[0].counters}")


if __name__ == "__main__":
    main()
