"""Kernels in Triton beside C++ and NCCL: mpiexec -n 2 python -m mpi4py triton_kernels.py

- put_signal: half of a ping-pong's round trip, by one kernel of a program, or of a thread, on each rank.
- diffusion: a step of `examples/triton_diffusion.py` and of `examples/custom_kernel.py`.
- all_reduce: one-shot, of 64 KiB; ours in C++ is ``algorithm="one_shot"``.
- gemm_all_reduce, all_gather_gemm: `examples/triton_overlapped_gemm.py` beside ``torch.matmul`` and NCCL, one after the
  other, in float16.

Times are by the GPU's events, of many calls; those of the last three are calls in a CUDA graph. The result is the
median over repetitions of the slowest rank's time. Contenders take turns.
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

# NVLink multicast must not be used. torch and NCCL read these variables when they are loaded.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch
import torch.distributed as dist
import triton
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

import proxyccl.triton as pt
from proxyccl import Communicator
from proxyccl.channels.tools.results import Fields, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from triton_all_reduce import one_shot
from triton_diffusion import diffuse
from triton_overlapped_gemm import all_gather_gemm, gemm_all_reduce

EXAMPLES = Path(__file__).parent.parent / "examples"
_TIMEOUT = 20.0  # seconds, of each wait
_ROUNDS = 2000
_STEPS = 2000
_CELLS = 1000
_CALLS = 20
_TILES = {"BM": 128, "BN": 128, "BK": 64}
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


@triton.jit
def ping_pong(channel, nbytes, first, rounds):
    for _ in range(rounds):
        if first:
            pt.put_with_signal(channel, nbytes, 0, nbytes)
        pt.wait(channel)
        if first == 0:
            pt.put_with_signal(channel, nbytes, 0, nbytes)


Contenders = dict[str, Callable[[], object]]


class Measurement:
    """Times of contenders that take turns.

    Args:
        comm: the ranks.
        repetitions: of each contender.
    """

    def __init__(self, comm: Communicator, repetitions: int) -> None:
        self._comm = comm
        self._repetitions = repetitions
        self.results: list[Fields] = []

    def measure(self, what: str, contenders: Contenders, units: int) -> None:
        """Times each contender's call, of `units` units, and prints and keeps the time of a unit."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for call in contenders.values():  # compiles, and warms up
            call()
        torch.cuda.synchronize()
        for _ in range(self._repetitions):
            for name, call in contenders.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._comm.barrier()
                torch.cuda.synchronize()
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                self._comm.check()
                times[name].append(MPI.COMM_WORLD.allreduce(start.elapsed_time(end) * 1e3 / units, MPI.MAX))
        for name, found in times.items():
            median = statistics.median(found)
            self.results.append({"what": what, "contender": name, "us": median, "least_us": min(found)})
            if self._comm.rank == 0:
                print(f"{what:18s} {name:22s} {median:10.2f} us", flush=True)


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Calls in a CUDA graph, and what replays it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call()
    return graph.replay


def measure_put_signal(comm: Communicator, measurement: Measurement) -> None:
    nbytes, first = 1024, int(comm.rank == 0)
    (channel,) = comm.proxy_channels(comm.empty(2 * nbytes, "uint8"), peers=[1 - comm.rank])
    cpp, ours = comm.compile(_PING_PONG, "ping_pong"), comm.triton(ping_pong, grid=1, num_warps=1)
    contenders: Contenders = {
        "C++": lambda: cpp(1, 1, channel, nbytes, first, _ROUNDS, stream=torch.cuda.current_stream()),
        "Triton": lambda: ours(channel, nbytes, first, _ROUNDS, stream=torch.cuda.current_stream()),
    }
    measurement.measure("put_signal 1 KiB", contenders, 2 * _ROUNDS)


def measure_diffusion(comm: Communicator, measurement: Measurement) -> None:
    rank, ranks = comm.rank, comm.world_size
    tree = ast.parse((EXAMPLES / "custom_kernel.py").read_text())
    (source,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNEL"
    )
    u = comm.empty((2, _CELLS + 2), "float32").fill(1)
    channels = comm.proxy_channels(u)
    left, right = channels.to((rank - 1) % ranks), channels.to((rank + 1) % ranks)
    cpp, ours = comm.compile(source, "diffuse"), comm.triton(diffuse, grid=1)
    contenders: Contenders = {
        "C++": lambda: cpp(1, 128, left, right, u, _CELLS, _STEPS, stream=torch.cuda.current_stream()),
        "Triton": lambda: ours(left, right, u, _CELLS, _STEPS, BLOCK=1024, stream=torch.cuda.current_stream()),
    }
    measurement.measure("diffusion", contenders, _STEPS)


def measure_all_reduce(comm: Communicator, measurement: Measurement) -> None:
    n, block = 16 * 1024, 1024
    programs = n // block
    x, calls = torch.zeros(n, device="cuda"), comm.empty(programs, "int32").fill(0)
    channels = comm.sm_channels(comm.empty(2 * comm.world_size * n, "uint64").fill(0))
    ours = comm.triton(one_shot, grid=programs)
    contenders: Contenders = {
        "C++": in_graph(lambda: comm.all_reduce(x, algorithm="one_shot")),
        "Triton": in_graph(lambda: ours(x, channels, calls, comm.rank, comm.world_size, n, BLOCK=block)),
        "NCCL": in_graph(lambda: dist.all_reduce(x)),
    }
    measurement.measure("all_reduce 64 KiB", contenders, _CALLS)


def measure_gemms(comm: Communicator, measurement: Measurement, size: int) -> None:
    rank, ranks = comm.rank, comm.world_size
    programs = torch.cuda.get_device_properties(comm.runtime.device).multi_processor_count
    barrier = pt.GridBarrier(comm)
    m = n = size
    k = size // ranks

    a, b = (torch.randn(shape, device="cuda", dtype=torch.float16) / 64 for shape in ((m, k), (k, n)))
    memory, done = comm.empty((3, m, n), "float16"), comm.empty(ranks, "int32").fill(0)
    channels = comm.proxy_channels(memory)
    fused = comm.triton(gemm_all_reduce, grid=programs, num_warps=8, num_stages=3)
    product = torch.empty((m, n), device="cuda", dtype=torch.float16)

    def one_after_the_other() -> None:
        torch.matmul(a, b, out=product)
        dist.all_reduce(product)

    contenders: Contenders = {
        "matmul, then NCCL": in_graph(one_after_the_other),
        "Triton, overlapped": in_graph(
            lambda: fused(a, b, memory, done, channels, barrier, rank, ranks, m, n, k, **_TILES)
        ),
        "matmul alone": in_graph(lambda: torch.matmul(a, b, out=product)),
    }
    measurement.measure(f"gemm_all_reduce {size}", contenders, _CALLS)
    one_after_the_other()
    difference = (torch.from_dlpack(memory)[2].float() - product.float()).abs().max().item()
    assert difference <= 2e-2 * product.abs().max().item(), difference

    rows = comm.empty((m, size), "float16").fill(0.01)
    gathered, own = torch.from_dlpack(rows), torch.full((m // ranks, size), 0.01, device="cuda", dtype=torch.float16)
    weights = torch.randn((size, n // ranks), device="cuda", dtype=torch.float16)
    result, there = (torch.empty((m, n // ranks), device="cuda", dtype=torch.float16) for _ in range(2))
    row_channels = comm.proxy_channels(rows)
    gathering = comm.triton(all_gather_gemm, grid=programs, num_warps=8, num_stages=3)

    def gather_first() -> None:
        dist.all_gather_into_tensor(gathered, own)
        torch.matmul(gathered, weights, out=there)

    contenders = {
        "NCCL, then matmul": in_graph(gather_first),
        "Triton, overlapped": in_graph(
            lambda: gathering(rows, weights, result, row_channels, barrier, rank, ranks, m, n // ranks, size, **_TILES)
        ),
        "matmul alone": in_graph(lambda: torch.matmul(gathered, weights, out=there)),
    }
    measurement.measure(f"all_gather_gemm {size}", contenders, _CALLS)
    difference = (result.float() - there.float()).abs().max().item()
    assert difference <= 2e-2 * there.abs().max().item(), difference


def main() -> None:
    options = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(options.seconds)
    with Communicator(timeout=_TIMEOUT) as comm:
        if comm.world_size != 2 or comm.runtime.name == "host":
            raise SystemExit("triton_kernels.py needs 2 ranks on GPUs: mpiexec -n 2 python -m mpi4py ...")
        torch.cuda.set_device(comm.runtime.device)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29551")
        dist.init_process_group("nccl", rank=comm.rank, world_size=comm.world_size, timeout=timedelta(seconds=60))
        heading(comm, "kernels in Triton", f"Triton {triton.__version__}, torch {torch.__version__}")
        measurement = Measurement(comm, 5 if options.quick else 20)
        measure_put_signal(comm, measurement)
        measure_diffusion(comm, measurement)
        stream = torch.cuda.Stream()  # graphs are captured on a stream of their own
        with torch.cuda.stream(stream):
            measure_all_reduce(comm, measurement)
            for size in (4096,) if options.quick else (4096, 8192):
                measure_gemms(comm, measurement, size)
        dist.destroy_process_group()
        if options.json and comm.rank == 0:
            write_json(options.json, {"benchmark": "triton_kernels", **describe(comm), "results": measurement.results})


if __name__ == "__main__":
    main()
