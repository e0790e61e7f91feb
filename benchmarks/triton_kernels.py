"""Kernels in Triton compared with C++ and NCCL: mpiexec -n 2 python -m mpi4py triton_kernels.py

- put + signal: half of a ping-pong's round trip. On each rank, the kernel is one Triton program, or one thread in C++.
- diffusion: a step of `examples/triton_diffusion.py`, compared with `examples/custom_kernel.py`.
- all_reduce: 64 KiB by `examples/triton_all_reduce.py`, compared with our C++ kernel ``algorithm="one_shot"``.
- all_to_all: 64 KiB to each peer by `examples/triton_all_to_all.py`, compared with `examples/all_to_all.py`.
- GEMM + all_reduce, all_gather + GEMM: `examples/triton_overlapped_gemm.py` in float16, compared with ``torch.matmul``
  followed or preceded by NCCL's call. The matrix products are also measured alone, by cuBLAS and by the same Triton
  tiles, to show the gain by overlap and the loss against cuBLAS.

side_by_side.py describes how results are checked, and gpu_job.py how times are measured. On the host runtime, kernels
run in Triton's interpreter, whose times are unrelated to a GPU's times.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if os.environ.get("PROXYCCL_RUNTIME") == "host":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads this variable at its import

import numpy as np
import triton
import triton.language as tl
from jobs import open_job
from program import common_arguments
from side_by_side import Contender, Job, absent, differing, fresh_seed

import proxyccl.triton as pt
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from triton_all_reduce import one_shot
from triton_all_to_all import all_to_all
from triton_diffusion import diffuse
from triton_overlapped_gemm import all_gather_gemm, gemm_all_reduce, multiply_tile

EXAMPLES = Path(__file__).parent.parent / "examples"
_SECONDS = 60  # seconds after which no section begins; a program that hangs is killed after three minutes
_CPP, _TRITON = "C++", "Triton"
_OVERLAPPED = "Triton, overlapped"
_AIMS = {"put + signal": 1.05, "all_reduce": 1.15}
"""The most that Triton's kernel may take, as a multiple of the first contender's time."""
_NO_PEER = "it needs GPUs"
_CELLS = 1000
_GEMM_ERROR = 5e-3
"""Tolerance relative to the largest element, for sums of products in float16."""
_PING_PONG = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void ping_pong(DeviceHandle<ProxyChannel> channel, uint64_t bytes, int first, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    if (first) channel.putWithSignal(bytes, 0, bytes);
    if (!channel.wait()) return;
    if (!first) channel.putWithSignal(bytes, 0, bytes);
  }
}
"""
COLUMNS = (
    Column("what", "", 22, left=True),
    Column("contender", "", 22, left=True),
    Column("time", "(µs)", 9, ".2f"),
    Column("best", "(µs)", 9, ".2f"),
    Column("ratio", "to first", 8, ".3f"),
    Column("aim", "at most", 8, ".2f"),
    Column("#wrong", "", 6, "d"),
)


@triton.jit
def ping_pong(channel, nbytes, first, rounds):
    for _ in range(rounds):
        if first:
            pt.put_with_signal(channel, nbytes, 0, nbytes)
        pt.wait(channel)
        if first == 0:
            pt.put_with_signal(channel, nbytes, 0, nbytes)


@triton.jit
def multiply(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    for tile in range(tl.program_id(0), M // BM * (N // BN), tl.num_programs(0)):
        multiply_tile(a, b, c, tile // (N // BN) * BM, tile % (N // BN) * BN, N, K, BM, BN, BK)


class Report:
    """Prints the table row by row, and collects the rows that are written as JSON.

    Args:
        job: the ranks.
        repeats: timed bursts of each contender.
    """

    def __init__(self, job: Job, repeats: int) -> None:
        self._job, self._repeats = job, repeats
        self._table = Table(COLUMNS)
        self.rows: list[Fields] = []
        if job.first:
            self._table.header()

    def measure(self, what: str, contenders: Sequence[Contender], units: int = 1) -> None:
        """Checks and times contenders. Prints the time per unit of work; one call does `units` units."""
        timings = self._job.measure(contenders, self._repeats)
        reference = next((timing.time_us for timing in timings if timing.time_us), None)
        for timing in timings:
            time, best = (us / units if us else None for us in (timing.time_us, timing.best_us))
            ratio = timing.time_us / reference if timing.time_us and reference else None
            aim = _AIMS.get(what.split(",", maxsplit=1)[0]) if timing.name == _TRITON else None
            row = {"what": what, "name": timing.name, "time_us": time, "best_us": best, "ratio": ratio, "aim": aim}
            self.rows.append({**row, "wrong": timing.wrong, "ours": timing.ours, "reason": timing.reason})
            if self._job.first:
                self._table.row(*row.values(), timing.wrong)
                if timing.reason:
                    self._job.say_once(f"#   {timing.name}: {timing.reason}")


def together(job: Job, write: Callable[[], object]) -> Callable[[], None]:
    """Returns a refill function that calls a barrier before and after the refill, so that no rank refills while a
    peer's kernel puts.
    """

    def refill() -> None:
        for step in (lambda: None, write):
            step()
            job.synchronize()
            job.world.Barrier()

    return refill


def on_gpus(job: Job) -> bool:
    return job.comm.runtime.name != "host"


def on_cpu(x: Any) -> np.ndarray:
    """Returns a copy of an array in the host's memory."""
    return np.array(x.cpu() if hasattr(x, "cpu") else x)


def kernel_of(example: str) -> str:
    """Returns the C++ source of an example's kernel, without running the example."""
    for node in ast.parse((EXAMPLES / example).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNEL":
            return str(ast.literal_eval(node.value))
    raise ValueError(f"{example} has no KERNEL")


def measure_put_signal(job: Job, report: Report, rounds: int) -> None:
    """Measures a ping-pong of 1 KiB."""
    comm, nbytes, first = job.comm, 1024, int(job.rank == 0)
    seed = fresh_seed(job)
    given = [job.random(nbytes // 4, "float32", seed + rank) for rank in range(job.ranks)]
    memory = job.registered(nbytes // 2, "float32")
    target = memory[nbytes // 4 :]
    memory[: nbytes // 4] = given[job.rank]
    (channel,) = comm.proxy_channels(memory)
    cpp, ours = comm.compile(_PING_PONG, "ping_pong"), pt.compile(comm, ping_pong, grid=1, num_warps=1)
    model = Contender(
        _CPP,
        True,
        lambda: cpp(1, 1, channel, nbytes, first, rounds, stream=job.handle),
        together(job, lambda: job.poison(target)),
        lambda _: differing(target, given[1 - job.rank]),
    )
    triton_s = replace(model, name=_TRITON, call=lambda: ours(channel, nbytes, first, rounds, stream=job.handle))
    report.measure("put + signal, 1 KiB", [model, triton_s], 2 * rounds)


def measure_diffusion(job: Job, report: Report, steps: int) -> None:
    """Measures diffusion. The number of steps is even, so that the result is in the array of the start values."""
    comm, rank, ranks, n, seed = job.comm, job.rank, job.ranks, _CELLS, fresh_seed(job)
    starts = [job.random(n, "float32", seed + each) for each in range(ranks)]
    heat = np.concatenate([on_cpu(start) for start in starts]).astype(np.float64)
    for _ in range(steps):
        heat += 0.25 * (np.roll(heat, 1) - 2 * heat + np.roll(heat, -1))
    expected = heat[rank * n : (rank + 1) * n]
    u = job.registered(2 * (n + 2), "float32")
    channels = comm.proxy_channels(u)
    left, right = channels.to((rank - 1) % ranks), channels.to((rank + 1) % ranks)
    cpp, ours = comm.compile(kernel_of("custom_kernel.py"), "diffuse"), pt.compile(comm, diffuse, grid=1)
    results: list[np.ndarray] = []

    def start_again() -> None:
        job.poison(u)
        u[1 : n + 1] = starts[rank]

    def wrong(calls: int) -> int:
        found = on_cpu(u[1 : n + 1])
        if calls > 1:  # each later call starts from the result of the previous call
            return 0
        results.append(found)
        return int((~(np.abs(found - expected) <= 1e-4)).sum())

    model = Contender(
        _CPP,
        True,
        lambda: cpp(1, 128, left, right, u, n, steps, stream=job.handle),
        together(job, start_again),
        wrong,
    )
    triton_s = replace(model, name=_TRITON, call=lambda: ours(left, right, u, n, steps, BLOCK=1024, stream=job.handle))
    report.measure("diffusion, a step", [model, triton_s], steps)
    same = all(job.world.allgather(all(np.array_equal(result, results[0]) for result in results)))
    job.say_once(f"#   the diffusion's results of C++ and Triton have {'the same' if same else 'different'} bits")


def measure_all_reduce(job: Job, report: Report) -> None:
    """Measures all_reduce in place. After n calls the elements are the sum times world_size ** (n - 1), which is exact
    if world_size is a power of two.
    """
    comm, ranks, seed = job.comm, job.ranks, fresh_seed(job)
    n, block, warps = (16 * 1024, 256, 8) if on_gpus(job) else (2 * 1024, 1024, 4)
    given = [job.random(n, "float32", seed + rank) for rank in range(ranks)]
    x, programs = job.empty(n, "float32"), n // block
    calls = comm.empty(programs, "int32").fill(0)
    channels = comm.sm_channels(comm.empty(2 * ranks * n, "uint64").fill(0))
    ours = pt.compile(comm, one_shot, grid=programs, num_warps=warps)

    def fill() -> None:
        x[:] = given[job.rank]

    model = Contender(
        _CPP,
        True,
        lambda: comm.all_reduce(x, algorithm="one_shot", stream=job.handle),
        together(job, fill),
        lambda calls: differing(x, sum(given) * float(ranks ** (calls - 1))),
    )

    def by_triton() -> None:
        ours(x, channels, calls, job.rank, ranks, n, BLOCK=block, stream=job.handle)

    nccl = absent("NCCL", _NO_PEER)
    if on_gpus(job):
        import torch.distributed as dist

        nccl = replace(model, name=nccl.name, ours=False, call=lambda: dist.all_reduce(x))
    report.measure(f"all_reduce, {n // 256} KiB", [model, replace(model, name=_TRITON, call=by_triton), nccl])


def measure_all_to_all(job: Job, report: Report) -> None:
    """Measures an all_to_all of 64 KiB from each rank to each other rank. The part that a rank sends to itself is not
    copied.
    """
    comm, rank, ranks, count, seed = job.comm, job.rank, job.ranks, 16 * 1024, fresh_seed(job)
    given = [job.random(ranks * count, "float32", seed + each) for each in range(ranks)]
    send, receive = (job.registered(ranks * count, "float32") for _ in range(2))
    send[:] = given[rank]
    part = [slice(each * count, (each + 1) * count) for each in range(ranks)]
    channels, barrier = comm.proxy_channels(receive, send), pt.GridBarrier(comm)
    cpp, ours = (
        comm.compile(kernel_of("all_to_all.py"), "alltoall"),
        pt.compile(comm, all_to_all, grid=ranks - 1, num_warps=1),
    )
    model = Contender(
        _CPP,
        True,
        lambda: cpp(ranks - 1, 32, channels, rank, ranks, count, stream=job.handle),
        together(job, lambda: job.poison(receive)),
        lambda _: sum(differing(receive[part[peer]], given[peer][part[rank]]) for peer in channels.peers),
    )
    triton_s = replace(
        model, name=_TRITON, call=lambda: ours(channels, barrier, rank, ranks, count * 4, stream=job.handle)
    )
    report.measure("all_to_all, 64 KiB", [model, triton_s])


class Products:
    """The common part of both overlapped matrix products: tiles, grid, random matrices, and the check.

    Args:
        job: the ranks.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.on_gpus = job, on_gpus(job)
        self.programs = job.comm.runtime.info.multiprocessors if self.on_gpus else 2
        tiles = [(128, 128, 64), (128, 256, 64)] if self.on_gpus else [(16, 16, 16)]
        self._configs = [
            triton.Config(dict(zip(("BM", "BN", "BK"), tile, strict=True)), num_warps=8, num_stages=3) for tile in tiles
        ]
        self.barrier = pt.GridBarrier(job.comm)

    def kernel(self, function: Any) -> Any:
        """Returns a kernel whose tiles are chosen by measuring."""
        return pt.compile(self.job.comm, function, grid=self.programs, configs=self._configs)

    def matrix(self, rows: int, columns: int, seed: int) -> Any:
        """Returns a random matrix in float16. The elements use all mantissa bits, because with whole numbers the GPU
        would take less power.
        """
        return self.job.random(rows * columns, "float16", seed).reshape(rows, columns) * 0.037

    def product(self, a: Any, b: Any) -> Any:
        """Returns the product, computed in float32."""
        return a.float() @ b.float() if self.on_gpus else a.astype(np.float32) @ b.astype(np.float32)

    def wrong(self, found: Any, expected: Any) -> int:
        """Returns the number of elements of two matrices that differ by more than rounding."""
        difference = abs(found - expected)
        return int((~(difference <= _GEMM_ERROR * abs(expected).max())).sum())

    def alone(self, a: Any, b: Any, out: Any) -> list[Contender]:
        """Returns contenders for the matrix product alone, by cuBLAS and by Triton."""
        (m, k), n = a.shape, b.shape[1]
        kernel, expected = self.kernel(multiply), self.product(a, b)
        ours = Contender(
            "Triton, product alone",
            True,
            lambda: kernel(a, b, out, m, n, k, stream=self.job.handle),
            lambda: self.job.poison(out),
            lambda _: self.wrong(out, expected),
        )
        if not self.on_gpus:
            return [ours]
        import torch

        return [replace(ours, name="matmul alone", ours=False, call=lambda: torch.matmul(a, b, out=out)), ours]


def measure_gemm_all_reduce(products: Products, report: Report, size: int) -> None:
    """Measures a matrix product with an all_reduce, the sum over ranks of [size, size / ranks] * [size / ranks,
    size].
    """
    job, m, n, k = products.job, size, size, size // products.job.ranks
    comm, rank, ranks, seed = job.comm, job.rank, job.ranks, fresh_seed(job)
    pairs = [(products.matrix(m, k, seed + 2 * r), products.matrix(k, n, seed + 2 * r + 1)) for r in range(ranks)]
    a, b = pairs[rank]
    expected = sum(products.product(*pair) for pair in pairs)
    memory, done = job.registered(3 * m * n, "float16"), comm.empty(ranks, "int32").fill(0)
    own, _, total = memory.reshape(3, m, n)
    channels, barrier = comm.proxy_channels(memory), products.barrier
    kernel = products.kernel(gemm_all_reduce)
    ours = Contender(
        _OVERLAPPED,
        True,
        lambda: kernel(a, b, memory, done, channels, barrier, rank, ranks, m, n, k, stream=job.handle),
        together(job, lambda: job.poison(memory)),
        lambda _: products.wrong(total, expected),
    )
    first = absent("matmul, then NCCL", _NO_PEER)
    if products.on_gpus:
        import torch
        import torch.distributed as dist

        out = torch.empty_like(own)

        def one_after_the_other() -> None:
            torch.matmul(a, b, out=out)
            dist.all_reduce(out)

        first = Contender(
            first.name,
            False,
            one_after_the_other,
            lambda: job.poison(out),
            lambda _: products.wrong(out, expected),
        )
    report.measure(f"GEMM+all_reduce, {size}", [first, ours, *products.alone(a, b, own)])
    tell_configurations(job, kernel)


def measure_all_gather_gemm(products: Products, report: Report, size: int) -> None:
    """Measures an all_gather with a matrix product, [size, size] * [size, size / ranks]. Each rank has a share of the
    first matrix's rows.
    """
    job, m, n, k = products.job, size, size // products.job.ranks, size
    comm, rank, ranks, seed = job.comm, job.rank, job.ranks, fresh_seed(job)
    rows, weights = products.matrix(m, k, seed), products.matrix(k, n, seed + 1 + rank)
    share = m // ranks
    mine = slice(rank * share, (rank + 1) * share)
    expected = products.product(rows, weights)
    a = job.registered(m * k, "float16").reshape(m, k)
    out = job.empty(m * n, "float16").reshape(m, n)
    channels, barrier = comm.proxy_channels(a), products.barrier
    kernel = products.kernel(all_gather_gemm)

    def keep_own_rows() -> None:
        job.poison(a)
        job.poison(out)
        a[mine] = rows[mine]

    ours = Contender(
        _OVERLAPPED,
        True,
        lambda: kernel(a, weights, out, channels, barrier, rank, ranks, m, n, k, stream=job.handle),
        together(job, keep_own_rows),
        lambda _: products.wrong(out, expected),
    )
    first = absent("NCCL, then matmul", _NO_PEER)
    if products.on_gpus:
        import torch
        import torch.distributed as dist

        gathered, own = torch.empty_like(rows), rows[mine].clone()

        def gather_first() -> None:
            dist.all_gather_into_tensor(gathered, own)
            torch.matmul(gathered, weights, out=out)

        def poison() -> None:
            job.poison(gathered)
            job.poison(out)

        first = replace(ours, name=first.name, ours=False, call=gather_first, refill=poison)
    report.measure(f"all_gather+GEMM, {size}", [first, ours, *products.alone(rows, weights, out)])
    tell_configurations(job, kernel)


def tell_configurations(job: Job, kernel: Any) -> None:
    """Prints the tiles that were chosen for a kernel."""
    for config in kernel.chosen.values():
        job.say_once(f"#   {kernel.name}: {config.kwargs}, {config.num_warps} warps, {config.num_stages} stages")


def arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(seconds=_SECONDS)
    return parser.parse_args()


def main() -> int:
    """Measures everything. Returns the exit code: 1 if a result was wrong."""
    options = arguments()
    with open_job(options.seconds) as job:
        if job.ranks != 2:
            raise SystemExit("triton_kernels.py needs 2 ranks: mpiexec -n 2 python -m mpi4py ...")
        job.heading("kernels in Triton", f"Triton {triton.__version__}; {job.timing}")
        report = Report(job, (5 if options.quick else 15) if on_gpus(job) else 1)
        rounds = 200 if on_gpus(job) else 2  # fewer rounds in the interpreter, where a round takes milliseconds
        measure_put_signal(job, report, rounds)
        measure_diffusion(job, report, rounds)
        measure_all_reduce(job, report)
        measure_all_to_all(job, report)
        products, skipped = Products(job), []
        for size in (4096, 8192) if on_gpus(job) else (32,):
            for measure in (measure_gemm_all_reduce, measure_all_gather_gemm):
                if job.in_time():
                    measure(products, report, size)
                else:
                    skipped.append(f"{measure.__name__.removeprefix('measure_')} {size}")
        return job.finish(options, report.rows, skipped, {"benchmark": "triton_kernels"})


if __name__ == "__main__":
    sys.exit(main())
