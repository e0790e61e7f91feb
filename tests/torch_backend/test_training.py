"""Programs under torchrun: trainings, whose losses must equal those with torch's own backend, and jobs that lose a
rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4
GPUS = torch.cuda.device_count()
ON_GPUS = GPUS >= RANKS or GPUS == 2
SECONDS = 240


def torchrun(*arguments: str, ranks: int = RANKS, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program on `ranks` ranks of this machine."""
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*job, *options, *arguments], capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )


def losses(kind: str, backend: str) -> list[float]:
    """Runs a training and returns the losses that it prints."""
    done = torchrun(str(PROGRAMS / "training.py"), kind, backend, ranks=min(RANKS, GPUS) if ON_GPUS else RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    printed: list[float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return printed


@pytest.mark.parametrize("kind", ["ddp", "ddp_join", "ddp_compiled", "fsdp", "tensor_parallel", "pipeline"])
def test_a_training_has_the_losses_of_torchs_own_backend(kind: str) -> None:
    ours = losses(kind, "proxyccl")
    assert ours == pytest.approx(losses(kind, "nccl" if ON_GPUS else "gloo"), rel=1e-5)
    assert ours[-1] < ours[0]


def test_a_mixed_group_takes_the_backend_of_each_device() -> None:
    """init_process_group("cpu:gloo,cuda:proxyccl") makes a group that uses gloo for CPU tensors, without a GPU."""
    ours = losses("ddp", "cpu:gloo,cuda:proxyccl")
    assert ours[-1] < ours[0]


def test_a_job_that_loses_a_rank_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    done = torchrun(str(PROGRAMS / "elastic.py"), str(tmp_path / "checkpoint"), "kill", options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starts at step 0" in done.stdout
    assert "starts at step 3" in done.stdout
    assert "ends with 60" in done.stdout
    # torchrun usually ends the other ranks before they report the lost rank.
    for line in done.stdout.splitlines():
        if line.startswith("rank "):
            assert f"rank {RANKS - 1}" in line


def test_ranks_may_leave_without_destroying_their_group(tmp_path: Path) -> None:
    done = torchrun(str(PROGRAMS / "elastic.py"), str(tmp_path / "none"), "leave", ranks=2)
    assert done.returncode == 0
    assert "proxyccl" not in done.stdout + done.stderr
