"""`proxyccl compile` and `use_aot`: programs run kernels that were compiled beforehand, and refuse other kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, CompileError, DispatchCombine, EPAll2AllLayer
from proxyccl.__main__ import main
from proxyccl.channels.collectives.table import KERNELS_OF_STEPS
from proxyccl.device.base_runtime import DriverCalls
from proxyccl.device.build.compile_cache import unsealed
from proxyccl.device.driver import DeviceInfo
from proxyccl.device.gpu.runtime import GpuRuntime
from proxyccl.device.host import HostRuntime
from proxyccl.device.host.shipped_libraries import ships_kernels
from proxyccl.device.runtimes import open_compiler
from proxyccl.tools.compile import EXPERT_KERNELS, compile_all
from support.device_arrays import on_device
from support.devices import ON_HOST, RUNTIME, rank_runtime
from support.kernels.device_sources import symbol_of
from support.running import run_ranks

ARCHITECTURE = "sm_90"
COMPILER_ALONE = pytest.mark.host_only(reason="needs only a compiler")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path))
    monkeypatch.delenv("PROXYCCL_CXXFLAGS", raising=False)
    return tmp_path


def layer(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    n = comm.world_size
    return EPAll2AllLayer(comm, 4, 8, 2, comm.rank, 2 * n, comm.local_world_size, n, dtype="float32", **options)


def round_trip(comm: Communicator, **options: Any) -> None:
    tokens = np.random.default_rng(comm.rank).random((4, 8), np.float32)
    ids = np.tile(np.arange(2, dtype=np.int32), (4, 1))
    with layer(comm, **options) as experts:
        experts.ep_barrier_all()
        rows, _, desc = experts.dispatch(on_device(comm, tokens), on_device(comm, ids))
        combined = experts.combine(rows, desc)
        comm.synchronize()
        host = combined if isinstance(combined, np.ndarray) else combined.numpy()
        np.testing.assert_array_equal(host, 2 * tokens)


# -- kernels that were compiled beforehand ---


@pytest.mark.host_only(reason="the CPU's kernels")
@pytest.mark.skipif(ships_kernels(), reason="this installation has compiled kernels")
def test_the_host_takes_what_the_command_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [kernel for kernel in EXPERT_KERNELS if kernel[1] in {"barrier", "signal_peer"}]
    monkeypatch.setattr("proxyccl.tools.compile.EXPERT_KERNELS", few)
    monkeypatch.setattr("proxyccl.tools.compile.KERNELS_OF_STEPS", ())
    with pytest.raises(CompileError, match="barrier was not compiled beforehand; run: proxyccl compile"):
        HostRuntime().shipped(*few[0], compiled_only=True)
    assert main(["compile"]) == 0
    assert f"2 kernels are in {empty_cache}" in capsys.readouterr().out
    objects = sorted(empty_cache.iterdir())
    for kernel in few:
        assert HostRuntime().shipped(*kernel, compiled_only=True).name == kernel[1]
    assert sorted(empty_cache.iterdir()) == objects


@pytest.mark.host_only(reason="the same calls on every runtime")
def test_the_command_compiles_all_kernels_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str | None, ...]] = set()
    find = HostRuntime.shipped

    def shipped(self: HostRuntime, file: str, kernel: str, dtype: Any = None, op: Any = None, **options: bool) -> Any:
        asked.add((file, kernel, dtype, op))
        return find(self, file, kernel, dtype, op, **options)

    monkeypatch.setattr(HostRuntime, "shipped", shipped)

    def standalone(comm: Communicator) -> None:
        experts = DispatchCombine(comm, hidden=8, max_tokens=4, experts_per_rank=1, topk=1)
        experts.prepare(np.ones((4, 8), np.float32), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32))
        experts.collect(experts.dispatch(weighted=True)[0].sum(axis=1))

    run_ranks(2, round_trip)
    run_ranks(2, standalone)
    few = {"dispatch_ids", "expert_spread"}
    assert {kernel for _, kernel, _, _ in asked} == {*few, "combine", "expert_weigh", "barrier"}
    assert asked <= set(EXPERT_KERNELS)


@pytest.mark.slow
@COMPILER_ALONE
@pytest.mark.parametrize(
    "names",
    [
        {"barrier", "expert_weigh"},
        pytest.param({"expert_quantize", "combine", "dispatch_shared_masks"}, marks=pytest.mark.full),
    ],
    ids=["short kernels", "long kernels"],
)
def test_the_command_compiles_for_an_absent_architecture(empty_cache: Path, names: set[str]) -> None:
    # Two kernels suffice: the test above checks that the command finds all kernels, and test_nvrtc.py compiles others.
    kernels = [kernel for kernel in EXPERT_KERNELS if kernel[1] in names and kernel[2] in {None, "bfloat16"}]
    assert len(kernels) == len(names)
    made, before = compile_all(ARCHITECTURE, kernels)
    assert (made, before) == (len(kernels), 0)
    images = b"".join(path.read_bytes() for path in empty_cache.iterdir())
    for _, kernel, dtype, op in kernels:
        name = symbol_of("_".join(filter(None, (kernel, dtype, op))), images.decode("latin-1"))
        assert f".text.{name}\0".encode() in images
    assert compile_all(ARCHITECTURE, kernels) == (0, made)


@COMPILER_ALONE
def test_a_runtime_takes_what_the_command_compiled(empty_cache: Path) -> None:
    runtime, loaded = without_a_device()
    (kernel,) = (each for each in EXPERT_KERNELS if each[1:3] == ("expert_weigh", "bfloat16"))
    refusal = f"expert_weigh_bfloat16 was not compiled for {ARCHITECTURE} beforehand; run: proxyccl compile"
    with pytest.raises(CompileError, match=refusal):
        runtime.shipped(*kernel, compiled_only=True)
    assert not list(empty_cache.iterdir())
    compile_all(ARCHITECTURE, [kernel])
    with pytest.raises(LoadedError):
        runtime.shipped(*kernel, compiled_only=True)
    (image,) = empty_cache.iterdir()
    assert loaded == [unsealed(image.read_bytes())]


class LoadedError(Exception):
    """Raised instead of loading an image into a driver."""


def without_a_device() -> tuple[GpuRuntime, list[bytes]]:
    """Returns a runtime that raises LoadedError instead of loading an image, and the list to which it adds
    the images.
    """
    loaded: list[bytes] = []

    def load(image: bytes) -> int:
        loaded.append(image)
        raise LoadedError

    def zero(*_: Any, **__: Any) -> int:
        return 0

    driver: Any = SimpleNamespace(
        runtime="cuda",
        compiler=open_compiler("cuda"),
        device_count=lambda: 1,
        device=lambda _: DeviceInfo("none", "cuda:none", ARCHITECTURE, 132, 1 << 30, "0000:00:00.0", True),
        load_module=load,
        thread_stream=2,
        legacy_stream=1,
        loads_lazily=False,
        queue_limit=None,
        calls=DriverCalls,
        **dict.fromkeys(("allocate", "context", "current", "make_current", "relax_capture"), zero),
        **dict.fromkeys(("create_stream", "release", "address"), zero),
    )
    return GpuRuntime(driver), loaded


@pytest.mark.gpu_only
def test_on_a_gpu_a_layer_takes_what_the_command_compiled(empty_cache: Path) -> None:
    if RUNTIME == "hip" and rank_runtime(0).driver.device(0).architecture.startswith("sm_"):
        pytest.skip("the command compiles for an NVIDIA GPU with CUDA's compiler and not through HIP's calls")
    with pytest.raises(CompileError, match="run: proxyccl compile"):
        run_ranks(1, lambda comm: round_trip(comm, use_aot=True))
    assert not list(empty_cache.iterdir())
    assert main(["compile"]) == 0
    images = sorted(empty_cache.iterdir())
    assert images
    run_ranks(1, lambda comm: round_trip(comm, use_aot=True))
    assert sorted(empty_cache.iterdir()) == images
    for kernel in KERNELS_OF_STEPS:
        rank_runtime(0).shipped(*kernel, compiled_only=True)


# -- refusals ---


@pytest.mark.skipif(not ON_HOST, reason="flags of the host's compiler")
def test_a_layer_that_may_not_compile_says_so() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CompileError, match=r"dispatch_uint8 was not compiled beforehand with .*-DPLANTED"):
            layer(comm, use_aot=True)
        assert comm.all_gather(np.array([comm.rank])).tolist() == [0, 1]

    run_ranks(2, body, runtime=HostRuntime(cxxflags=("-DPLANTED",)))


@COMPILER_ALONE
@pytest.mark.parametrize("architecture", ["sm_", "h200", "gfx-942", "compute_90"])
def test_what_is_no_architecture_is_refused(architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match=f"^arch: '{architecture}' is not a GPU architecture"):
        compile_all(architecture, EXPERT_KERNELS)
    with pytest.raises(SystemExit) as end:
        main(["compile", "--arch", architecture])
    assert end.value.code == 2
    assert "such as sm_90 or gfx942" in capsys.readouterr().err


@COMPILER_ALONE
def test_an_unknown_architecture_is_the_compilers_error(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_1"]) == 1
    assert "NVRTC could not compile" in capsys.readouterr().err
    assert not list(empty_cache.iterdir())
