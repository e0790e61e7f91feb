"""Tables that choose execution plans: which calls use a plan, which tables are refused, and how plans are measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, ExecutionPlan, MismatchError, Selector, SizeTable
from proxyccl.channels.collectives import tuned, tuning
from proxyccl.channels.collectives.selection import CASES, Case
from proxyccl.tools.tune import in_words
from support.cases.plan_documents import (
    Ops,
    RankView,
    all_gather,
    all_reduce_by_packets,
    all_reduce_by_reads,
    document,
    meet,
    move,
    own,
)
from support.device_arrays import on_device, on_host
from support.ranks import Ranks
from support.running import run_ranks

pytestmark = pytest.mark.hip

BY_PACKETS = ExecutionPlan.load(all_reduce_by_packets(2))
BY_READS = ExecutionPlan.load({**all_reduce_by_reads(2), "max_message_size": 4096})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test an empty directory for measured tables, but leaves the directory of compiled kernels as it is."""
    monkeypatch.setattr(tuned, "cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as opened:
        yield opened


def with_tables(comm: Communicator, **tables: SizeTable) -> None:
    """Sets the tables of some collectives; the other collectives get the default tables."""
    selector = Selector.for_ranks(comm.world_size, comm.runtime.name)
    for collective, table in tables.items():
        selector = selector.with_table(collective, table)
    comm.collectives.selector = selector


def last_algorithm(comm: Communicator) -> str:
    """Returns the name of the algorithm of this rank's last collective call."""
    ((_, call),) = comm.group.launches.recent_calls(1)
    return call["algorithm"]


def reduced(comm: Communicator, count: int, dtype: str = "float32", **options: Any) -> str:
    """Makes an all_reduce in place and checks its result. Returns the algorithm of the call."""
    values = np.arange(count) % 5 + 1
    x = on_device(comm, (values * (comm.rank + 1)).astype(dtype))
    assert comm.all_reduce(x, **options) is x
    comm.synchronize()
    expected = values * 2 if options.get("op") == "max" else values * 3
    np.testing.assert_array_equal(on_host(x), expected.astype(dtype))
    return last_algorithm(comm)


def test_a_plan_runs_the_calls_of_its_sizes(pair: Ranks) -> None:
    table = SizeTable(((64, "two_shot"), (1024, BY_PACKETS), (4096, BY_READS)), "ring")

    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=table)
        for _ in range(2):
            chosen = [reduced(comm, nbytes // 4) for nbytes in (64, 96, 1024, 1056, 4096, 4128)]
            assert chosen == ["any", *[BY_PACKETS.call_name] * 2, *[BY_READS.call_name] * 2, "any"]
        assert reduced(comm, 64, "float16") == BY_PACKETS.call_name

    pair.run(body)


def test_calls_of_the_same_arrays_follow_the_tables_that_are_set_last(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        x, out = (on_device(comm, np.full(64, comm.rank + value, np.float32)) for value in (1, 0))
        for chosen in (BY_PACKETS, BY_READS, "ring", BY_PACKETS):
            with_tables(comm, all_reduce=SizeTable((), chosen))
            for _ in range(3):
                comm.all_reduce(x, out=out)
                comm.synchronize()
                assert last_algorithm(comm) == ("any" if chosen == "ring" else str(chosen))
                np.testing.assert_array_equal(on_host(out), 3)

    pair.run(body)


def test_a_call_that_the_plan_can_not_execute_has_the_built_in_choice(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=SizeTable((), BY_READS))
        assert reduced(comm, 64) == BY_READS.call_name
        assert reduced(comm, 64, op="max") == "any"
        assert reduced(comm, 61) == "any"  # The plan does not support chunks of 122 bytes.
        assert reduced(comm, 2048) == "any"  # The plan's limit is below 2048 elements.

    pair.run(body)


def test_what_the_caller_asks_comes_before_the_tables(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=SizeTable((), BY_PACKETS))
        assert reduced(comm, 64, algorithm="ring") == "ring"
        assert reduced(comm, 64, cta_policy="zero") == "any, cta_policy zero"
        assert reduced(comm, 64, algorithm=BY_READS) == BY_READS.call_name

    pair.run(body)


def scatter(view: RankView) -> list[Ops]:
    me, peer = view.rank, 1 - view.rank
    read = move("rre", [own("i", me), view.at(peer, "i", me)], [own("o", 0)], channel_type="memory")
    return [[*meet(view), read, *meet(view)]]


def exchange(view: RankView) -> list[Ops]:
    me, peer = view.rank, 1 - view.rank
    put = move("put", [own("i", peer)], [view.at(peer, "o", me)], channel_type="memory")
    return [[*meet(view), move("copy", [own("i", me)], [own("o", me)]), put, *meet(view)]]


def test_plans_stand_in_the_tables_of_all_collectives_that_take_them(pair: Ranks) -> None:
    plans = {
        "reduce_scatter": document(2, scatter, chunks=(2, 1, 0), collective="reducescatter"),
        "all_gather": all_gather(2),
        "all_to_all": document(2, exchange, chunks=(2, 2, 0), collective="alltoall"),
    }

    def body(comm: Communicator) -> None:
        loaded = {collective: ExecutionPlan.load(plan) for collective, plan in plans.items()}
        with_tables(comm, **{collective: SizeTable((), plan) for collective, plan in loaded.items()})
        rows = np.repeat(np.arange(2, dtype=np.float32), 8)
        for collective, x, expected in (
            ("reduce_scatter", rows + comm.rank, np.full(8, 2 * comm.rank + 1)),
            ("all_gather", np.full(8, comm.rank, np.float32), rows),
            ("all_to_all", np.full(16, comm.rank, np.float32), rows),
        ):
            result = getattr(comm, collective)(on_device(comm, x))
            comm.synchronize()
            np.testing.assert_array_equal(on_host(result), expected)
            assert last_algorithm(comm) == loaded[collective].call_name
        x = on_device(comm, np.full(16, comm.rank, np.float32))
        assert comm.all_to_all(x, out=x) is x  # in place although the plan works only out of place
        comm.synchronize()
        np.testing.assert_array_equal(on_host(x), rows)

    pair.run(body)


def test_a_reduction_to_one_rank_runs_the_plan_of_all_reduce(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=SizeTable((), BY_PACKETS))
        values = np.arange(64, dtype=np.float32) + comm.rank
        x = on_device(comm, values)
        result = comm.reduce(x, root=1)
        comm.synchronize()
        assert last_algorithm(comm) == BY_PACKETS.call_name
        if comm.rank == 1:
            np.testing.assert_array_equal(on_host(result), 2 * np.arange(64) + 1)
        else:
            assert result is None
            np.testing.assert_array_equal(on_host(x), values)

    pair.run(body)


def test_ranks_whose_tables_differ_are_told(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=SizeTable((), BY_PACKETS if comm.rank else BY_READS))
        reduced(comm, 64)

    with pytest.raises(MismatchError, match="with different algorithm"):
        pair.run(body)


# -- refusals ---


def refused(collective: str, table: SizeTable, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Selector.for_ranks(2, "host").with_table(collective, table)


@pytest.mark.host_only(reason="only tables")
@pytest.mark.parametrize(
    ("collective", "table", "match"),
    [
        (
            "all_gather",
            SizeTable((), BY_READS),
            r"^tables: .*\(allreduce\).* is for 'allreduce'; expected .*'allgather'",
        ),
        ("broadcast", SizeTable((), BY_READS), "^tables: .* for broadcast, which takes no plans"),
        (
            "all_reduce",
            SizeTable(((5000, "ring"), (9000, BY_READS)), "two_shot"),
            "^tables: all_reduce of 16-bit floats, other arrays: .* is for 0 to 4096 bytes; expected some of the 5001 "
            "to 9000 bytes that the table gives it",
        ),
        ("all_reduce", SizeTable(((5000, "ring"),), BY_READS), "the 5001 bytes and more that the table gives it"),
        (
            "all_reduce",
            SizeTable((), ExecutionPlan.load({**all_reduce_by_reads(2), "buffer_alignment": 1})),
            "^tables: all_reduce of 16-bit floats, other arrays: .* cuts at 1 bytes, inside of 16-bit floats",
        ),
    ],
    ids=["collective", "broadcast", "sizes", "larger", "types"],
)
def test_a_table_refuses_a_plan_that_none_of_its_calls_can_use(collective: str, table: SizeTable, match: str) -> None:
    refused(collective, table, match)


@pytest.mark.host_only(reason="only tables")
@pytest.mark.parametrize("algorithm", [7, None, {"name": "a plan"}])
def test_a_table_takes_names_and_plans_alone(algorithm: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^algorithm: .* expected an ExecutionPlan or one of"):
        SizeTable((), algorithm)


def test_a_communicator_refuses_tables_with_a_plan_that_its_ranks_can_not_execute(pair: Ranks) -> None:
    def of_more_ranks(comm: Communicator) -> None:
        before = comm.collectives.selector
        with pytest.raises(ArgumentError, match=r"^plan: .* for 3 ranks>; expected a plan for the communicator's 2"):
            with_tables(comm, all_reduce=SizeTable((), ExecutionPlan.load(all_reduce_by_reads(3))))
        assert comm.collectives.selector is before

    def between_nodes(comm: Communicator) -> None:
        with pytest.raises(
            ArgumentError, match=r"^plan: rank 0, threadblock 0, operation 1 \(signal\): a memory channel"
        ):
            with_tables(comm, all_reduce=SizeTable((), BY_READS))

    pair.run(of_more_ranks)
    run_ranks(2, between_nodes, local_world_size=1)


# -- measuring and files ---


def test_measuring_takes_the_plans_of_the_tables_part_and_keeps_the_librarys_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("all_reduce", "other types", False)
    seen: list[set[Any]] = []
    measure = tuning.measure

    def favouring_plans(*arguments: Any) -> dict[Case, dict[int, dict[Any, float]]]:
        """Returns the measured times, with 0 in place of each plan's time, so that plans win."""
        measured = measure(*arguments)
        seen.append({algorithm for times in measured[case].values() for algorithm in times})
        return {
            each: {
                size: {name: 0.0 if isinstance(name, ExecutionPlan) else took for name, took in taken.items()}
                for size, taken in times.items()
            }
            for each, times in measured.items()
        }

    monkeypatch.setattr(tuning, "measure", favouring_plans)

    def body(comm: Communicator) -> Selector:
        with_tables(comm, all_reduce=SizeTable(((4096, BY_READS),), BY_PACKETS))
        selector = comm.tune(sizes=(1024, 16384), iterations=1, seconds=60)
        assert comm.collectives.selector == selector
        assert reduced(comm, 256) == BY_READS.call_name
        assert reduced(comm, 4096) == BY_PACKETS.call_name
        return selector

    selectors = run_ranks(2, body)
    assert selectors[0] == selectors[1]
    assert all({BY_READS, BY_PACKETS} < algorithms for algorithms in seen)
    table = selectors[0].tables[case]
    assert table.plans == (BY_READS, BY_PACKETS)
    assert in_words(table).startswith(f"{BY_READS.call_name} to 4 KiB, {BY_PACKETS.call_name} to 16 KiB")
    (path,) = tuned.files()
    kept = tuned.selector_of(tuned.read(path).tables)
    assert kept.plans == ()
    assert set(kept.tables) == set(CASES)


def test_tables_with_plans_are_not_written_to_files(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        with_tables(comm, all_reduce=SizeTable((), BY_PACKETS))
        with pytest.raises(
            ArgumentError, match=r"^selector: holds <ExecutionPlan packets .*; plans can't be saved in files"
        ):
            tuned.save(tuned.Machine.of(comm.group), comm.collectives.selector)

    run_ranks(2, body)
    assert tuned.files() == []
