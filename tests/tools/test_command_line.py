"""The `proxyccl` command: its text and JSON output, and its errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from proxyccl import __version__
from proxyccl.__main__ import main
from proxyccl.channels.collectives import tuned
from proxyccl.channels.collectives.selection import CASES, Selector, SizeTable
from proxyccl.device.build.compile_cache import cache_dir
from proxyccl.device.process.cpu import cpu_name
from proxyccl.device.runtimes import RUNTIMES
from proxyccl.tools import info
from proxyccl.tools.tables import Column, Table
from support.running import run_alone, run_mpi

_INSTALLED = Path(sys.executable).with_name("proxyccl")
COMMAND = (str(_INSTALLED),) if _INSTALLED.exists() else ("-m", "proxyccl")  # -m needs no installation


def proxyccl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def refused(*arguments: str) -> str:
    result = proxyccl(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_bench_passes_arguments_on_to_the_benchmark() -> None:
    result = proxyccl("bench", "ring", "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ring.py")


def test_info_tells_what_there_is_and_how_to_get_the_rest() -> None:
    result = proxyccl("info")
    assert result.returncode == 0, result.stderr
    assert f"ProxyCCL {__version__}" in result.stdout
    for word in (*RUNTIMES, "host:0", "pyverbs", "mpi4py", "mpiexec", "compiler", "cache"):
        assert word in result.stdout


def test_the_version_is_all_that_is_printed() -> None:
    result = proxyccl("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"proxyccl {__version__}\n", "")


def machine_of(ranks: int, cpu: str) -> tuned.Machine:
    return tuned.Machine(cpu, 2, "cuda", "H200", (ranks,), {"mapped": ranks - 1}, "process")


def test_info_shows_the_measured_tables_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path))
    (none,) = info.findings()["Tuning"]
    assert not none.available
    assert f"no tables in {tmp_path / 'tuning'}" in none.detail
    assert "proxyccl tune" in none.advice

    selector = Selector.for_ranks(4, "cuda").with_table("all_gather", SizeTable(((1 << 20, "kernels"),), "proxy"))
    path = tuned.save(machine_of(4, cpu_name()), selector)
    tuned.save(machine_of(4, "another CPU"), selector)
    of_machine, *rows = info.findings()["Tuning"]
    assert str(path) in of_machine.detail
    assert "cuda runtime, 4 ranks on H200, links 3 mapped, proxy process" in of_machine.detail
    assert len(rows) == len(CASES)
    details = {row.detail for row in rows}
    assert {"all_gather of all types, symmetric arrays: kernels to 1 MiB, then proxy"} < details
    assert "broadcast of all types, other arrays: kernels" in details

    path.write_text("{}")
    (broken,) = info.findings()["Tuning"]
    assert not broken.available
    assert f"ignored: invalid tuning file from {path}" in broken.detail


@pytest.mark.slow
def test_tune_keeps_tables_that_info_shows(tmp_path: Path) -> None:
    for compiled in cache_dir().glob("*.so"):  # copies compiled kernels to the test's cache, but no tables
        shutil.copy(compiled, tmp_path)
    cache = {"PROXYCCL_CACHE": str(tmp_path)}
    result = run_mpi(2, *COMMAND, "tune", "-t", "0.01", env=cache)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (tmp_path / "tuning").iterdir()
    assert str(path) in result.stdout
    listed = run_alone(*COMMAND, "info", env=cache).stdout
    for case in CASES:
        assert str(case) in result.stdout
        assert str(case) in listed


def test_tune_needs_several_ranks() -> None:
    assert "ranks: expected several; start it with mpiexec" in refused("tune")


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("info", "--json")) == 0
    results = json.loads(capsys.readouterr().out)
    runtimes = {entry["name"]: entry for entry in results["runtimes"]}
    assert set(runtimes) == set(RUNTIMES)
    assert runtimes["host"]["available"]
    assert results["versions"]["proxyccl"] == __version__
    assert results["machine"]["cores"] >= 1
    assert {entry["name"] for entry in results["mpi"]} == {"mpi4py", "mpiexec"}
    for section in ("runtimes", "devices", "rdma", "fabric", "mpi", "kernels"):
        for entry in results[section]:
            assert entry["detail"], f"{section}/{entry['name']} gives no reason"


def test_info_lists_rdma_devices_and_one_line_of_what_is_missing(tmp_path: Path) -> None:
    devices = tmp_path / "class/infiniband"
    port = devices / "rxe0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("2.5 Gb/sec (1X SDR)\n")
    (devices / "down0/ports/1").mkdir(parents=True)
    found = {finding.name: finding for finding in info.findings(tmp_path)["RDMA"]}
    assert found["rxe0"].available
    assert found["rxe0"].detail == "port 1 active, ethernet, 2.5 Gbit/s, no GID"
    assert not found["down0"].available
    missing = [finding for finding in info.findings(tmp_path / "nowhere")["RDMA"] if not finding.available]
    assert [finding.name for finding in missing] == ["missing"]
    assert f"no RDMA device in {tmp_path / 'nowhere/class/infiniband'}" in missing[0].detail
    assert "rdma_rxe" in missing[0].advice


def test_info_says_what_to_install_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = (each for each in info.findings()["Kernels"] if each.name == "compiler")
    assert not finding.available
    assert "apt install g++" in finding.advice


def test_info_lists_the_variables_that_are_set_and_misspelt_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_TIMEOUT", "7")
    monkeypatch.setenv("PROXYCCL_TRANSPROT", "copy")
    found = {finding.name: finding for finding in info.findings()["Environment"]}
    assert (found["PROXYCCL_TIMEOUT"].available, found["PROXYCCL_TIMEOUT"].detail) == (True, "7")
    assert not found["PROXYCCL_TRANSPROT"].available
    assert found["PROXYCCL_TRANSPROT"].detail.endswith("; did you mean PROXYCCL_TRANSPORT?")


def test_info_names_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROXYCCL_CACHE", str(tmp_path / "file" / "cache"))
    (finding,) = (each for each in info.findings()["Kernels"] if each.name == "cache")
    assert not finding.available
    assert "PROXYCCL_CACHE" in finding.advice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("dance",), "dance"),
        (
            ("daemon", "--metrics", "70000"),
            "argument --metrics: expected a port from 0 to 65535, not '70000'",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_failure() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        result = subprocess.run(
            [sys.executable, *COMMAND, "info"], stdout=closed, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_table_aligns_titles_units_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table((Column("name", "", 6, left=True), Column("time", "(µs)", 7, ".1f")))
    table.header()
    table.row("ring", np.float64(12.34))
    table.row("proxy", None)
    assert capsys.readouterr().out.splitlines() == [
        "name       time",
        "           (µs)",
        "ring       12.3",
        "proxy         -",
    ]
