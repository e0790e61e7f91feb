"""programs.py, the benchmark of whole programs, and its example succeed on CPUs and report every row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

pytest.importorskip("torch")

from proxyccl.torch.issuing import IS_BACKEND

pytestmark = pytest.mark.host_only(reason="on GPUs the benchmark itself runs")

SECONDS = 400


def run_programs(options: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs programs.py with `options` on the host runtime."""
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "programs.py"), *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PROXYCCL_RUNTIME": "host"},
        check=False,
    )


def test_programs_run_beside_gloo_and_report_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "programs.json"
    options = ["--quick", "--json", str(path), "-t", str(SECONDS), "-p", "trainings", "moe", "calls"]
    options += ["--cases", "fsdp-f32", "--variant", "default", "--variant", "1+proxy+registered"]
    done = run_programs(options)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    names = {row["program"]: [value["name"] for value in row["values"]] for row in results["rows"]}
    groups = ["proxyccl", "proxyccl, 1+proxy+registered", "gloo"]
    nothing = [] if IS_BACKEND else ["nothing"]  # "nothing" is a process group whose calls do nothing
    assert names["FSDP2 step, float32, 512 rows, tiny"] == groups + nothing
    assert names["mixture of experts, 8 layers"] == ["proxyccl", "gloo"]
    assert {"torch.distributed", "Communicator.all_reduce", "EPAll2AllLayer, 8 tokens"} <= set(names)
    assert all(value["value"] > 0 for row in results["rows"] for value in row["values"])


def test_programs_of_others_run_by_each_contender_and_agree(tmp_path: Path) -> None:
    path = tmp_path / "programs.json"
    families = ("tensor-parallel", "pipelines", "functional", "new-tensors")
    options = ["--quick", "--json", str(path), "-p", *families, "--contenders", "proxyccl", "peer"]
    done = run_programs(options)
    assert done.returncode == 1, done.stdout + done.stderr  # a program that can't run is a failure
    results = json.loads(path.read_text())
    assert results["failed"] == {
        "two copies of DTensor TP, sequence parallel, under FSDP2": "not run: it takes 4 ranks"
    }
    names = {row["program"]: [value["name"] for value in row["values"]] for row in results["rows"]}
    some = {"DTensor TP, sequence parallel, under FSDP2", "pipeline, GPipe", "pipeline, DualPipeV"}
    some |= {"functional collectives, eager", "all_gather, new tensors, 256 KiB"}
    assert some <= set(names)
    assert all(each == ["proxyccl", "gloo"] for each in names.values())
    values = [value for row in results["rows"] for value in row["values"]]
    assert all(value[key] > 0 for value in values for key in ("value", "first_ms", "late", "cpu_ms"))


def test_weights_go_from_an_fsdp_trainer_to_samplers() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "weights.py"), "--hidden", "64"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PROXYCCL_RUNTIME": "host"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK: ")
    read = set(re.findall(r"sampler (\d), step (\d): \d+ bytes, [\d.]+ GB/s, bit for bit", done.stdout))
    # A sampler may also read step 1 if it connects while the trainer still offers this step.
    assert read - {("0", "1"), ("1", "1")} == {(sampler, step) for sampler in "01" for step in "2345"}
    assert done.stdout.count("sampler 1 has ended") == 2
