"""Runs the benchmark programs that need no GPU, compiles the others' kernels, and checks the page of results.

Without --full only some programs run. Pages made from fictitious results show each program's section.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description, Publication
from proxyccl.tools.options import show_size, size
from support.kernels.nvrtc import CUBIN, Nvrtc
from support.once import run_make
from support.paths import ROOT
from support.running import find_mpiexec, run_alone, run_mpi

pytestmark = pytest.mark.slow

BENCHMARKS = ROOT / "benchmarks"


def make_page(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "results_page.py"), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def result(benchmark: str, date: str = "2000-01-01T00:00:00+00:00", **fields: Any) -> dict[str, Any]:
    """A fictitious result, with the fields that every program writes."""
    machine = {"system": "Linux 1", "cpu": "a CPU", "cores": 2}
    common = {"benchmark": benchmark, "date": date, "machine": machine, "versions": {"proxyccl": "1"}}
    return {**common, "runtime": "cuda", **fields}


def all_reduce_result(ranks: int, time_us: float, **fields: Any) -> dict[str, Any]:
    rows = [
        {"size": 1024, "count": 256, "type": "float32", "redop": "sum", "name": name, "ours": ours, "time_us": us}
        | {"best_us": us, "algbw_gbs": 1.0, "busbw_gbs": 1.5, "calls": 50, "wrong": 0, "reason": reason}
        for name, ours, us, reason in (
            ("one_shot", True, time_us, ""),
            ("NCCL", False, 15.25, ""),
            ("torch one-shot", False, None, "no symmetric memory"),
        )
    ]
    compared = {"size": 1024, "type": "float32", "auto_us": None, "ours_us": time_us, "ours": "one_shot"}
    compared |= {"peer_us": 15.25, "peer": "NCCL", "peer_over_auto": None, "peer_over_ours": 15.25 / time_us}
    return result(
        "all_reduce",
        **{"world_size": ranks, "peers": {"NCCL": "2.99"}, "device": "a GPU", "results": rows}
        | {"comparison": [{**compared, "aim_us": 3.56}], "geometric_means": {"float32": {"peer_over_ours": 2.0}}},
        **fields,
    )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import programs

    return programs


def test_put_and_signal_run_on_the_host_and_are_shown(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "put_signal.json"
    done = run_mpi(2, BENCHMARKS / "put_signal.py", "--quick", "--json", str(path), env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# out of bounds values: 0 OK" in done.stdout
    results = json.loads(path.read_text())
    assert results["wrong"] == 0
    assert [row["bytes"] for row in results["latency"]][:2] == [0, 1024]
    assert all(row["one_way_us"] > 0 for row in (*results["latency"], *results["sm_latency"]))
    assert all(row["gbs"] > 0 for row in (*results["bandwidth"], *results["sm_bandwidth"]))
    assert [row["operation"] for row in results["completion"]][:2] == ["put", "get"]
    assert all(row["flush_us"] > 0 and row["ticket_us"] > 0 for row in results["completion"])
    assert all(row["put_gbs"] > 0 and row["get_gbs"] > 0 for row in results["get_bandwidth"])
    beside = [(row["program"], [value["value"] > 0 for value in row["values"]]) for row in programs.of_values(results)]
    assert ("putValueWithSignal, 8 B", [True, True]) in beside
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "signal alone" in page
    assert "both ways" in page


@pytest.mark.full
def test_the_first_result_of_new_processes_is_timed_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "first_result.json"
    options = ("--ranks", "2", "--quick", "--mpiexec", find_mpiexec(), "--json", str(path))
    done = run_alone(str(BENCHMARKS / "first_result.py"), *options, env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    for row in results["stages_s"].values():
        stages = [row[stage] for stage in ("interpreter", "imports", "communicator", "first result")]
        assert stages[0] > 0
        assert stages == sorted(stages)
    assert results["proxied_at_2_s"]["value"] > 0
    results |= {"over_nccl": {"value": 0.25, "aim": 0.5}, "daemon_bytes_of_each_gpu": 512 << 20}  # as on GPUs
    path.write_text(json.dumps(results))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "0.25 of NCCL's time" in page
    assert "takes 512 MiB of each GPU" in page


@pytest.mark.full
def test_execution_plans_run_on_the_host() -> None:
    program = BENCHMARKS / "execution_plans.py"
    done = run_mpi(2, program, "--quick", env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("two_shot", "plan, writes", "plan, reads and writes", "plan, packets"):
        assert len(re.findall(rf"^ +\d+ .*ProxyCCL {name} .* 0$", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert re.search(r"^ +4 KiB +float32( +[\d.]+){2} +plan, [a-z ]+[\d.]+$", done.stdout, re.MULTILINE), done.stdout
    assert "# out of bounds values: 0 OK" in done.stdout


@pytest.mark.full
def test_norms_run_on_the_host_and_are_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "norms_2.json"
    options = ("--quick", "--rows", "1", "5", "--width", "136", "--json", str(path))
    done = run_mpi(2, BENCHMARKS / "norms.py", *options, env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["comparison"]
    assert [row["rows"] for row in rows] == [1, 5]
    assert all(time > 0 for row in rows for time in list(row["times_us"].values())[:3])
    assert make_page(tmp_path).returncode == 0
    assert "all_reduce with RMSNorm" in (tmp_path / "README.md").read_text()


@pytest.mark.full
def test_calls_after_a_rest_are_measured_on_the_host(tmp_path: Path, programs: Any) -> None:
    path, options = tmp_path / "rest.json", ("--quick", "--policy", "default", "--policy", "always awake")
    program = BENCHMARKS / "after_a_rest.py"
    done = run_mpi(2, program, *options, "--json", str(path), env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    found = [(row["by"], row["place"], row["policy"]) for row in rows]
    proxied = [("proxy", place, policy) for place in ("thread", "process") for policy in ("default", "always awake")]
    assert [each for each in found if "daemon" not in each] == [("kernels", "", ""), *proxied]
    of_programs = programs.of_rests(json.loads(path.read_text()))
    assert [row["figure"] for row in of_programs] == [f"after {rest} ms of rest" for rest in (0, 1, 10, 100)]
    assert of_programs[0]["values"][0]["name"] == "proxyccl, proxy, process"
    assert make_page(tmp_path).returncode == 0
    assert "| proxy | call | process | always awake |" in (tmp_path / "README.md").read_text()


@pytest.mark.full
def test_communicators_of_fewer_ranks_are_made_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "regroup.json"
    done = run_mpi(3, BENCHMARKS / "regroup.py", "--quick", "--json", str(path), env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# wrong results: 0" in done.stdout
    assert "NCCL does not run on the host runtime" in done.stdout
    ways = r"^(?:abort, )?(?:Communicator|split|shrink)(?: +[\d.]+){2}$"
    assert len(re.findall(ways, done.stdout, re.MULTILINE)) == 5, done.stdout
    assert json.loads(path.read_text())["wrong"] == 0
    assert make_page(tmp_path).returncode == 0
    assert "| abort, shrink |" in (tmp_path / "README.md").read_text()


# Runs only with --full: the examples run the same Triton kernels, and triton_kernels/ checks them.
@pytest.mark.full
@pytest.mark.host_only(reason="it runs Triton's interpreter")
@pytest.mark.parametrize("products", [False, True])
def test_kernels_in_triton_are_checked_beside_cpp_on_the_host(tmp_path: Path, products: bool) -> None:
    path, program = tmp_path / "triton.json", BENCHMARKS / "triton_kernels.py"
    seconds = "120" if products else "1"
    done = run_mpi(2, program, "--seconds", seconds, "--json", str(path), env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# out of bounds values: 0 OK" in done.stdout
    results = json.loads(path.read_text())
    measured = {(row["what"].split(",")[0], row["name"]) for row in results["results"] if row["time_us"]}
    for what in ("put + signal", "diffusion", "all_reduce", "all_to_all"):
        assert {(what, "C++"), (what, "Triton")} <= measured
    if products:
        for what in ("GEMM+all_reduce", "all_gather+GEMM"):
            assert (what, "Triton, overlapped") in measured
        assert results["not_measured"] == []


def test_put_and_signal_refuse_another_number_of_ranks() -> None:
    done = run_mpi(1, BENCHMARKS / "put_signal.py", "--quick", env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode != 0
    assert "needs 2 ranks, not 1" in done.stderr


PERFTEST = """
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 TX depth        : 128
 Mtu             : 4096[B]
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0xe8956c RKey 0x0002bd VAddr 0x005595436ef000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
{rows}
---------------------------------------------------------------------------------------
"""
ROW = " 65536      300              53.24              37.12  \t\t   0.000594"


@pytest.fixture
def bandwidth_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], float]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import perftest

    return perftest.bandwidth_of


def test_the_bandwidth_of_ib_write_bw_is_read(bandwidth_of: Callable[[str], float]) -> None:
    assert bandwidth_of(PERFTEST.format(rows=ROW)) == 37.12 * (1 << 20)


@pytest.mark.parametrize(
    "output",
    ["", "Couldn't connect", PERFTEST.format(rows=""), PERFTEST.format(rows=f"{ROW}\n{ROW}")],
    ids=["nothing", "an error", "no row", "two rows"],
)
def test_output_without_a_bandwidth_is_refused(bandwidth_of: Callable[[str], float], output: str) -> None:
    with pytest.raises(ValueError, match="no bandwidth in the output of ib_write_bw"):
        bandwidth_of(output)


def test_rdma_writes_are_shown(tmp_path: Path) -> None:
    rows = [
        {"name": name, "ours": ours, "bytes": nbytes, "writes": 500, "rounds": 7, "median_per_s": rate}
        | {"best_per_s": rate, "median_gbs": nbytes * rate / 1e9, "over": {"peer": rate / 1000, "ring": 1.0}}
        for nbytes in (8, 65536)
        for name, ours, rate in (("peer", False, 1000.0), ("ring", True, 1250.0))
    ]
    fields = {"note": "emulated", "wrong": 0, "rate": rows[:2], "bandwidth": rows[2:], "peers": {"perftest": "6"}}
    (tmp_path / "rdma.json").write_text(json.dumps(result("rdma_writes", **fields)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    for text in ("emulated.", "perftest 6", "Writes of 64 KiB, 500 in each of 7 rounds; aim of the ratio 0.95"):
        assert text in page
    assert "| ring (ours) | 1,250 | 1,250 | 81.92 | 1.25 | 1.00 |" in page


def test_writes_through_libfabric_are_shown(tmp_path: Path) -> None:
    rows = [
        {"bytes": nbytes, "bare_per_second": 1000.0, "ours_per_second": 960.0, "ratio": 0.96, "aim": aim}
        for nbytes, aim in ((8, 0.9), (1 << 20, 0.95))
    ]
    beside = {"iperf3_bytes_per_second": 2e9, "fi_pingpong_8_us": 113.25}
    (tmp_path / "fabric.json").write_text(json.dumps(result("fabric_writes", rows=rows, beside=beside, wrong=0)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "iperf3's one stream of TCP carried 2,000 MB/s; fi_pingpong took 113.2 µs for 8 B one way" in page
    assert "| 1 MiB | 1,000 | 960 | 1,006.6 | 0.96 | 0.95 |" in page


# put_signal.py runs only with --full: a test above runs it on the host, and examples compile its channels for NVIDIA.
@pytest.mark.parametrize(
    "path",
    [pytest.param(BENCHMARKS / "put_signal.py", marks=pytest.mark.full), BENCHMARKS / "ring.py"],
    ids=["put_signal", "ring"],
)
def test_the_kernels_compile_for_nvidia(path: Path) -> None:
    source = re.search(r'_SOURCE = r"""(.*?)"""', path.read_text(), re.DOTALL)
    assert source is not None
    assert Nvrtc().compile(source[1], CUBIN)


def test_the_page_begins_with_programs_and_the_share_of_the_cpu(tmp_path: Path, programs: Any) -> None:
    step = [programs.figure("proxyccl", 24.5, 0.75), programs.figure("nccl", 28.0, 0.8, ours=False)]
    trained = {"name": "nccl", "captured": False, "tokens_per_second": 5e4, "cpu_share": 0.5}
    rows = [programs.row("FSDP2 step", "a step", "ms", step), programs.of_a_mixture(trained)]
    fields = {"world_size": 2, "device": "a GPU", "failed": {"values": "ended after 40 s"}}
    (tmp_path / "z.json").write_text(json.dumps(result("programs", **fields, rows=rows)))
    (tmp_path / "a.json").write_text(json.dumps(all_reduce_result(2, 3.25)))
    done = make_page(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "README.md").read_text()
    assert page.index("## Programs on 2 GPUs") < page.index("## all_reduce on 2 GPUs")
    assert "| FSDP2 step | a step, ms | proxyccl (ours) | 24.50 | 0.75 |  |" in page
    assert "|  |  | nccl | 28.00 | 0.80 | 1.14 |" in page
    assert "| mixture of experts, 8 layers | training, eager, tokens/s | nccl | 50,000 | 0.50 |" in page
    assert "- Not measured: values, ended after 40 s." in page


def test_a_program_s_part_that_hangs_is_ended_with_the_rows_that_it_had(tmp_path: Path, programs: Any) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        "import json, time\n"
        'value = {"name": "n", "value": 1.0, "cpu_share": None}\n'
        'row = {"program": "p", "figure": "f", "unit": "ms", "values": [value]}\n'
        'print("RESULT " + json.dumps(row), flush=True)\n'
        "time.sleep(600)\n"
    )
    collected = programs.Collected(tmp_path / "programs.json", {})
    part, parsed = programs.Part((str(program),), 3), SimpleNamespace(ranks=2, quick=False, cases=[])
    programs.run("hanging", part, parsed, [], collected, tmp_path)
    written = json.loads((tmp_path / "programs.json").read_text())
    assert [row["program"] for row in written["rows"]] == ["p"]
    assert written["failed"] == {"hanging": "ended after 3 s"}


def test_a_program_of_others_that_dies_costs_no_other_and_wrong_outputs_are_told(
    tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import json, os, sys\n"
        "by = sys.argv[sys.argv.index('--by') + 1]\n"
        "for title in iter(sys.stdin.readline, ''):\n"
        "    title = title.strip()\n"
        "    for turn in range(2):\n"
        "        print('TURN', flush=True)\n"
        "        assert sys.stdin.readline().strip() == 'GO'\n"
        "        if title.endswith('save of FSDP2') and by == 'proxyccl':\n"
        "            sys.exit(3)\n"
        "    value = {'name': by, 'ours': by != 'gloo', 'value': 1.0, 'cpu_share': None}\n"
        "    value['outputs'] = [[1.0, float('nan') if by == 'proxyccl, unlent' else 1.0]]\n"
        "    row = {'program': title, 'figure': 'a step', 'unit': 'ms', 'values': [value]}\n"
        "    print('RESULT ' + json.dumps(row), flush=True)\n"
    )
    monkeypatch.setattr(programs, "_OTHERS", program)
    monkeypatch.setenv("PROXYCCL_RUNTIME", "host")
    collected = programs.Collected(tmp_path / "programs.json", {})
    contenders = ["proxyccl", "peer", "proxyccl, unlent"]
    parsed = SimpleNamespace(ranks=1, quick=False, seconds=60, contenders=contenders)
    programs.run_others(["checkpoint"], parsed, time.monotonic() + 60, collected, tmp_path)
    written = json.loads((tmp_path / "programs.json").read_text())
    names = {row["program"]: [value["name"] for value in row["values"]] for row in written["rows"]}
    assert names["DCP load of FSDP2"] == ["proxyccl", "gloo", "proxyccl, unlent"]
    assert written["failed"] == {
        "DCP save of FSDP2 by proxyccl": "status 3",
        "DCP save of FSDP2 by proxyccl, unlent": "its outputs differ by inf of the largest from gloo's",
        "DCP load of FSDP2 by proxyccl, unlent": "its outputs differ by inf of the largest from gloo's",
    }


def test_the_page_shows_deep_eps_normal_mode_beside_nccl(tmp_path: Path) -> None:
    rows = [
        {"tokens": 128, "name": name, "dispatch_us": us, "combine_us": 2.0, "issuing_us": 3.0, "wrong": 0}
        for name, us in (("Buffer, num_worst_tokens", 20.25), ("NCCL", 25.0))
    ]
    fields = {"world_size": 2, "device": "a GPU", "peers": {}, "hidden": 8, "topk": 2, "experts": 4, "method": "bursts"}
    made = result("deep_ep_buffer", **fields, results=rows)
    (tmp_path / "deep_ep_buffer_2.json").write_text(json.dumps(made))
    done = make_page(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "README.md").read_text()
    assert "a dispatch takes 20 µs for 128 tokens (NCCL moves the bytes in 25 µs)" in page
    assert "| 128 | Buffer, num_worst_tokens | 20.2 | 2.0 | 3.0 |" in page


def test_the_page_shows_tables_with_origin_peers_and_aims(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(all_reduce_result(4, 4.75)))
    (tmp_path / "b.json").write_text(json.dumps(all_reduce_result(2, 3.25)))
    done = make_page(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "README.md").read_text()
    for text in ("all_reduce on 4 GPUs", "all_reduce on 2 GPUs", "a GPU; a CPU, 2 cores", "NCCL 2.99", "2000-01-01"):
        assert text in page
    assert "| 1 KiB | **4.75** | 15.25 | - | 1.5 |" in page
    assert "- torch one-shot: no symmetric memory" in page
    assert "Wrong elements in all checks: 0." in page


def test_the_page_shows_the_latest_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(all_reduce_result(4, 1.5, date="2000-01-02T00:00:00+00:00")))
    (tmp_path / "b.json").write_text(json.dumps(all_reduce_result(4, 9.5)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "**1.50**" in page
    assert "9.50" not in page


def test_results_of_another_runtime_are_shown_beside(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(all_reduce_result(4, 1.5)))
    (tmp_path / "b.json").write_text(json.dumps(all_reduce_result(4, 9.5, runtime="host")))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    for text in ("## all_reduce on 4 GPUs", "## all_reduce on 4 ranks of the host runtime", "**1.50**", "**9.50**"):
        assert text in page


def test_other_parts_of_a_program_are_shown_beside(tmp_path: Path) -> None:
    result = {**all_reduce_result(2, 1.0), "benchmark": "programs", "rows": [], "failed": {}}
    (tmp_path / "a.json").write_text(json.dumps({**result, "date": "2000-01-02T00:00:00+00:00"}))
    (tmp_path / "b.json").write_text(json.dumps({**result, "title": "Calls after a rest"}))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "## Programs on 2 GPUs" in page
    assert "## Calls after a rest on 2 GPUs" in page


def test_the_page_begins_with_what_matters_and_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(daemon_result(cores=2)))
    (tmp_path / "b.json").write_text(json.dumps(all_reduce_result(4, 4.0)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    rows = re.findall(r"^\| \[(.+)\]\(#(.+)\) \| (.+) \|$", page, re.MULTILINE)
    assert [title for title, _, _ in rows] == ["all_reduce on 4 GPUs", "The node daemon on 4 ranks of the host runtime"]
    assert rows[1][1] == "the-node-daemon-on-4-ranks-of-the-host-runtime"
    assert "latency is at most 1.50 times that with proxies in the ranks (aim: 1.15)" in rows[1][2]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [title for title, _, _ in rows]


def daemon_result(*, cores: int, **fields: Any) -> dict[str, Any]:
    def compared(what: str, thread: float, daemon: float, aim: float) -> dict[str, Any]:
        return {"what": what, "thread": thread, "daemon": daemon, "ratio": daemon / thread, "aim": aim}

    measured = {
        "latency_us": [compared("signal", 8.0, 12.0, 1.15), compared("put", 5.0, 5.25, 1.15)],
        "triggers_per_s": [compared("pushed by a kernel", 50e6, 40e6, 0.9)],
        "cores": {
            "idle": {"thread": 0.04, "daemon": 0.01},
            "busy": {"thread": 1.25, "daemon": 0.75},
            "triggers_per_s": {"thread": 50000.0, "daemon": 49000.0},
        },
    }
    machine = {"system": "Linux 1", "cpu": "a CPU", "cores": cores}
    return result(
        "daemon", **{"runtime": "host", "world_size": 4, "threads": 1, "machine": machine, **measured, **fields}
    )


def test_collectives_of_the_host_run_and_are_shown_beside_mpis(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    sizes = ("-s", "1K", "64K", "-r", "2", "--json", str(path))
    completed = run_mpi(2, BENCHMARKS / "host_collectives.py", *sizes)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    rows = json.loads(path.read_text())["results"]
    assert [(row["collective"], row["size"]) for row in rows] == [
        (collective, nbytes)
        for collective in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
        for nbytes in (1 << 10, 1 << 16)
    ]
    assert all(row["wrong"] == 0 for row in rows)
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    long = rows[1]
    least = f"{long['mpi_over_registered']:,.2f}"
    assert f"all_reduce of registered arrays from 64 KiB on: MPI takes at least {least} times our time (aim: 1)" in page
    assert f"| 64 KiB | {long['registered_us']:,.1f} | {long['private_us']:,.1f} | {long['mpi_us']:,.1f} |" in page


# Runs only with --full: a page of fictitious results shows the same rows, and `collectives.py` measures the same calls.
@pytest.mark.full
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "all_reduce"])
def test_collectives_without_a_gpu_run_and_name_the_missing_peers(tmp_path: Path, collective: str) -> None:
    path = tmp_path / "collective.json"
    sizes = ("-s", "1K", "64K", "-r", "1", "-d", "float32", "bfloat16", "--json", str(path))
    done = run_mpi(2, BENCHMARKS / f"{collective}.py", *sizes, env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# out of bounds values: 0 OK" in done.stdout
    assert "# bfloat16 is not measured" in done.stdout
    rows = json.loads(path.read_text())["results"]
    registered = [row for row in rows if row["name"] == "registered_proxy"]
    assert [row["size"] for row in registered] == [1 << 10, 1 << 16]
    assert all(row["time_us"] > 0 and row["wrong"] == 0 for row in registered)
    assert all(row["reason"] == "it needs GPUs" for row in rows if row["name"].startswith("NCCL"))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert f"## {collective} on 2 ranks of the host runtime" in page
    assert "registered_proxy (ours)" in page
    assert "- NCCL: it needs GPUs" in page


@pytest.mark.full
def test_collectives_beside_products_run_without_a_gpu_and_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    little = ("-s", "64K", "-r", "1", "--rows", "64", "--json", str(path))
    done = run_mpi(2, BENCHMARKS / "overlap.py", *little, env={"PROXYCCL_RUNTIME": "host"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["results"]
    by_proxy = [row for row in rows if row["name"] == "registered_proxy"]
    assert [row["collective"] for row in by_proxy] == ["all_gather", "all_to_all", "all_reduce"]
    assert all(row["wrong"] == 0 for row in rows)
    assert all(row[key] > 0 for row in by_proxy for key in ("alone_us", "beside_us", "product_beside_us"))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    for row in by_proxy:
        assert f"### {row['collective']} beside products" in page
        assert f"| 64 KiB | registered_proxy (ours) | - | {row['alone_us']:,.2f} | {row['beside_us']:,.2f} |" in page
    assert "- NCCL, copy engines: it needs GPUs" in page


def test_the_page_shows_copy_engines_and_multiprocessors(tmp_path: Path) -> None:
    rows = [
        {"size": size, "count": size // 4, "type": "float32", "redop": None, "name": name, "ours": ours, "time_us": us}
        | {"best_us": us, "algbw_gbs": 1.0, "busbw_gbs": 0.5, "calls": 50, "wrong": 0, "reason": ""}
        | {"multiprocessors": used}
        for size, name, ours, us, used in (
            (1024, "registered_kernels", True, 4.0, 1),
            (1 << 16, "registered_kernels", True, 5.0, 32),
            (1 << 16, "registered_proxy", True, 16.0, 0),
            (1 << 16, "NCCL, copy engines", False, 20.0, None),
        )
    ]
    compared = {"size": 1 << 16, "type": "float32", "nccl_over_kernels": None, "nccl_over_proxy": None}
    fields = {"comparison": [{**compared, "copy_engines_over_proxy": 1.25}], "geometric_means": {"float32": 1.5}}
    written = result("all_gather", world_size=2, results=rows, **fields)
    (tmp_path / "a.json").write_text(json.dumps(written))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "| registered_kernels (ours) | 1 | 32 |" in page
    assert "| registered_proxy (ours) | 0 | 0 |" in page
    assert "| NCCL, copy engines | 0" not in page  # an unknown number is not shown as 0
    assert "| 64 KiB | - | - | 1.25 |" in page
    assert "from 64 KiB on, NCCL by copy engines takes at least 1.25 times our time by proxy (aim: at least 1)" in page


@pytest.mark.parametrize(("ranks", "said"), [(2, True), (4, False)])
def test_an_all_reduce_by_proxy_is_shown_beside_its_aims(tmp_path: Path, ranks: int, said: bool) -> None:
    written = all_reduce_result(ranks, 4.0)
    written["comparison"][0] |= {"registered_proxy_us": 12.5, "peer_over_registered_proxy": 1.22}
    (tmp_path / "a.json").write_text(json.dumps(written))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "| 12.50 | 1.22 | 3.56 |" in page
    aim = "By proxy with registered arrays, 1 KiB: 12.50 µs, the best peer 15.25 µs; aim: at most 16 µs."
    assert (aim in page) == said  # the page states the target only for 2 GPUs


def test_proxies_in_a_process_are_shown_beside_proxies_in_the_ranks(tmp_path: Path) -> None:
    def compared(what: str, thread: float, process: float, aim: float) -> dict[str, Any]:
        return {"what": what, "thread": thread, "process": process, "ratio": process / thread, "aim": aim}

    fields = {
        "latency_us": [compared("signal", 8.0, 10.0, 1.15)],
        "triggers_per_s": [compared("pushed by a kernel", 50e6, 40e6, 0.9)],
        "issue_us": [compared("all_reduce of 1 KiB", 4.0, 5.0, 1.15)],
        "start_ms": [compared("the first use", 25.0, 500.0, 1.15)],
    }
    (tmp_path / "place.json").write_text(json.dumps(result("proxy_place", world_size=2, **fields)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    for text in (
        "## Proxies in a process of their own on 2 GPUs",
        "| signal | 8.00 | 10.00 | 1.25 | at most 1.15 |",
        "| pushed by a kernel | 50.00 | 40.00 | 0.80 | at least 0.9 |",
        "| all_reduce of 1 KiB | 4.00 | 5.00 | 1.25 | at most 1.15 |",
        "takes 500 ms where that starts the process, and 25 ms where it starts a thread",
    ):
        assert text in page


class FakeGraphs:
    """Fakes the driver calls of `graph_kernels`. A graph is a list of grids (kernels), lists (graphs) and None
    (copies).
    """

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=1, CU_GRAPH_NODE_TYPE_GRAPH=2)

    def __init__(self, *, status: int = 0) -> None:
        self.status = status

    def CUgraph(self, graph: Any) -> Any:  # noqa: N802  the method has the name of the driver's function
        return graph

    def cuGraphGetNodes(self, graph: Any, count: int) -> tuple[Any, ...]:  # noqa: N802
        return self.status, graph[:count], len(graph)

    def cuGraphNodeGetType(self, node: Any) -> tuple[Any, ...]:  # noqa: N802
        return 0, 0 if node is None else 1 if isinstance(node, tuple) else 2

    def cuGraphKernelNodeGetParams(self, node: Any) -> tuple[Any, ...]:  # noqa: N802
        return 0, SimpleNamespace(gridDimX=node[0], gridDimY=node[1], gridDimZ=node[2])

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> tuple[Any, ...]:  # noqa: N802
        return 0, node


@pytest.fixture
def multiprocessors_used(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any, int], int]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import graph_kernels

    return graph_kernels.multiprocessors_used


@pytest.mark.parametrize(
    ("graph", "used"),
    [([], 0), ([None], 0), ([(4, 2, 1), None, (3, 1, 1)], 8), ([[(1, 1, 5)], None], 5), ([(200, 1, 1)], 132)],
    ids=["nothing", "copies", "the largest kernel", "a graph in the graph", "more blocks than multiprocessors"],
)
def test_a_graph_tells_the_multiprocessors_that_it_uses(
    multiprocessors_used: Callable[[Any, Any, int], int], graph: Any, used: int
) -> None:
    assert multiprocessors_used(FakeGraphs(), graph, 132) == used


def test_a_driver_that_refuses_to_tell_of_a_graph_is_named(
    multiprocessors_used: Callable[[Any, Any, int], int],
) -> None:
    with pytest.raises(RuntimeError, match="cuGraphGetNodes failed: 1"):
        multiprocessors_used(FakeGraphs(status=1), [], 132)


def test_the_daemon_is_shown_beside_proxies_in_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text(json.dumps(daemon_result(cores=2)))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    for text in (
        "| signal | 8.00 | 12.00 | 1.50 | at most 1.15 |",
        "| pushed by a kernel | 50.00 | 40.00 | 0.80 | at least 0.9 |",
        "| idle | 0.040 | 0.010 | 0.25 |",
        "| busy: 49,000 puts with signals a second | 1.250 | 0.750 | 0.60 |",
    ):
        assert text in page


@pytest.mark.parametrize(("runtime", "cores", "said"), [("host", 2, True), ("host", 4, False), ("cuda", 2, False)])
def test_latency_without_cores_for_it_is_shown_as_such(tmp_path: Path, runtime: str, cores: int, said: bool) -> None:
    (tmp_path / "daemon.json").write_text(json.dumps(daemon_result(cores=cores, runtime=runtime)))
    assert make_page(tmp_path).returncode == 0
    assert ("A ping-pong of two kernels wants 4 cores" in (tmp_path / "README.md").read_text()) == said


@pytest.mark.parametrize("alone", [True, False], ids=["on the host, with the engine alone", "on a GPU"])
def test_the_cost_of_observing_is_shown(tmp_path: Path, alone: bool) -> None:
    def row(nobody: float, looked_at: float, traced: float, **names: str) -> dict[str, Any]:
        figures = {"nobody looks": (nobody, 1.0), "looked at": (looked_at, 0.98), "traced": (traced, 0.94)}
        modes = {
            mode: {"median": value, "best": value, "rate_of_unobserved": r} for mode, (value, r) in figures.items()
        }
        return {"trigger": "signal", **names, **modes}

    engine = [row(3.25, 3.5, 3.75)] if alone else []
    kernels = [row(50e6, 49e6, 47e6, producers="1 thread")]
    runtime = "host" if alone else "cuda"
    results = result("observing", runtime=runtime, repeats=3, engine_alone=engine, kernels=kernels)
    (tmp_path / "observing.json").write_text(json.dumps(results))
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "| signal | 1 thread | 50.00 | 49.00 | 0.98 | 47.00 | 0.94 |" in page
    assert "kernels that push, 0.98 while its counters are read and 0.94 while it is traced" in page
    assert ("| signal | 3.25 | 3.50 | 0.98 | 3.75 | 0.94 |" in page) == alone
    assert ("the engine alone, 0.98" in page) == alone
    assert ("the observer want 3 cores. With 2" in page) == alone


def test_what_grows_with_ranks_is_measured_and_shown(tmp_path: Path) -> None:
    done = run_alone(
        str(BENCHMARKS / "scale.py"),
        *("-n", "2", "4", "--nodes", "2", "--seconds", "120"),
        "--json",
        str(tmp_path / "scale.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "scale.json").read_text())["results"]
    assert [(row["ranks"], row["connections"], row["channels"]) for row in rows] == [(2, 0, 0), (4, 1, 1)]
    assert make_page(tmp_path).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert "## What grows with the number of ranks, nodes of one host" in page
    assert "| connections of its proxy | 0 | 1 | -1 + 0.5 n | 0% |" in page


def test_a_line_is_fitted_to_what_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scale = importlib.import_module("scale")
    jobs = [(ranks, node) for ranks in (8, 16, 64) for node in (4, 8)]
    rows = [{"ranks": ranks, "node": node, "held": 5 + 2 * ranks + 3 * ranks // node} for ranks, node in jobs]
    fitted = scale.fit(rows, "held")
    assert fitted["coefficients"] == pytest.approx([5, 2, 3])
    assert fitted["worst_error"] == pytest.approx(0, abs=1e-9)
    assert fitted["foretold"]["1024"] == pytest.approx(5 + 2 * 1024 + 3 * 128)


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    done = make_page(tmp_path)
    assert done.returncode == 1
    assert "odd.json: not a result of a benchmark program" in done.stderr
    assert not (tmp_path / "README.md").exists()


def test_a_page_of_nothing_is_refused(tmp_path: Path) -> None:
    done = make_page(tmp_path)
    assert done.returncode == 2
    assert "no results (*.json)" in done.stderr


@pytest.mark.parametrize(("text", "nbytes"), [("512 B", 512), ("4 KiB", 4096), ("1 MiB", 1 << 20), ("1000 B", 1000)])
def test_sizes_are_shown_as_they_are_read(text: str, nbytes: int) -> None:
    assert show_size(nbytes) == text
    assert size(text.replace(" ", "")) == nbytes


@pytest.mark.full
def test_the_cost_of_observing_is_measured_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "observing.json"
    other = publications.publish(  # simulates a concurrent run of the benchmark
        Publication.of_this_process(
            Description(0, 1, "observing", "observing.py"), "host", workers=1, observed="", counters="", rings=()
        )
    )
    run_make("bare-loops")
    done = run_alone(BENCHMARKS / "observing.py", "--quick", "--json", str(path), env={"PROXYCCL_RUNTIME": "host"})
    publications.withdraw(other)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    for row in results["engine_alone"] + results["kernels"]:
        assert all(row[mode]["median"] > 0 for mode in ("nobody looks", "looked at", "traced"))


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    def span(ts: float, tid: int = 1) -> dict[str, Any]:
        arguments = {"channel": 0, "count": 1}
        return {"ph": "X", "cat": "issue", "pid": 1, "tid": tid, "ts": ts, "dur": 5, "name": "put", "args": arguments}

    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 0 of 1 (program)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "proxy thread 0"}},
    ]
    bursts = [span(0), span(1000), span(1010), span(5000), span(5020), span(9000), span(9030)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": names + bursts}))
    run_alone(BENCHMARKS / "trace_picture.py", str(tmp_path / "trace.json"), str(tmp_path / "trace.svg"))
    picture = ElementTree.parse(tmp_path / "trace.svg").getroot()
    texts = [element.text for element in picture if element.tag.endswith("text")]
    assert texts[:2] == ["rank 0", "proxy thread 0"]
    assert texts[-1] == "25 µs"  # the picture shows the burst of median length among the bursts of two triggers
    assert len([element for element in picture if element.tag.endswith("rect")]) == 1 + 2
