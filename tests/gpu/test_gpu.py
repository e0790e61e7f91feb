"""Features that only GPUs have: arrays and streams of other libraries, graphs, contexts, and devices that are not
peers.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    AbortedError,
    ArgumentError,
    Array,
    Communicator,
    DispatchCombine,
    EPAll2AllLayer,
    ProxyCCLError,
    ResourceError,
    Runtime,
    RuntimeUnavailableError,
    SizeTable,
    ThreadBootstrap,
    WaitTimeoutError,
    open_runtime,
)
from proxyccl.channels.memory import allocate
from proxyccl.device.arrays.array import as_view
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.gpu.memory import MemoryHandle
from proxyccl.device.memory.memory_pool import MemoryPool
from proxyccl.device.stream_operations import StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.trigger import MAX_CHANNELS
from proxyccl.torch_tensors.pools import PoolUse
from support.cases.expert_oracle import Routing
from support.cases.graphs import Graph, Replayed
from support.cases.memory import registered
from support.cases.reference import ALGORITHMS, DTYPES, Call
from support.daemons import running_daemon
from support.device_arrays import on_device, on_host
from support.devices import RUNTIME, device_count, rank_runtime
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.running import TIMEOUT, impatient, run_alone, run_mpi, run_ranks, wait_for

pytestmark = pytest.mark.gpu_only
CUDA_ONLY = pytest.mark.skipif(RUNTIME != "cuda", reason="of CUDA alone")
TWO_DEVICES = pytest.mark.skipif(
    RUNTIME not in ("cuda", "hip") or device_count() < 2, reason="needs two devices in one process"
)
MOVES = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
WAIT = 30.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Returns the module torch, built for the runtime's devices, or skips the test and says why there is none.

    Each rank that is a thread needs its own device, because torch uses one default stream per device, and kernels of
    two ranks in one stream would wait for each other forever.
    """
    module = pytest.importorskip("torch")
    built_for = "hip" if module.version.hip else "cuda"
    if built_for != RUNTIME or module.cuda.device_count() < 2:
        pytest.skip(f"torch is built for {built_for} and sees {module.cuda.device_count()} devices; two are needed")
    return module


def here(comm: Communicator) -> str:
    return f"cuda:{comm.runtime.device}"


def total(comm: Communicator) -> int:
    return comm.world_size * (comm.world_size + 1) // 2


# -- arrays of other libraries ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_are_reduced_in_place(ranks: Ranks, torch: ModuleType, dtype: str) -> None:
    def body(comm: Communicator) -> None:
        x = torch.full((1001,), comm.rank + 1, dtype=getattr(torch, dtype), device=here(comm))
        for view in (x[:1000], x[1:], x[3:4]):
            view.fill_(comm.rank + 1)
            assert comm.all_reduce(view) is view
            assert (view == total(comm)).all()

    ranks.run(body)


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8", "int8", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_torch_tensors_are_moved_into_new_ones(ranks: Ranks, torch: ModuleType, dtype: str) -> None:
    def body(comm: Communicator) -> None:
        n, element = comm.world_size, getattr(torch, dtype)
        values = torch.randint(0, 100, (n, n * 6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        x = values[comm.rank].to(here(comm)).view(element)
        gathered, exchanged = comm.all_gather(x), comm.all_to_all(x)
        assert (gathered.dtype, gathered.device) == (x.dtype, x.device)
        received = torch.cat([theirs[6 * comm.rank : 6 * comm.rank + 6] for theirs in values])
        assert torch.equal(gathered.view(torch.uint8).cpu(), values.flatten(0, 1))
        assert torch.equal(exchanged.view(torch.uint8).cpu(), received)
        comm.broadcast(x, n - 1)
        assert torch.equal(x.view(torch.uint8).cpu(), values[n - 1])

    ranks.run(body)


def test_a_tensor_that_requires_a_gradient_is_taken(ranks: Ranks, torch: ModuleType) -> None:
    def body(comm: Communicator) -> None:
        x = torch.full((8,), float(comm.rank + 1), device=here(comm), requires_grad=True)
        out = torch.empty(8, device=here(comm))
        comm.all_reduce(x, out=out)
        assert (out == total(comm)).all()

    ranks.run(body)


def test_without_a_stream_a_call_is_queued_where_torch_works(ranks: Ranks, torch: ModuleType) -> None:
    """The inputs are still being computed when the call is made, and the program uses the result without a wait."""

    def body(comm: Communicator) -> None:
        side = torch.cuda.Stream(here(comm))
        for turn in range(10):
            stream = side if turn % 2 else torch.cuda.current_stream(here(comm))
            with torch.cuda.device(here(comm)), torch.cuda.stream(stream):
                x = torch.zeros(100_000, device=here(comm))
                torch.cuda._sleep(10_000_000)
                x += comm.rank + turn + 1
                comm.all_reduce(x)
                doubled = 2 * x
            stream.synchronize()
            assert (doubled == 2 * (total(comm) + comm.world_size * turn)).all()

    ranks.run(body)


@pytest.mark.parametrize("form", ["stream", "handle"])
def test_a_side_stream_is_taken_as_it_is_or_by_its_handle(ranks: Ranks, torch: ModuleType, form: str) -> None:
    def body(comm: Communicator) -> None:
        side = torch.cuda.Stream(here(comm))
        with torch.cuda.device(here(comm)), torch.cuda.stream(side):
            x = torch.zeros(50_000, dtype=torch.int64, device=here(comm))
            torch.cuda._sleep(10_000_000)
            x += comm.rank + 1
        comm.all_reduce(x, stream=side if form == "stream" else side.cuda_stream)
        side.synchronize()
        assert (x == total(comm)).all()

    ranks.run(body)


@CUDA_ONLY
def test_cupy_arrays_are_reduced_on_cupys_stream(ranks: Ranks) -> None:
    cupy = pytest.importorskip("cupy")

    def body(comm: Communicator) -> None:
        with cupy.cuda.Device(comm.runtime.device), cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.full(1001, comm.rank + 1, cupy.float32)
            assert comm.all_reduce(x) is x
            doubled = 2 * x
            stream.synchronize()
            assert (doubled.get() == 2 * total(comm)).all()

    ranks.run(body)


@CUDA_ONLY
def test_a_dropped_stream_is_kept_until_the_next_call(ranks: Ranks) -> None:
    cupy = pytest.importorskip("cupy")

    def body(comm: Communicator) -> None:
        with cupy.cuda.Device(comm.runtime.device):
            for turn in range(20):
                with cupy.cuda.Stream(non_blocking=True):
                    comm.all_reduce(cupy.zeros(1 << 20, cupy.float32))
                x = comm.empty(1001, "float32").fill(turn + comm.rank)
                assert (comm.all_reduce(x).numpy() == total(comm) + comm.world_size * (turn - 1)).all()

    ranks.run(body)


@CUDA_ONLY
@pytest.mark.parametrize("ranks_are", ["threads", "processes"])
def test_memory_that_torch_maps_itself_is_shared(torch: ModuleType, ranks_are: str) -> None:
    """Expandable segments consist of several adjacent blocks, which CUDA IPC does not share."""
    program = PROGRAMS / "expandable_segments.py"
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if ranks_are == "processes":
        done = run_mpi(2, program, env=settings)
    else:
        done = run_alone(program, "--threads", env=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK") == 2, done.stdout


@CUDA_ONLY
def test_short_calls_take_no_old_data_for_new_where_jobs_share_gpus(torch: ModuleType) -> None:
    with ThreadPoolExecutor(3) as pool:
        for done in pool.map(lambda _: run_mpi(2, PROGRAMS / "new_data.py"), range(3)):
            assert done.stdout.count("OK") == 2, done.stdout + done.stderr


@pytest.fixture
def no_segments() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether torch's pools on the first two devices are empty; asserts that they are
    empty before and after the test.
    """

    def none_left() -> bool:
        return not any(MemoryPool(open_runtime(RUNTIME, device)).segments() for device in range(2))

    assert none_left()
    yield none_left
    gc.collect()
    assert none_left()


@pytest.mark.parametrize("algorithm", [None, "two_shot", "proxy"])
def test_tensors_of_torchs_pool_are_registered(
    torch: ModuleType, no_segments: Callable[[], bool], algorithm: str | None
) -> None:
    """Slices at any offset of the pool's tensors are registered memory from the first call on, even before peers have
    mapped the tensors.
    """
    count = 300_007

    def body(comm: Communicator) -> None:
        device = here(comm)
        with torch.cuda.device(device):
            with comm.memory_pool():
                x = torch.empty(count + 8, device=device)
                gathered = torch.empty(comm.world_size * count, device=device)
            elsewhere = torch.empty(count, device=device)
            for turn in range(6):
                part = x[comm.rank : comm.rank + count]
                part.fill_(comm.rank + 1 + turn)
                comm.all_reduce(part, algorithm=algorithm)
                assert (part == total(comm) + comm.world_size * turn).all()
                comm.all_gather(part, out=gathered)
                assert (gathered == total(comm) + comm.world_size * turn).all()
                if turn == 2:
                    comm.all_gather_bytes(b"")
                    wait_for(
                        lambda: registered(comm, as_view(x, "x")) and registered(comm, as_view(gathered, "x")),
                        "the peers have replied",
                    )
            assert not registered(comm, as_view(elsewhere, "x"))
            comm.all_gather_bytes(b"")

    run_ranks(2, body)
    gc.collect()
    torch.cuda.empty_cache()


def test_torchs_pool_gives_its_memory_back(torch: ModuleType, no_segments: Callable[[], bool]) -> None:
    """The pool is freed when its last communicator is closed. torch frees the memory of a deleted tensor when it
    empties its cache.
    """
    kept: list[Any] = []

    def body(comm: Communicator) -> None:
        with torch.cuda.device(here(comm)), comm.memory_pool():
            gone = torch.ones(1 << 20, device=here(comm))
            stays = torch.ones(5 << 20, device=here(comm))
        for x in (gone, stays):
            comm.all_reduce(x)
        comm.synchronize()
        comm.all_gather_bytes(b"")
        kept.append(stays)

    run_ranks(2, body)
    gc.collect()
    for device in range(2):
        (segment,) = MemoryPool(open_runtime(RUNTIME, device)).segments()
        assert segment.nbytes >= 20 << 20
    assert all((x == 2).all() for x in kept)
    kept.clear()
    torch.cuda.empty_cache()
    assert no_segments()


def test_torchs_graphs_capture_into_the_pool(torch: ModuleType, no_segments: Callable[[], bool]) -> None:
    """The graphs outlive the communicators, and the process survives the closing of the pool."""
    graphs: list[Any] = []
    one_at_a_time = threading.Lock()

    def body(comm: Communicator) -> None:
        device = here(comm)
        with torch.cuda.device(device):
            with comm.memory_pool() as pool:
                x = torch.ones(200_003, device=device)
            side = torch.cuda.Stream(device)
            with torch.cuda.stream(side):
                comm.all_reduce(x)
            side.synchronize()
            comm.all_gather_bytes(b"")
            wait_for(lambda: registered(comm, as_view(x, "x")), "the peers have replied")
            graph = torch.cuda.CUDAGraph()
            with (
                one_at_a_time,
                torch.cuda.graph(graph, pool=pool.id, stream=side, capture_error_mode="thread_local"),
            ):
                y = x * 2
                comm.all_reduce(y)
            comm.all_gather_bytes(b"")
            for turn in range(REPLAYS):
                x.fill_(turn)
                graph.replay()
                torch.cuda.current_stream(device).synchronize()
                assert (y == 2 * comm.world_size * turn).all()
            comm.all_gather_bytes(b"")
            graphs.append(graph)

    run_ranks(2, body)
    gc.collect()
    for graph in graphs:
        graph.reset()
    graphs.clear()
    PoolUse._outlived.clear()
    gc.collect()
    torch.cuda.empty_cache()


@CUDA_ONLY
def test_kernels_are_loaded_beside_proxied_collectives(torch: ModuleType) -> None:
    """CUDA loads a kernel at its first launch, during which the process's other driver calls wait for the device."""
    done = run_mpi(2, PROGRAMS / "lazy_load.py", env={"PROXYCCL_PROXY": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split()) == sorted(2 * ["all_reduce", *MOVES]), done.stdout


class OnlyInterface:
    """An exporter with only the CUDA array interface, which does not name the device."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class OnlyDLPack:
    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("exporter", [OnlyInterface, OnlyDLPack])
def test_every_kind_of_export_is_taken(ranks: Ranks, exporter: type[OnlyInterface | OnlyDLPack]) -> None:
    def body(comm: Communicator) -> None:
        x = exporter(comm.empty(1001, "float32").fill(comm.rank + 1))
        assert comm.all_reduce(x) is x
        assert (x.array.numpy() == total(comm)).all()
        assert comm.register(x).ptr == x.array.ptr

    ranks.run(body)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None])
def test_the_same_arrays_are_used_again_and_again(ranks: Ranks, algorithm: str | None) -> None:
    """From the second time on, a call with the same arrays is one call into C, and must still give correct results."""

    def body(comm: Communicator) -> None:
        x, out = comm.empty(3001, "int32"), comm.empty(3001, "int32")
        for turn in range(200):
            values = np.arange(3001, dtype=np.int32) * (turn + 1)
            comm.all_reduce(x.upload(values + comm.rank), out=out, algorithm=algorithm)
            comm.all_reduce(x, "max", algorithm=algorithm)
            comm.synchronize()
            assert np.array_equal(out.numpy(), comm.world_size * values + total(comm) - comm.world_size)
            assert np.array_equal(x.numpy(), values + comm.world_size - 1)

    ranks.run(body)


# -- arrays in other memory ---


@pytest.mark.parametrize("collective", ["all_reduce", *MOVES])
def test_arrays_of_the_host_are_refused_by_name(ranks: Ranks, collective: str) -> None:
    def body(comm: Communicator) -> None:
        message = f"x: the array lies on host:0, the communicator uses {RUNTIME}:{comm.runtime.device}"
        for x in (np.ones(4, np.float32), bytearray(16)):
            with pytest.raises(ArgumentError, match=message):
                getattr(comm, collective)(x)
        with pytest.raises(ArgumentError, match=message.replace("x:", "out:")):
            comm.all_reduce(on_device(comm, np.ones(4)), out=np.ones(4))
        with pytest.raises(ArgumentError, match="array: lies on host"):
            comm.register(np.ones(4))

    ranks.run(body)


@pytest.mark.parametrize("export", [lambda x: x, OnlyInterface, OnlyDLPack], ids=["own", "interface", "dlpack"])
@TWO_DEVICES
def test_an_array_of_another_device_is_refused_by_name(export: Callable[[Array], object]) -> None:
    def body(comm: Communicator) -> None:
        elsewhere = rank_runtime(1)
        array = Array(elsewhere, elsewhere.allocate(16), (4,), as_dtype("float32"))
        with pytest.raises(ArgumentError, match=rf"x: the array lies on .*\b1, .*uses {RUNTIME}:0"):
            comm.all_reduce(export(array))

    run_ranks(1, body)


@TWO_DEVICES
def test_a_tensor_of_another_device_is_refused_by_name(torch: ModuleType) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=f"lies on {RUNTIME}:1, the communicator uses {RUNTIME}:0"):
            comm.all_reduce(torch.ones(4, device="cuda:1"))

    run_ranks(1, body)


# -- graphs ---

REPLAYS = 300


def calls(dtype: str, count: int) -> list[Call]:
    """"""
    reduced = [Call("all_reduce", dtype, "sum", algorithm, count) for algorithm in (*ALGORITHMS, None)]
    moved = [
        Call(collective, dtype, "sum", algorithm, count, in_place=False)
        for collective, algorithm in itertools.product(MOVES, ("proxy", None))
    ]
    return reduced + moved


@pytest.mark.parametrize(("dtype", "count"), [("float32", 1), ("bfloat16", 4099), ("int64", 60_001)])
@CUDA_ONLY
def test_every_call_is_captured_through_the_driver_and_replayed(ranks: Ranks, dtype: str, count: int) -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        for call in calls(dtype, count):
            replayed = Replayed(comm, call, stream)
            replayed.issue()
            comm.synchronize(stream)
            graph = Graph(stream, replayed.issue)
            for seed in range(REPLAYS // 3):
                replayed.load(seed)
                graph.launch()
                comm.synchronize(stream)
                replayed.check()

    ranks.run(body)


@CUDA_ONLY
def test_a_graph_of_many_calls_is_replayed_without_waits(ranks: Ranks) -> None:
    """Epochs and flags advance in the kernels, so the CPU's arguments do not change between replays."""

    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        arrays = [comm.empty(1009, "int64") for _ in ALGORITHMS]

        def issue() -> None:
            for x, algorithm in zip(arrays, ALGORITHMS, strict=True):
                comm.all_reduce(x, "max", algorithm=algorithm, stream=stream)

        issue()
        comm.synchronize(stream)
        graph = Graph(stream, issue)
        for turn in range(1, 4):
            for number, x in enumerate(arrays):
                x.upload(np.arange(1009) + turn * 100 + number + comm.rank)
            for _ in range(REPLAYS):
                graph.launch()
            comm.all_reduce(arrays[0], "max", stream=stream)  # this call is not part of the graph
            comm.synchronize(stream)
            for number, x in enumerate(arrays):
                assert np.array_equal(x.numpy(), np.arange(1009) + turn * 100 + number + comm.world_size - 1)

    ranks.run(body)


@CUDA_ONLY
@pytest.mark.parametrize("world_size", [2, 4])
def test_invariant_rows_have_the_same_bits_in_every_batch_and_in_graphs(world_size: int) -> None:
    """Batches of several sizes begin with the same rows, whose sums and norms are computed eagerly and in a graph. The
    table names algorithms that add in different orders.
    """
    width, batches = 1024, (4096, 700, 64, 7, 1)
    table = SizeTable(((1 << 14, "recursive_doubling"), (1 << 18, "two_shot_packets")), "ring")

    def body(comm: Communicator) -> None:
        comm.collectives.selector = comm.collectives.selector.with_table("all_reduce", table)
        stream = comm.runtime.create_stream()
        own, residuals, weights = (
            np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
            for seed, shape in ((comm.rank, (batches[0], width)), (100, (batches[0], width)), (101, (width,)))
        )
        bfloat16 = as_dtype("bfloat16").numpy()
        weight = comm.empty(width, "bfloat16").upload(weights.astype(bfloat16))
        want: list[bytes] = []

        def check(rows: int) -> None:
            wide, total = (comm.empty((rows, width), "float32") for _ in range(2))
            x, residual, normed, added = (comm.empty((rows, width), "bfloat16") for _ in range(4))
            wide.upload(own[:rows])
            x.upload(own[:rows].astype(bfloat16))
            residual.upload(residuals[:rows].astype(bfloat16))

            def issue() -> None:
                comm.all_reduce(wide, out=total, stream=stream)
                comm.all_reduce_rms_norm(x, residual, weight, 1e-6, out=normed, residual_out=added, stream=stream)

            issue()
            comm.synchronize(stream)
            graph = Graph(stream, issue)
            for launch in (lambda: None, graph.launch, graph.launch):
                launch()
                comm.synchronize(stream)
                got = [each.numpy().tobytes() for each in (total, normed, added)]
                want.extend([] if want else got)  # the first batch has all rows
                assert got == [each[: len(part)] for each, part in zip(want, got, strict=True)], rows
                for each in (total, normed, added):
                    each.fill(0)

        for rows in batches:
            check(rows)

    run_ranks(world_size, body, invariant=True)


ADD_ONE = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1; }'


class BesideCapture:
    """Calls a kernel and a collective, during and outside a capture, on arrays of a library without current streams."""

    def __init__(self, comm: Communicator, captured: Any, name: str) -> None:
        self._comm, self._captured, self._name = comm, captured, re.escape(name)
        self.x, self._other = comm.empty(256, "float32").fill(0), comm.runtime.create_stream()
        self._kernel, self._y = comm.compile(ADD_ONE, "add_one"), comm.empty(256, "float32").fill(0)
        self.issue(captured)
        self.issue(self._other)
        comm.synchronize()
        comm.all_gather_bytes(b"")

    def issue(self, stream: Any) -> None:
        self._kernel(1, 256, self.x, stream=stream)
        self._comm.all_reduce(self.x, stream=stream)

    def capture(self) -> None:
        """Makes calls while the stream is captured. Checks that refused calls do not end the capture, and that other
        threads' calls succeed.
        """
        for stream in (None, self._other, self._other.handle, 0):
            for call in (self._kernel, lambda _, __, x, stream: self._comm.all_reduce(x, stream=stream)):
                with pytest.raises(ArgumentError, match=f"^stream: .*; expected stream={self._name}$"):
                    call(1, 256, self.x, stream=stream)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._kernel, 1, 256, self._y).result(TIMEOUT)
        self.issue(self._captured)

    def check(self, replay: Callable[[], None]) -> None:
        for turn in range(REPLAYS):
            self.x.fill(turn)
            replay()
            assert (self.x.numpy() == self._comm.world_size * (turn + 1)).all()


def test_a_call_that_torchs_capture_would_miss_is_refused(ranks: Ranks, torch: ModuleType) -> None:
    one_at_a_time = threading.Lock()

    def body(comm: Communicator) -> None:
        device = here(comm)
        with torch.cuda.device(device):
            side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
            calls = BesideCapture(comm, side, "torch.cuda.current_stream()")
            with one_at_a_time, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                calls.capture()

            def replay() -> None:
                graph.replay()
                torch.cuda.current_stream(device).synchronize()

            comm.all_gather_bytes(b"")
            calls.check(replay)

    ranks.run(body)


@CUDA_ONLY
@pytest.mark.parametrize("blocks", [False, True], ids=["non-blocking", "blocking"])
def test_a_call_that_cupys_capture_would_miss_is_refused(ranks: Ranks, blocks: bool) -> None:
    """Blocking streams synchronise with the legacy default stream, whose capture status can't be queried during a
    blocking stream's capture.
    """
    cupy = pytest.importorskip("cupy")
    one_at_a_time = threading.Lock()

    def body(comm: Communicator) -> None:
        with cupy.cuda.Device(comm.runtime.device), cupy.cuda.Stream(non_blocking=not blocks) as stream:
            calls = BesideCapture(comm, stream, "cupy.cuda.get_current_stream()")
            with one_at_a_time:
                stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
                try:
                    calls.capture()
                finally:
                    graph = stream.end_capture()

            def replay() -> None:
                graph.launch(stream)
                stream.synchronize()

            comm.all_gather_bytes(b"")
            calls.check(replay)

    ranks.run(body)


def test_torchs_graphs_hold_collectives(ranks: Ranks, torch: ModuleType) -> None:
    one_at_a_time = threading.Lock()  # torch synchronises the whole device before and after a capture

    def body(comm: Communicator) -> None:
        device = here(comm)
        with torch.cuda.device(device):
            x = torch.zeros(5003, device=device)
            gathered = torch.zeros(comm.world_size * 5003, device=device)

            def step() -> Any:
                comm.all_reduce(x)
                comm.all_gather(x, out=gathered)
                comm.all_reduce(x, algorithm="proxy")
                return gathered * 2

            side = torch.cuda.Stream(device)
            with torch.cuda.stream(side):
                step()
            side.synchronize()
            comm.all_gather_bytes(b"")  # before a rank captures, all ranks' kernels have ended
            graph = torch.cuda.CUDAGraph()
            with one_at_a_time, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                doubled = step()
            comm.all_gather_bytes(b"")
            for turn in range(REPLAYS):
                x.fill_(comm.rank + 1 + turn)
                graph.replay()
                reduced = total(comm) + comm.world_size * turn
                torch.cuda.current_stream(device).synchronize()
                assert (doubled == 2 * reduced).all()
                assert (x == comm.world_size * reduced).all()

    ranks.run(body)


@CUDA_ONLY
def test_a_rank_without_peers_captures_its_first_transfer() -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        x, out = (comm.empty(64, "int32").fill(0) for _ in range(2))

        def issue() -> None:
            with comm.transfers(stream=stream) as transfers:
                transfers.send(x, 0)
                transfers.recv(out, 0)

        graph = Graph(stream, issue)
        x.upload(np.arange(64, dtype=np.int32))
        graph.launch()
        comm.synchronize(stream)
        assert (out.numpy() == np.arange(64)).all()

    run_ranks(1, body)


@CUDA_ONLY
@pytest.mark.parametrize("algorithm", [None, "proxy"])
def test_dispatch_and_combine_are_replayed_over_one_routing(ranks: Ranks, algorithm: str | None) -> None:
    """The CPU prepares the routing outside the graph. Between replays the tokens may change, but not the routing."""
    tokens, hidden, topk = 33, 64, 2

    def body(comm: Communicator) -> None:
        stream, experts = comm.runtime.create_stream(), 2 * comm.world_size
        moe = DispatchCombine(
            comm, hidden=hidden, max_tokens=tokens, experts_per_rank=2, topk=topk, algorithm=algorithm
        )
        rng = np.random.default_rng(comm.rank)
        x = comm.empty((tokens, hidden), "float32").fill(0)
        ids = comm.empty((tokens, topk), "int32").upload(rng.integers(0, experts, (tokens, topk)))
        received = moe.prepare(x, ids, stream=stream).sum()
        rows, out = comm.empty((int(received), hidden), "float32"), comm.empty((tokens, hidden), "float32")

        def issue() -> None:
            moe.dispatch(x, out=rows, stream=stream)
            moe.combine(rows, out=out, stream=stream)

        issue()
        comm.synchronize(stream)
        graph = Graph(stream, issue)
        for _ in range(REPLAYS):
            values = rng.integers(-1000, 1000, (tokens, hidden)).astype(np.float32)
            x.upload(values)
            graph.launch()
            comm.synchronize(stream)
            assert np.array_equal(out.numpy(), topk * values)

    ranks.run(body)


@CUDA_ONLY
@pytest.mark.parametrize("local_combine", [False, True])
@pytest.mark.parametrize("tokens", [(33, 9), (1500, 1400)], ids=["few", "many"])
def test_a_graph_of_an_expert_layer_takes_new_routings(
    ranks: Ranks, tokens: tuple[int, int], local_combine: bool
) -> None:
    """With a fixed maximum number of rows, the GPU prepares the routing, so each replay may have another routing."""
    hidden, topk, experts = 64, 4, 8

    def body(comm: Communicator) -> None:
        stream, own, world = comm.runtime.create_stream(), tokens[comm.rank], comm.world_size
        layer = EPAll2AllLayer(
            comm,
            max(tokens),
            hidden,
            topk,
            comm.rank,
            experts,
            world,
            world,
            dtype="float32",
            enable_local_combine=local_combine,
            max_recv_tokens=sum(tokens) * topk,
        )
        x, ids = comm.empty((own, hidden)).fill(0), comm.empty((own, topk), "int32").fill(0)
        out = comm.empty((own, hidden))
        dispatched: list[Any] = []

        def issue() -> None:
            rows, _, desc = layer.dispatch(x, ids, stream=stream)
            layer.combine(rows, desc, out=out, stream=stream)
            dispatched[:] = [rows, desc]

        issue()
        comm.synchronize(stream)
        graph = Graph(stream, issue)
        for turn in range(REPLAYS):
            rngs = [np.random.default_rng((turn, rank)) for rank in range(world)]
            every = tuple(
                rng.integers(0, experts + 1, (count, topk), np.int32) for rng, count in zip(rngs, tokens, strict=True)
            )
            inputs = [
                rng.normal(size=(count, hidden)).astype(np.float32) for rng, count in zip(rngs, tokens, strict=True)
            ]
            routing = Routing(every, experts, world, max(tokens))
            x.upload(inputs[comm.rank])
            ids.upload(every[comm.rank])
            graph.launch()
            comm.synchronize(stream)
            layer.check()
            rows = routing.dispatch(inputs)
            assert np.array_equal(on_host(dispatched[0])[: routing.rows[comm.rank]], rows[comm.rank])
            assert np.array_equal(out.numpy(), routing.combine(rows, local_combine=local_combine)[comm.rank])
        layer.finalize()

    ranks.run(body)


# -- memory of other processes ---

EXPORT = """
import sys
from proxyccl import open_runtime
memory = open_runtime(local_rank=0).allocate(1 << 20)
print(open_runtime(local_rank=0).export(memory.ptr + 4096, 4096).hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.hip
@pytest.mark.parametrize("field", [6, 7], ids=["offset", "nbytes"])
def test_a_handle_beyond_its_memory_is_refused(field: int) -> None:
    runtime = rank_runtime(0)
    command = [sys.executable, "-c", EXPORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            handle = bytes.fromhex(owner.stdout.readline())
            runtime.open(handle).close()
            values = list(MemoryHandle._LAYOUT.unpack(handle))
            values[field] = 1 << 40
            forged = MemoryHandle._LAYOUT.pack(*values)
            with pytest.raises(ArgumentError, match="extend past the allocation"):
                runtime.open(forged)
        finally:
            owner.stdin.close()


# -- calls that wait for the device ---


@pytest.mark.hip
@pytest.mark.parametrize("launched", ["a collective", "a kernel"])
@pytest.mark.parametrize("call", ["load_module", "free"])
def test_waiters_for_the_device_are_called_behind_launches(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, call: str, launched: str
) -> None:
    """A driver call that waits for the device locks the context. If such a call were made while kernels run, the call
    would block the copies that the proxy makes for the kernels.
    """
    begun = threading.Event()
    done: list[bool] = []

    def body(comm: Communicator) -> None:
        stream, driver = comm.runtime.create_stream(), comm.runtime.driver
        behind = comm.runtime.create_event()
        x = on_device(comm, np.ones(50_000, np.float32))
        exchange = comm.compile(KERNELS, "exchange")
        channels = comm.proxy_channels(comm.empty(16))
        comm.all_reduce(x, algorithm="proxy", stream=stream)
        comm.synchronize()
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            waits, call_driver = getattr(driver, call), driver.call

            def begin(name: str, *args: Any, **options: Any) -> Any:
                if name == "EventSynchronize":
                    begun.set()
                return call_driver(name, *args, **options)

            def noted(argument: Any) -> Any:
                begun.set()
                done.append(behind.query())
                return waits(argument)

            monkeypatch.setattr(driver, "call", begin)
            monkeypatch.setattr(driver, call, noted)
            unneeded = allocate(comm.group, 1000, "float32")
        else:
            assert begun.wait(TIMEOUT)
        if launched == "a collective":
            comm.all_reduce(x, algorithm="proxy", stream=stream)
        else:
            exchange(1, 1, channels, stream=stream)
        behind.record(stream)
        if comm.rank == 0:
            if call == "free":
                unneeded.free()
            else:
                comm.compile(f'extern "C" __global__ void number_{time.monotonic_ns()}() {{}}')
            assert done == [True]
        comm.synchronize(stream)
        assert (on_host(x) == (4 if launched == "a collective" else 2)).all()

    ranks.run(body)


# -- failures ---

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void wait(DeviceHandle<ProxyChannel>* channels) {
  if (threadIdx.x == 0) channels[0].wait();
}
extern "C" __global__ void put_often(DeviceHandle<ProxyChannel>* channels, unsigned long bytes, int times) {
  for (int i = 0; i < times; ++i) channels[0].put(0, 0, bytes);
  channels[0].flush();
}
extern "C" __global__ void exchange(DeviceHandle<ProxyChannel>* channels) {
  channels[0].signal();
  channels[0].wait();
}
"""


def failure_of(call: Callable[[], object]) -> ProxyCCLError:
    """Makes a call that must fail long before the full time-out, and returns its exception."""
    began = time.monotonic()
    with pytest.raises(ProxyCCLError) as caught:
        call()
    assert time.monotonic() - began < TIMEOUT / 2
    return caught.value


def assert_healthy() -> None:
    """Checks that new communicators in the same contexts of the same devices work."""

    def body(comm: Communicator) -> None:
        for algorithm in ALGORITHMS:
            Call("all_reduce", "float32", "sum", algorithm, 3001).run(comm)

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_kernel_that_times_out_leaves_the_context_alive(algorithm: str) -> None:
    def body(comm: Communicator) -> ProxyCCLError | None:
        x = on_device(comm, np.ones(30_000, np.float32))
        on_host(comm.all_reduce(x, algorithm=algorithm))
        impatient(comm)
        if comm.rank == 1:
            deadline = time.monotonic() + TIMEOUT
            while not comm.group.failure.aborted and time.monotonic() < deadline:
                time.sleep(0.01)
            return failure_of(comm.check)
        return failure_of(lambda: (comm.all_reduce(x, algorithm=algorithm), comm.synchronize()))

    for error in run_ranks(2, body):
        assert isinstance(error, WaitTimeoutError)
        assert (error.rank, error.peer) == (0, 1)
    assert_healthy()


def test_a_users_kernel_that_waits_in_vain_ends_too() -> None:
    def body(comm: Communicator) -> ProxyCCLError:
        kernel, channels = comm.compile(KERNELS, "wait"), comm.proxy_channels(comm.empty(16))
        impatient(comm)
        kernel(1, 32, channels)
        return failure_of(comm.synchronize)

    assert all(isinstance(error, WaitTimeoutError) for error in run_ranks(2, body))
    assert_healthy()


def test_an_abort_ends_everything_while_copies_are_in_flight() -> None:
    nbytes = (64 if RUNTIME == "cuda" else 2) << 20  # the CPU copies for emulated GPUs, which takes longer

    def body(comm: Communicator) -> ProxyCCLError:
        channels = comm.proxy_channels(comm.empty(nbytes, "uint8"))
        kernel = comm.compile(KERNELS, "put_often")
        comm.all_gather_bytes(b"")
        kernel(1, 1, channels, nbytes, 2000)
        if comm.rank == 0:
            deadline = time.monotonic() + TIMEOUT / 4
            while channels[0].counters.puts < 10 and time.monotonic() < deadline:
                time.sleep(0.001)
            comm.abort("enough")
        return failure_of(comm.synchronize)

    errors = run_ranks(2, body)
    assert all(isinstance(error, AbortedError) and error.rank == 0 for error in errors), errors
    assert_healthy()


def check_lost_context(noticed_by: str, **env: str) -> None:
    """Runs a job of two processes of which one loses its context, and checks what both report."""
    if RUNTIME != "cuda":
        pytest.skip("what stands in for a GPU has no context to lose, and AMD's driver ends the process")
    ended = run_processes(2, PROGRAMS / "failure.py", f"lost_context:{noticed_by}", env=env)
    for rank, process in enumerate(ended):
        assert process.returncode == 0, process.stderr
        *failures, closed = process.stdout.splitlines()
        who = "this rank" if rank == 1 else "rank 1"
        assert failures
        for line in failures:
            assert line.startswith(f"rank {rank}: ContextLostError peer=None late=False"), line
            assert f"{who} lost its context on the GPU: a kernel accessed an illegal address (status 700)" in line
        assert closed.endswith("closed>")


@pytest.mark.parametrize("noticed_by", ["synchronize", "watcher"])
def test_a_lost_context_ends_its_communicator_alone(noticed_by: str) -> None:
    def body(comm: Communicator) -> None:
        check_lost_context(noticed_by)
        Call("all_reduce", "float32", "sum", None, 1000).run(comm)  # shares a device with the lost context's job

    run_ranks(1, body)


def test_a_lost_context_leaves_the_daemon_to_others(tmp_path: Path) -> None:
    with running_daemon(tmp_path / "d") as daemon:
        use_it = {"PROXYCCL_PROXY": "daemon", "PROXYCCL_DAEMON_SOCKET": str(daemon.path)}
        for _ in range(2):
            check_lost_context("watcher", **use_it)
            healthy = run_processes(2, PROGRAMS / "failure.py", "exit_without_close", env=use_it)
            assert [process.returncode for process in healthy] == [0, 0], healthy


def test_device_memory_that_runs_out_is_a_resource_error() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ResourceError, match=rf"can't allocate {1 << 44} bytes on {RUNTIME} device"):
            comm.empty(1 << 44, "uint8")
        if RUNTIME == "cuda":  # on emulated GPUs the allocations would fill the machine's memory
            kept: list[Array] = []
            with pytest.raises(ResourceError, match="can't allocate"):
                kept.extend(iter(lambda: comm.empty(16 << 30, "uint8"), None))
            for array in kept:
                array.free()
        Call("all_reduce", "float32", "sum", None, 1001).run(comm)

    run_ranks(1, body)


@pytest.mark.parametrize("device", [-1, 1000, "0", 0.5])
def test_a_device_that_does_not_exist_is_named(device: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        open_runtime(RUNTIME, device)
    assert caught.value.argument == "device"
    (bootstrap,) = ThreadBootstrap.create(1)
    with pytest.raises(ArgumentError) as caught:
        Communicator(bootstrap, RUNTIME, device=device)
    assert caught.value.argument == "device"


@TWO_DEVICES
def test_where_peer_access_is_refused_the_proxy_moves_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(runtime: Runtime, device_id: str) -> bool:
        return runtime.device_id == device_id

    monkeypatch.setattr(type(rank_runtime(0)), "can_access_peer", alone)

    def body(comm: Communicator) -> None:
        assert not comm.topology.all_accessible()
        for algorithm, count in itertools.product(("two_shot", "ring", "proxy", None), (17, 100_003)):
            Call("all_reduce", "float32", "sum", algorithm, count).run(comm)
        for collective in MOVES:
            Call(collective, "int32", count=1009).run(comm)
        with pytest.raises(ArgumentError, match="one_shot needs every rank's memory mapped, and some is not"):
            comm.all_reduce(comm.empty(4), algorithm="one_shot")
        with pytest.raises(ArgumentError, match="use a ProxyChannel"):
            comm.sm_channels(comm.empty(16))
        proxy = comm.group.links.proxy_if_started
        assert proxy is not None
        assert sum(proxy.counters(channel).puts for channel in range(MAX_CHANNELS)) > 0

    run_ranks(2, body)


@CUDA_ONLY
@pytest.mark.parametrize(("version", "message"), [(11080, "12.0 or later"), (12000, "older than the compiler")])
def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, version: int, message: str) -> None:
    from proxyccl.device.gpu import cuda
    from proxyccl.device.gpu.cuda_bindings import cu, nvrtc

    monkeypatch.setattr(cu, "cuDriverGetVersion", lambda: (cu.CUresult.CUDA_SUCCESS, version))
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 13, 0))
    with pytest.raises(RuntimeUnavailableError, match=message):
        cuda.CudaDriver()


def test_a_graph_rings_and_waits_at_each_replay() -> None:
    runtime = open_runtime(RUNTIME)
    words, stream = runtime.allocate_pinned(4096), runtime.create_stream()
    bell, done = (ctypes.c_uint64.from_address(words.host_ptr + offset) for offset in (0, 128))
    ring = StreamOperations(
        runtime, [WriteValue(words.ptr, 3), WaitValue(words.ptr + 128, 1), WriteValue(words.ptr + 128, 0)]
    )
    graph = Graph(stream, lambda: ring(stream))
    replays = 50
    for _ in range(replays):
        graph.launch()
    for _ in range(replays):
        deadline = time.monotonic() + WAIT
        while bell.value != 3:
            assert time.monotonic() < deadline, "the stream did not ring"
        bell.value, done.value = 0, 1
    stream.synchronize()
    assert (bell.value, done.value) == (0, 0)
    words.close()
