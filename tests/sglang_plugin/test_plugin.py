"""SGLang's own groups, functions, layers and dispatchers with the plug-in, on ranks that are processes: on CPUs, or on
GPUs if PROXYCCL_RUNTIME names their runtime.
"""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.devices import ON_HOST, RUNTIME, require_devices
from support.paths import ROOT
from support.running import run_alone

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {"PROXYCCL_RUNTIME": RUNTIME, "OMP_NUM_THREADS": "1", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0"}


def outcomes(
    program: str, ranks: int, *arguments: str, lost: int | None = None, **variables: str
) -> list[dict[str, str]]:
    """Runs a program on ranks, and returns the outcome of each of its cases, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> dict[str, str]:
        given = (str(rank), str(ranks), str(port), *arguments)
        done = run_alone(PROGRAMS / program, *given, env={**ENVIRONMENT, "PROXYCCL_SGLANG": "1", **variables})
        if rank == lost:
            return {}
        assert done.returncode == 0, done.stdout + done.stderr
        made: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return made

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_sglangs_functions_and_layers(ranks: int) -> None:
    require_devices(ranks)
    for of_rank in outcomes("collectives.py", ranks, "plain"):
        assert len(of_rank) > 10
        assert {name: error for name, error in of_rank.items() if error} == {}


@pytest.mark.skipif(ON_HOST, reason="CPUs capture no graphs")
def test_sglangs_graphs() -> None:
    for of_rank in outcomes("collectives.py", 2, "captured"):
        assert {name: error for name, error in of_rank.items() if error} == {}


def test_nothing_is_replaced_without_the_switch() -> None:
    for of_rank in outcomes("collectives.py", 2, "off", PROXYCCL_SGLANG=""):
        assert {name: error for name, error in of_rank.items() if error} == {}


def test_deterministic_inference_makes_groups_invariant() -> None:
    for of_rank in outcomes("collectives.py", 2, "deterministic", SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1"):
        assert {name: error for name, error in of_rank.items() if error} == {}


def test_groups_give_memory_back_while_sglang_has_released_memory() -> None:
    for of_rank in outcomes("collectives.py", 3, "asleep", PROXYCCL_SUSPENDABLE="1"):
        assert {name: error for name, error in of_rank.items() if error} == {}


def test_a_lost_rank_is_named() -> None:
    assert outcomes("collectives.py", 2, "lost", lost=1)[0] == {"a_lost_rank": ""}


def test_sglangs_dispatchers_of_experts(tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()  # simulates that another package has overwritten deep_ep
    (tmp_path / "deep_ep/__init__.py").write_text("raise ImportError('another package wrote over this one')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for of_rank in outcomes("experts.py", 2, PYTHONPATH=path):
        assert {name: error for name, error in of_rank.items() if error} == {}


def test_the_benchmarks_decoder_gets_the_same_logits_with_and_without_the_plug_in(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--engine", "sglang", "--small", "--quick", "--batches", "3", "--contenders", "ProxyCCL", "SGLang's own"]
    done = run_alone(
        ROOT / "benchmarks/engine_decoder.py", *options, "--json", str(results), env=ENVIRONMENT, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())["contenders"]
    assert found["ProxyCCL"]["joined norms"] == 4  # two in each of two layers; the embedding reduces by itself
    assert found["SGLang's own"]["backend"] == ("gloo" if ON_HOST else "nccl")
