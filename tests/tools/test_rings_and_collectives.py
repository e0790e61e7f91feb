"""The benchmarks of the ring, and of collectives compared with MPI: their measurements and errors."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxyccl.channels.collectives.selection import ALGORITHMS
from proxyccl.device.host import HostRuntime
from support.devices import processes
from support.once import run_make
from support.paths import ROOT
from support.running import run_alone, run_mpi

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    run_make("bare-loops")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def test_the_ring_is_drained_by_the_engine_beside_the_bare_loop(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    result = run_alone(str(BENCHMARKS / "ring.py"), "-n", "2000", "-r", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    results = json.loads(path.read_text())
    rows = {row["trigger"]: row for row in results["drain"]}
    assert rows["bare loop"]["over_bare"] == 1.0
    assert {"put of 0 bytes", "signal", "flush", "put of 8 bytes"} <= set(rows)
    assert all(row["median_per_s"] > 0 for row in (*results["drain"], *results["kernels"]))
    assert all(row["bare"]["median_per_s"] > 0 for row in results["kernels"])
    assert results["round_trip"]["best_ns"] > 0
    assert results["round_trip"]["bare"]["best_ns"] > 0
    assert results["idle"]["policy"]["max_sleep_us"] > 0
    for name in rows:
        assert name in result.stdout


@pytest.mark.host_only(reason="GPUs' compilers are libraries")
def test_the_engine_is_measured_without_a_compiler(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    little = ("-t", "1", "-n", "1000", "-r", "1", "--fifo-size", "64", "--json", str(path))
    result = run_alone(str(BENCHMARKS / "ring.py"), *little, env={"CXX": "no-such-compiler"})
    assert result.returncode == 0, result.stderr
    results = json.loads(path.read_text())
    assert results["kernels"] is None
    assert "compiler" in results["kernels_missing"]
    assert "not measured" in result.stderr


def measured(tmp_path: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "results.json"
    sizes = ("-b", "100", "-e", "40K", "-f", "20", "-n", "2", "-w", "1", "--json", str(path))
    result = run_mpi(ranks, BENCHMARKS / "collectives.py", *arguments, *sizes)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "OK" in result.stdout
    results = json.loads(path.read_text())
    assert results["world_size"] == ranks
    rows: list[dict[str, Any]] = results["results"]
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)
    return rows


@pytest.mark.slow
def test_each_algorithm_of_all_reduce_is_measured_beside_mpi(tmp_path: Path) -> None:
    ranks = processes(2)
    rows = measured(tmp_path, ranks, "all_reduce", "--algorithm", "each")
    assert {row["algorithm"] for row in rows} == {"auto", *ALGORITHMS} - {"hierarchical"}  # of one node
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    assert sizes == [size - size % (4 * ranks) for size in (100, 2000, 40000)]
    for row in rows:
        assert row["mpi_time_us"] > 0
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 2 * (ranks - 1) / ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "dtype"),
    [
        ("reduce_scatter", "float32"),
        *(
            pytest.param(collective, "int64", marks=pytest.mark.full)
            for collective in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
        ),
    ],
)
def test_the_other_collectives_are_measured_beside_mpi(tmp_path: Path, collective: str, dtype: str) -> None:
    assert all(row["mpi_time_us"] > 0 for row in measured(tmp_path, 2, collective, "-d", dtype))


def test_a_type_that_mpi_lacks_is_measured_alone(tmp_path: Path) -> None:
    rows = measured(tmp_path, 1, "all_reduce", "-d", "bfloat16", "-o", "avg")
    assert all(row["mpi_time_us"] is None and row["busbw_gbs"] == 0 for row in rows)


def test_a_wrong_result_is_counted() -> None:
    class OneRank:
        rank, world_size = 0, 1
        runtime = HostRuntime()

    options = Namespace(collective="all_reduce", dtype="float32", op="sum")
    case = importlib.import_module("collectives").Case(OneRank(), None, options, 400, seed=1)
    case.output[:] = case.expected
    assert case.wrong() == 0
    case.output[7] += 1
    assert case.wrong() == 1
    case.poison()
    assert case.wrong() == case.count


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5), ("broadcast", 8, 1.0)],
)
def test_bus_factors_are_those_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert importlib.import_module("collectives").bus_factor(collective, ranks) == factor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", "-n", "0"), "expected a whole number from 1, not '0'"),
        (("ring", "-n", "10", "--fifo-size", "48"), "fifo_size: must be a power of two"),
        (("ring", "--json", "/no/such/directory/x.json"), "expected a file in an existing directory, not"),
        (("collectives",), "collective"),
        (("collectives", "all_reduce", "-b", "many"), "expected a size in bytes, such as 512, 32K or 4M, not 'many'"),
        (("collectives", "all_reduce", "-b", "1M", "-e", "1K"), "larger than --max-bytes"),
        (("collectives", "all_reduce", "-f", "1"), "expected a whole number from 2, not '1'"),
        (("collectives", "all_reduce", "-d", "float17"), "float17"),
        (("collectives", "all_reduce", "-o", "median"), "median"),
        (
            ("collectives", "all_reduce", "-a", "magic"),
            "unknown 'magic' for all_reduce; expected one of auto, each, one_shot",
        ),
        (
            ("collectives", "broadcast", "-a", "ring"),
            "unknown 'ring' for broadcast; expected one of auto, each, kernels, proxy",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(arguments))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(arguments[0]).main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
