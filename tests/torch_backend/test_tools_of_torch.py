"""torch's own tools on process groups of this backend: flight recorder, profiler, CommDebugMode, debug level DETAIL."""

from __future__ import annotations

import gc
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.flight_recorder import fr_trace  # noqa: E402

from proxyccl.torch import flight_recorder, write_flight_record  # noqa: E402
from proxyccl.torch.under_way import UnderWay  # noqa: E402
from support.processes import Ended, run_processes  # noqa: E402
from support.torch_groups import options  # noqa: E402
from support.torch_groups import run as run_threads  # noqa: E402

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 3
BEFORE = [
    ("0", "nccl:all_reduce", 1, {0, 1, 2}),
    ("0", "nccl:barrier", 2, {0, 1, 2}),
    ("0: 0 to 1", "nccl:send 0->1", 1, {0, 1}),
    ("1", "nccl:all_gather", 1, {0, 1}),
]
"""The calls of the program that all ranks make."""


def run(directory: Path, how: str) -> list[Ended]:
    """Runs recorded.py, which writes flight records. Returns the exit status and output of each rank."""
    return run_processes(RANKS, PROGRAMS / "recorded.py", how, env={"TORCH_FR_DUMP_TEMP_FILE": f"{directory}/of rank_"})


def analyzed(directory: Path, *arguments: str) -> tuple[list[tuple[str, str, int, set[int]]], list[Any]]:
    """Analyzes the flight records with torch's tool. Returns the complete calls and the incomplete calls."""
    output = directory.parent / "analysis.pickle"
    try:
        fr_trace.main([str(directory), "-o", str(output), "-p", "of rank_", *arguments])
    finally:
        gc.enable()  # torch's tool disables garbage collection
    _, found = pickle.loads(output.read_bytes())
    calls = found.collectives
    complete = [call for call in calls if call.pass_check and not call.missing_ranks]
    of_complete = [(c.group_id, c.collective_name, c.collective_seq_id, c.expected_ranks) for c in complete]
    return sorted(of_complete), [call for call in calls if call not in complete]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Makes an empty directory for flight records."""
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def test_a_flight_record_that_the_program_asks_for_is_complete(records: Path) -> None:
    for ended in run(records, "matching"):
        assert ended.returncode == 0, ended.stderr
    complete, others = analyzed(records)
    assert complete == sorted([*BEFORE, ("0", "nccl:all_to_all", 3, {0, 1, 2})])
    assert not others


def test_the_analyzer_names_the_call_to_which_a_stalled_rank_did_not_come(records: Path) -> None:
    for ended in run(records, "stalled"):
        assert ended.returncode == 0, ended.stderr
    complete, (missed,) = analyzed(records)
    assert complete == BEFORE
    assert (missed.collective_name, missed.collective_seq_id, missed.missing_ranks) == ("nccl:all_reduce", 3, {2})


def test_the_others_record_the_call_in_which_a_rank_was_killed(records: Path) -> None:
    *left, lost = run(records, "killed")
    assert lost.returncode == -9
    for ended in left:
        assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in records.iterdir()) == ["of rank_0", "of rank_1"]
    complete, _ = analyzed(records, "--allow-incomplete-ranks")
    assert ("1", "nccl:all_gather", 1, {0, 1}) in complete
    for path in records.iterdir():
        *_, last = [e for e in pickle.loads(path.read_bytes())["entries"] if e["process_group"][0] == "0"]
        assert (last["profiling_name"], last["collective_seq_id"], last["state"]) == ("nccl:all_reduce", 3, "scheduled")


def test_the_analyzer_names_ranks_that_make_different_calls(records: Path) -> None:
    for ended in run(records, "mismatch"):
        assert ended.returncode == 0, ended.stderr
    complete, (different,) = analyzed(records)
    assert complete == BEFORE
    assert different.collective_seq_id == 3
    names = {different.collective_name, *(c.collective_name for c in different.mismatch_collectives.values())}
    assert names == {"nccl:all_reduce", "nccl:all_gather"}


def test_a_flight_record_without_a_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "groups", {})  # other tests' groups must not be found
    with pytest.raises(RuntimeError, match="expected init_process_group"):
        write_flight_record(str(tmp_path / "record"))
    with pytest.raises(TypeError, match="prefix: expected a str"):
        write_flight_record(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 5])
def test_ranks_record_the_same_first_call_if_one_is_ahead(ahead: int) -> None:
    under_way = UnderWay(lambda: True)
    for number in range(1, 5000 + ahead, 2):  # transfers have even numbers
        under_way.add(None, number, f"call {number}", None)
        under_way.end(None, number)
    under_way.add(None, 6000, "last", None)
    recorded = under_way.recorded()[None]
    assert (recorded.first, recorded.names[0], recorded.names[-1]) == (1025, "call 2049", "last")
    assert recorded.ended == len(recorded.names) - 1


def test_debug_level_detail_and_comm_debug_mode() -> None:
    for ended in run_processes(RANKS, PROGRAMS / "debugged.py", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr


def test_the_profiler_shows_calls_with_their_sizes_and_their_group(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"

    def calls(group: Any) -> None:
        x = torch.ones(4)
        group.allreduce([x], options("Allreduce")).wait()
        group.allreduce([x], options("Allreduce", waits=False)).wait()
        group.all_gather_single(x.new_empty(8), x).wait()
        (group.send if group.rank() == 0 else group.recv)([x], 1 - group.rank(), 0).wait()

    def body(group: Any) -> None:
        if group.rank() == 1:
            calls(group)
            return
        with torch.profiler.profile(record_shapes=True) as profile:
            calls(group)
        profile.export_chrome_trace(str(trace))

    run_threads(body, ranks=2)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "proxyccl:" in event["name"]]
    keys = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size", "Process Group Ranks")
    assert [(event["name"], event["args"]["Input Dims"], *map(event["args"].get, keys)) for event in events] == [
        ("proxyccl:all_reduce", [[4]], "all_reduce", 4, 4, "float32", 2, "[0, 1]"),
        ("proxyccl:all_reduce", [[4]], "all_reduce", 4, 4, "float32", 2, "[0, 1]"),
        ("proxyccl:all_gather_single", [[4]], "all_gather_single", 4, 8, "float32", 2, "[0, 1]"),
        ("proxyccl:send to rank 1", [[4]], "send", 4, 4, "float32", 2, "[0, 1]"),
    ]
