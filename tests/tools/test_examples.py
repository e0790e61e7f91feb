"""The examples run as their README says, and check themselves; the demo reports their results and errors."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxyccl.device.build.kernel_names import kernel_names
from proxyccl.proxy.verbs.requirements import missing
from support.devices import ON_HOST, RUNTIME, processes, world_sizes
from support.kernels.nvrtc import CUBIN, Nvrtc
from support.paths import EXAMPLES, PROGRAMS
from support.running import run_alone, run_mpi

pytestmark = pytest.mark.slow

ENVIRONMENT = {"TRITON_INTERPRET": "1"} if ON_HOST else {}  # on the host, Triton examples need Triton's interpreter


def run_example(world_size: int, name: str, *options: str) -> str:
    """Runs an example, and returns its output. Fails with the example's errors unless it succeeds."""
    done = run_mpi(world_size, EXAMPLES / name, *options, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result_of(output: str) -> dict[str, Any]:
    """Returns the contents of the output's RESULT line, which is for programs."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, output
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def kernel_source(path: Path) -> str | None:
    """Returns the text that a module assigns to KERNEL, or None, without running the module."""
    text = path.read_text()
    for node in ast.parse(text).body if "\nKERNEL = " in text else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNEL":
            return str(ast.literal_eval(node.value))
    return None


KERNELS = {path.name: source for path in sorted(EXAMPLES.glob("*.py")) if (source := kernel_source(path)) is not None}


@dataclass(frozen=True)
class Training:
    world_size: int
    batch: int
    epochs: int
    algorithm: str | None

    @property
    def options(self) -> list[str]:
        given = ["--epochs", str(self.epochs), "--batch", str(self.batch), "--json"]
        return given if self.algorithm is None else [*given, "--algorithm", self.algorithm]

    def check(self, output: str) -> None:
        """Fails unless the result equals one process's result, and data went through the requested channels."""
        result = result_of(output)
        assert result["world_size"] == self.world_size
        assert result["difference"] <= 1e-5
        assert result["accuracy"] == result["reference_accuracy"] > 0.9
        if self.algorithm == "proxy":
            # Gradients are short, so each rank sends its whole gradient to every other rank.
            crossing = (self.world_size - 1) * result["payload_bytes"]
            assert result["channel"] == "ProxyChannel"
            assert result["proxy"]["bytes"] == pytest.approx(crossing, rel=0.01)
            assert result["proxy"]["puts"] > 0
            assert result["proxy"]["triggers"] == 0
        else:
            assert result["channel"] == ("none" if self.world_size == 1 else "SmChannel")
            assert result["proxy"] == {"triggers": 0, "puts": 0, "bytes": 0}


TRAINING = "digits_data_parallel.py"
OF_TWO = ("all_reduce.py", "overlap.py", "triton_diffusion.py", "triton_all_reduce.py", "triton_overlapped_gemm.py")
OF_THREE = (
    *("all_to_all.py", "packets.py", "fused.py", "custom_kernel.py", "halo_exchange.py"),
    *("expert_parallel.py", "triton_all_to_all.py"),
)
JOBS = {2: (*OF_TWO, *OF_THREE), 3: OF_THREE}


# Three ranks run only with --full, because the examples' own code does not depend on the number of ranks.
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=pytest.mark.full if size > 2 else []) for size in world_sizes(*JOBS, processes=True)],
)
def test_the_examples_check_their_results_and_say_so(world_size: int) -> None:
    """One job runs all examples, because starting processes and imports take longer than most examples."""
    names = JOBS[world_size]
    trainings = [Training(world_size, 50, 4, algorithm) for algorithm in (None, "proxy")]
    programs = [[name] for name in names] + [[TRAINING, *training.options] for training in trainings]
    commands = [shlex.join([str(EXAMPLES / name), *options]) for name, *options in programs]
    done = run_mpi(world_size, PROGRAMS / "in_turn.py", *commands, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = done.stdout.split("== ")[1:]
    assert [output.splitlines()[0] for output in outputs] == [name for name, *_ in programs]
    for output in outputs[: len(names)]:
        assert output.splitlines()[-1].startswith("OK: "), output
    for training, output in zip(trainings, outputs[len(names) :], strict=True):
        training.check(output)


# Runs examples in separate jobs, as the README does, and only with --full, because the examples above make the same
# calls.
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        (name, world_size)
        for name, wanted in {
            **dict.fromkeys(OF_TWO, (2,)),
            **dict.fromkeys(OF_THREE[:4], (2, 3)),
            **dict.fromkeys(("halo_exchange.py", "expert_parallel.py"), (1, 3)),
            "expert_parallel_digits.py": (1, 3, 4),
            "triton_all_to_all.py": (3,),
        }.items()
        for world_size in world_sizes(*wanted, processes=True)
    ],
)
def test_an_example_checks_its_result_and_says_so(name: str, world_size: int) -> None:
    last = run_example(world_size, name).splitlines()[-1]
    assert last.startswith("OK: ")


@pytest.mark.host_only(reason="agents move the host's memory, whatever the runtime")
def test_the_example_of_agents_starts_its_processes_itself() -> None:
    done = run_alone(EXAMPLES / "kv_blocks.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK: ")


def test_the_expert_parallel_example_runs_with_torch() -> None:
    torch = pytest.importorskip("torch")
    if RUNTIME == "hip" and torch.version.cuda:
        pytest.skip("torch is built for CUDA")
    last = run_example(processes(2), "expert_parallel.py", "--torch", "--hidden", "256").splitlines()[-1]
    assert last.startswith(f"OK: {processes(2)} ranks, torch on c")


def test_examples_between_ranks_say_that_one_is_too_few() -> None:
    names = sorted(KERNELS.keys() - {"halo_exchange.py"})
    done = run_mpi(1, PROGRAMS / "in_turn.py", *(str(EXAMPLES / name) for name in names))
    assert done.returncode != 0
    for name in names:
        assert f"{name} needs at least 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not missing(), reason="this machine has RDMA")
@pytest.mark.parametrize("world_size", world_sizes(2, processes=True))
def test_the_interchange_says_in_one_line_what_rdma_lacks(world_size: int) -> None:
    done = run_mpi(world_size, EXAMPLES / "gpu_data_interchange.py")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("gpu_data_interchange.py: ")]
    assert "no remote transport between ranks" in line
    assert str(missing()) in line
    assert "Traceback" not in done.stderr
    assert "Success" not in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "training",
    [
        case
        for case in (
            Training(1, 64, 4, None),
            Training(3, 50, 4, None),
            Training(4, 51, 4, "proxy"),
            Training(4, 3, 1, "ring"),  # a batch of 3 leaves one of 4 ranks without samples
        )
        if world_sizes(case.world_size, processes=True)
    ],
    ids=str,
)
def test_data_parallel_training_ends_where_one_process_ends(training: Training) -> None:
    training.check(run_example(training.world_size, TRAINING, *training.options))


@pytest.mark.host_only(reason="the example chooses the host runtime")
def test_experts_heal_after_a_loss() -> None:
    done = run_alone(EXAMPLES / "heal_experts.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^step \d+: (.*); right results after", done.stdout, re.MULTILINE) == [
        "PeerLostError, ranks (2,) are lost",
        "all ranks are there again",
        "experts 1 and 7 have second places",
    ]
    assert done.stdout.splitlines()[-1].startswith("OK: all results are exact")


@pytest.mark.host_only(reason="more processes than most machines have GPUs")
def test_training_goes_on_after_a_loss_as_if_the_rank_had_never_been() -> None:
    program = EXAMPLES / "digits_after_a_loss.py"
    command = [sys.executable, str(program), "--ranks", "3", "--lose", "0", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the process of rank 0 ended" in done.stdout
    assert "2 of 3 ranks go on" in done.stdout
    assert "the weights are those of a training that had fewer ranks from there as planned" in done.stdout
    assert "rank 0 was killed; the other 2 have trained to the end" in done.stdout


def run_demo(*options: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env={**os.environ, **environment}
    )


# Runs only with --full: continuous integration runs `make demo`, and a test below lets a training of the demo fail.
@pytest.mark.full
def test_the_demo_reports_both_trainings_over_both_channels() -> None:
    done = run_demo("--ranks", "2", environment={})
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("training  ") :]
    for channel in ("SmChannel", "ProxyChannel"):
        assert len(re.findall(rf"\b{channel}\b", table)) == 2
    assert "All 4 trainings end where one process ends" in table


def test_the_demo_fails_with_the_reason_when_a_training_does() -> None:
    done = run_demo("--ranks", "2", environment={"PROXYCCL_RUNTIME": "abacus"})
    assert done.returncode == 1
    assert "demo failed: digits_data_parallel.py ended with exit code" in done.stderr
    assert "abacus" in done.stderr


# Without --full, three examples are compiled: one that can't run without RDMA, the shortest, and the one with most
# features.
ALWAYS_COMPILED = {"gpu_data_interchange.py", "custom_kernel.py", "fused.py"}


@pytest.mark.host_only(reason="needs only a compiler; on a GPU the examples themselves run")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS_COMPILED else pytest.mark.full) for name in sorted(KERNELS)]
)
def test_an_example_s_kernels_compile_for_a_gpu_as_they_are(name: str) -> None:
    names = kernel_names(KERNELS[name])
    exports = "".join(f"PROXYCCL_EXPORT_KERNEL({kernel})\n" for kernel in names)
    cubin = Nvrtc().compile(f'{KERNELS[name]}\n#include "proxyccl/kernel.h"\n{exports}', CUBIN)
    for kernel in names:
        assert f".text.{kernel}\0".encode() in cubin


def test_the_custom_kernel_is_short() -> None:
    path = EXAMPLES / "custom_kernel.py"
    docstring = ast.parse(path.read_text()).body[0]
    lines = path.read_text().splitlines()[docstring.end_lineno :]
    device = [line for line in KERNELS[path.name].splitlines() if line.strip()]
    python = [line for line in lines if line.strip()]
    assert len(device) <= 25
    assert len(python) - len(device) <= 25


def test_the_readme_has_a_line_for_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in readme
