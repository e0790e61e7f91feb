"""The `Job` on GPUs: arrays are torch's tensors, the GPU's events time CUDA graphs, and torch provides the other
libraries.

A contender's calls are captured into a CUDA graph. Events time the graph's replay, so that no launch cost of Python is
included. Each rank's stream first sleeps until the rank's CPU has queued the replay, and then joins a barrier of all
ranks, so that a slow CPU does not make a rank start late.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

# These variables disable NVLink multicast; torch and NCCL read them at import.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import nccl_registered
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from graph_kernels import multiprocessors_used
from mpi4py import MPI
from nccl_registered import CTA_POLICY_DEFAULT, CTA_POLICY_ZERO, RegisteredNccl
from side_by_side import DTYPES, WAIT_TIMEOUT, Burst, Job, Peer
from torch_peer import torch_peer

from proxyccl import Communicator
from proxyccl.tools.results import Fields

_POISON = 0xA5
_SLEEP_CYCLES = 600_000  # about 300 µs, which is longer than the CPU takes to queue a barrier and a replay


class GraphBurst(Burst):
    """Calls in a CUDA graph. The graph is captured and replayed on the same stream.

    Args:
        call: queues a call on torch's current stream.
        calls: the number of calls to capture.
        stream: the stream.
        counted: whether to read from the graph how many multiprocessors its kernels can occupy.
    """

    def __init__(self, call: Callable[[], object], calls: int, stream: torch.cuda.Stream, *, counted: bool) -> None:
        self.calls, self.stream = calls, stream
        self._call = call  # keeps alive the arrays whose addresses are in the graph
        counted = counted and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
        self._graph: Any = torch.cuda.CUDAGraph(keep_graph=True) if counted else torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # NCCL's watchdog thread queries events during the capture, which only the mode "thread_local" allows.
            self._graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(calls):
                call()
            self._graph.capture_end()
        if counted:
            from cuda.bindings import driver

            available = torch.cuda.get_device_properties(stream.device).multi_processor_count
            self.multiprocessors = multiprocessors_used(driver, self._graph.raw_cuda_graph(), available)
            self._graph.instantiate()

    def queue(self) -> None:
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class IssuedBurst(Burst):
    """Calls that are issued one after another, without a graph, because in a graph NCCL starts network transfers by a
    host function, which adds a delay.

    Args:
        call: queues a call on torch's current stream.
        calls: the number of calls.
        stream: the stream.
    """

    def __init__(self, call: Callable[[], object], calls: int, stream: torch.cuda.Stream) -> None:
        self.calls, self.stream, self._call = calls, stream, call

    def queue(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(self.calls):
                self._call()

    def close(self) -> None:
        """Does nothing, because a burst of issued calls holds no resources."""


def nccl_between_nodes(node: int, ranks_of_node: int) -> dict[str, str]:
    """Returns environment variables that make NCCL treat rehearsed nodes as different hosts, and connect them by
    sockets.
    """
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0", "NCCL_HOSTID": f"node{node}"}
    return sockets if ranks_of_node > 1 else {**sockets, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


class GpuJob(Job):
    """A `Job` on GPUs. torch.distributed's default group contains the same ranks, with NCCL.

    Attributes:
        device: this rank's device.
        group_name: the name of torch's process group of all ranks.
        stream: the stream of `handle`.
    """

    dtypes = DTYPES
    timing = "CUDA-graph replays, time of one call"

    def __init__(self, seconds: float, *, growth_limit: float = 36.0, nodes: int | None = None) -> None:
        super().__init__(seconds, growth_limit=growth_limit, nodes=nodes)
        if nodes is not None:
            self.timing = "bursts of calls between events, time of one call"
            each = self.ranks // nodes
            os.environ.update(nccl_between_nodes(self.rank // each, each))
        host = self.world.Split_type(MPI.COMM_TYPE_SHARED)
        self.device = torch.device("cuda", host.Get_rank())
        host.Free()
        torch.cuda.set_device(self.device)
        port = None
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{self.world.bcast(port)}",
            rank=self.rank,
            world_size=self.ranks,
            device_id=self.device,
            timeout=timedelta(seconds=60),
        )
        self.group_name: str = dist.group.WORLD.group_name
        self.comm = Communicator.from_mpi(timeout=WAIT_TIMEOUT, **self.placement())
        self.stream = torch.cuda.Stream()
        self.handle = self.stream.cuda_stream
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._registered: dict[int, RegisteredNccl] = {}  # by NCCL's policy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            dist.destroy_process_group()

    def empty(self, count: int, dtype: str) -> Any:
        """Returns a tensor of torch's own memory."""
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def registered(self, count: int, dtype: str) -> Any:
        """Returns a tensor on memory of `Communicator.empty`."""
        array = self.comm.empty(count, dtype)
        self.comm.register(array)
        return torch.from_dlpack(array)

    def random(self, count: int, dtype: str, seed: int) -> Any:
        """Returns whole numbers from -8 to 8."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randint(-8, 9, (count,), generator=generator, device=self.device, dtype=torch.int8)
        return values.to(getattr(torch, dtype))

    def poison(self, x: Any) -> None:
        poison(x)

    def peers(self, collective: str, count: int, dtype: str) -> list[Peer]:
        """Returns NCCL, NCCL with registered memory, and torch symmetric memory; between rehearsed nodes only NCCL."""
        if self.nodes is not None:
            return [torch_peer("NCCL", collective)]
        if collective == "all_reduce":
            return [
                Peer("NCCL", lambda out, _: dist.all_reduce(out)),
                self._registered_nccl("NCCL, symmetric", CTA_POLICY_DEFAULT, count, dtype, _all_reduce),
                *self._symmetric_memory_peers(count, dtype),
            ]
        call = {"all_gather": _all_gather, "all_to_all": _all_to_all}[collective]
        return [
            Peer("NCCL", lambda out, x: call(out, x, None)),
            self._registered_nccl("NCCL, symmetric", CTA_POLICY_DEFAULT, count, dtype, call),
            self._registered_nccl("NCCL, copy engines", CTA_POLICY_ZERO, count, dtype, call),
        ]

    def _registered_nccl(
        self, name: str, cta_policy: int, count: int, dtype: str, call: Callable[[Any, Any, Any], object]
    ) -> Peer:
        element = getattr(torch, dtype)
        nbytes = count * element.itemsize
        missing = self.everywhere(nccl_registered.why_missing())
        made = self._registered.get(cta_policy)
        if not missing and (made is None or nbytes > made.nbytes):
            try:
                made = RegisteredNccl(self.device, nbytes, cta_policy)
            except (RuntimeError, TypeError) as error:
                missing = str(error).splitlines()[0]
            missing = self.everywhere(missing)
        if missing or made is None:
            return Peer(name, missing=missing)
        self._registered[cta_policy] = made
        return Peer(name, lambda out, x: call(out, x, made.group), lambda some: made.arrays(some, element))

    def _symmetric_memory_peers(self, count: int, dtype: str) -> list[Peer]:
        tensor, missing = symmetric_memory(self, count, getattr(torch, dtype))
        if tensor is None:
            return [Peer(name, missing=missing) for name in ("torch one-shot", "torch two-shot")]
        operations, group = torch.ops.symm_mem, self.group_name
        out = torch.empty_like(tensor)

        def arrays(some: int) -> tuple[Any, Any]:
            return tensor[:some], out[:some]

        return [
            Peer(
                "torch one-shot",
                lambda out, x: operations.one_shot_all_reduce_out(x, "sum", group, out),
                arrays,
                in_place=False,
            ),
            Peer(
                "torch two-shot",
                lambda out, _: operations.two_shot_all_reduce_(out, "sum", group),
                lambda some: (tensor[:some], tensor[:some]),
            ),
        ]

    def peer_versions(self) -> Fields:
        """Returns the versions of torch and of the libraries that torch contains."""
        return {
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
        }

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which torch uses the job's stream."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self.stream)
        return stream

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time_now(self, call: Callable[[], object], calls: int) -> float:
        """Times the calls by events around them."""
        start, end, *_ = self._events
        start.record(self.stream)
        for _ in range(calls):
            call()
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def burst(self, call: Callable[[], object], calls: int) -> Burst:
        """Returns a CUDA graph of the calls, or between rehearsed nodes a burst without a graph."""
        if self.nodes is not None:
            return IssuedBurst(call, calls, self.stream)
        return GraphBurst(call, calls, self.stream, counted=self.comm.runtime.name == "cuda")

    def time_burst(self, timed: Burst, *, beside: Burst | None = None, beside_bursts: int = 0) -> tuple[float, bool]:
        """Times the replays by events around them, after a barrier of the ranks."""
        assert isinstance(timed, GraphBurst | IssuedBurst)
        start, end, together, beside_end = self._events
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
        self.comm.barrier(stream=self.handle)
        together.record(self.stream)
        if beside is not None:
            assert isinstance(beside, GraphBurst)
            beside.stream.wait_event(together)
            for _ in range(beside_bursts):
                beside.queue()
            beside_end.record(beside.stream)
        if timed.stream != self.stream:
            timed.stream.wait_event(together)
        start.record(timed.stream)
        timed.queue()
        end.record(timed.stream)
        torch.cuda.synchronize()
        elapsed = float(start.elapsed_time(end))
        outlasted = beside is None or float(start.elapsed_time(beside_end)) >= elapsed
        return elapsed * 1e3 / timed.calls, outlasted

    def product(self, size: int, calls: int) -> GraphBurst:
        """Returns a CUDA graph of matrix products in bfloat16."""
        a = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        b, out = torch.randn_like(a), torch.empty_like(a)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

        def multiply() -> None:
            torch.mm(a, b, out=out)

        with torch.cuda.stream(stream):
            multiply()  # loads the library's kernel, which can't be loaded during a capture
            stream.synchronize()
        return GraphBurst(multiply, calls, stream, counted=False)


def _all_gather(out: Any, x: Any, group: Any) -> None:
    dist.all_gather_into_tensor(out, x, group=group)


def _all_to_all(out: Any, x: Any, group: Any) -> None:
    dist.all_to_all_single(out, x, group=group)


def _all_reduce(out: Any, _: Any, group: Any) -> None:
    dist.all_reduce(out, group=group)


def symmetric_memory(job: Job, count: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, str]:
    """Returns a tensor that all ranks can access, with ""; if torch can't make such a tensor, returns None and the
    reason. The reason is the same on all ranks.
    """
    reason, tensor = "", None
    try:
        tensor = symm_mem.empty(count, dtype=dtype, device=torch.cuda.current_device())
        symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    reason = job.everywhere(reason)
    return (None if reason else tensor), reason


def poison(x: torch.Tensor) -> None:
    """Fills a tensor with a pattern that no result has."""
    x.view(torch.uint8).fill_(_POISON)
