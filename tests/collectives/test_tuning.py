"""Algorithms are chosen by tables, which can be measured on the machine and are kept on disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proxyccl
from proxyccl import ArgumentError, Communicator, MismatchError, ThreadBootstrap
from proxyccl.channels.collectives import tuned, tuning
from proxyccl.channels.collectives.selection import (
    ALGORITHMS,
    ALGORITHMS_BY_COLLECTIVE,
    CASES,
    Case,
    Selector,
    SizeTable,
)
from proxyccl.channels.collectives.tuning import table_from
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.device.arrays.dtypes import DTYPES
from support.cases.memory import registered
from support.device_arrays import on_device, on_host
from support.devices import require_devices, runtime_with_blocks, world_sizes
from support.running import TIMEOUT, run_ranks, wait_for

MANY = max(world_sizes(2, 3), default=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test an empty directory for measured tables, but leaves the directory of compiled kernels as it is."""
    monkeypatch.setattr(tuned, "cache_dir", lambda: tmp_path)
    return tmp_path


def test_a_table_takes_the_first_limit_that_fits() -> None:
    table = SizeTable(((1024, "one_shot"), (65536, "ring")), "two_shot")
    assert [table.choose(n) for n in (0, 1024, 1025, 65536, 65537)] == [
        "one_shot",
        "one_shot",
        "ring",
        "ring",
        "two_shot",
    ]


def test_a_table_refuses_unknown_algorithms() -> None:
    with pytest.raises(ArgumentError, match="algorithm: unknown algorithm 'tree'"):
        SizeTable(((1024, "tree"),))


def test_a_tables_limits_must_not_fall() -> None:
    with pytest.raises(ArgumentError, match=r"limits: must not fall, as in \[2048, 1024\]"):
        SizeTable(((2048, "one_shot"), (1024, "ring")))


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ([1024], r"limits: must be pairs of bytes and an algorithm, not \[1024\]"),
        (((1024, "ring", 1),), "limits: must be pairs of bytes and an algorithm"),
        (5, "limits: must be pairs of bytes and an algorithm, not 5"),
        ((("1K", "ring"),), "limits: must be numbers of bytes from 0 on, not '1K'"),
        (((1.5, "ring"),), "limits: must be numbers of bytes from 0 on, not 1.5"),
        (((-1, "ring"),), "limits: must be numbers of bytes from 0 on, not -1"),
    ],
)
def test_a_tables_limits_are_pairs_of_bytes_and_an_algorithm(limits: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{text}"):
        SizeTable(limits)


# -- tables for all calls ---


def test_a_selector_has_a_table_for_each_case_with_algorithms_of_its_collective() -> None:
    defaults = Selector.for_ranks(4, "cuda")
    lacking = dict(defaults.tables)
    case = Case("all_gather", "all types", True)
    del lacking[case]
    with pytest.raises(ArgumentError, match="tables: expected one for all_gather of all types, symmetric arrays"):
        Selector(lacking)
    with pytest.raises(ArgumentError, match="unknown algorithm 'ring'; expected one of kernels, proxy"):
        Selector({**defaults.tables, case: SizeTable((), "ring")})
    with pytest.raises(ArgumentError, match="all_gather of other types, other arrays: there are no such calls"):
        Selector({**defaults.tables, Case("all_gather", "other types", False): SizeTable()})
    with pytest.raises(ArgumentError, match=r"^tables: .*: must be a SizeTable, not 'kernels'"):
        Selector({**defaults.tables, case: "kernels"})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match=r"^tables: must be a mapping from cases to tables, not None"):
        Selector(None)  # type: ignore[arg-type]
    for ask in (lambda: defaults.with_table("sum", SizeTable()), lambda: defaults.choose("sum", DTYPES["int32"], 1)):
        with pytest.raises(ArgumentError, match=r"^collective: unknown collective 'sum'; expected one of all_reduce, "):
            ask()


def test_the_choice_is_by_collective_type_arrays_and_size() -> None:
    tables = dict(Selector.for_ranks(2, "cuda").tables)
    tables[Case("all_reduce", "16-bit floats", False)] = SizeTable(((100, "one_shot"),), "two_shot")
    tables[Case("all_reduce", "other types", False)] = SizeTable((), "ring")
    tables[Case("all_reduce", "other types", True)] = SizeTable((), "proxy")
    tables[Case("all_to_all", "all types", True)] = SizeTable(((100, "kernels"),), "proxy")
    selector = Selector(tables)
    chosen = {
        name: selector.choose("all_reduce", DTYPES[name], 100) for name in ("float16", "bfloat16", "float32", "int32")
    }
    assert chosen == {"float16": "one_shot", "bfloat16": "one_shot", "float32": "ring", "int32": "ring"}
    assert selector.choose("all_reduce", DTYPES["bfloat16"], 101) == "two_shot"
    assert selector.choose("all_reduce", DTYPES["float64"], 1, symmetric=True) == "proxy"
    for dtype in ("bfloat16", "uint8"):  # a call that only moves bytes has one table for all types
        assert selector.choose("all_to_all", DTYPES[dtype], 101) == "kernels"
        assert selector.choose("all_to_all", DTYPES[dtype], 101, symmetric=True) == "proxy"


@pytest.mark.parametrize("runtime", ["host", "cuda", "hip"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("levels", [False, True])
def test_by_default_short_types_send_no_sums_and_bytes_are_moved_by_kernels(
    ranks: int, runtime: str, levels: bool
) -> None:
    selector = Selector.for_ranks(ranks, runtime, levels=levels)
    for case, table in selector.tables.items():
        if case.collective != "all_reduce":
            assert table == SizeTable((), "kernels")
        elif levels:
            assert table == SizeTable((), "hierarchical")
        elif case.elements == "16-bit floats":
            assert not {"recursive_doubling", "ring"} & set(table.algorithms)
    assert set(selector.tables) == set(CASES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lines", [False, True])
def test_on_gpus_packets_give_way_to_loads_earlier_than_to_stores(ranks: int, dtype: str, lines: bool) -> None:
    selector, sizes = Selector.for_ranks(ranks, "cuda", lines=lines), [1 << n for n in range(8, 26)]

    def first_two_shot(*, symmetric: bool) -> int:
        chosen = [selector.choose("all_reduce", DTYPES[dtype], n, symmetric=symmetric) for n in sizes]
        first = chosen.index("two_shot")
        assert set(chosen[first:]) == {"two_shot"}
        return sizes[first]

    assert first_two_shot(symmetric=True) <= first_two_shot(symmetric=False)


def chosen_by(comm: Communicator, algorithm: str) -> None:
    """Makes every collective use the same algorithm."""
    selector = comm.collectives.selector
    for collective in ALGORITHMS_BY_COLLECTIVE:
        selector = selector.with_table(collective, SizeTable((), algorithm))
    comm.collectives.selector = selector


def call_each(comm: Communicator, **options: object) -> None:
    """Makes every collective that moves data, each on new arrays, and checks the results."""
    rank, ranks = comm.rank, comm.world_size
    rows = np.repeat(np.arange(ranks, dtype=np.float32), 3)
    for result, expected in (
        (comm.all_reduce(on_device(comm, rows + rank), **options), ranks * rows + sum(range(ranks))),
        (comm.reduce_scatter(on_device(comm, rows), **options), np.full(3, ranks * rank)),
        (comm.all_gather(on_device(comm, np.full(3, rank, np.float32)), **options), rows),
        (comm.all_to_all(on_device(comm, np.full(3 * ranks, rank, np.float32)), **options), rows),
        (comm.broadcast(on_device(comm, rows * rank), 1, **options), rows),
    ):
        assert (on_host(result) == expected).all()


def by_proxy(comm: Communicator) -> bool:
    """Returns whether this rank's proxy was started, which happens when it first moves data."""
    return comm.proxy_if_started is not None


def test_the_tables_decide_whether_the_proxy_moves_data(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        call_each(comm)
        assert not by_proxy(comm)
        chosen_by(comm, "proxy")
        call_each(comm)
        assert by_proxy(comm)

    run_ranks(MANY, body)


def test_kernels_can_be_asked_for_by_name(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        chosen_by(comm, "proxy")
        x = on_device(comm, np.full(2, comm.rank, np.float32))
        assert (on_host(comm.all_gather(x, algorithm="kernels")) == [0, 0, 1, 1]).all()
        assert (on_host(comm.broadcast(x, 1, algorithm="kernels")) == 1).all()
        assert not by_proxy(comm)

    run_ranks(2, body)


# -- callers' requests ---


def test_the_policy_zero_leaves_the_multiprocessors_to_the_program(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        call_each(comm, cta_policy="default")
        assert not by_proxy(comm)
        call_each(comm, cta_policy="zero")
        assert by_proxy(comm)

    run_ranks(2, body)


@pytest.mark.parametrize("named_by", ["argument", "environment"])
def test_a_communicators_policy_is_for_calls_that_name_none(
    cache: Path, named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_CTA_POLICY", "zero" if named_by == "environment" else "default")
    options = {"cta_policy": "zero"} if named_by == "argument" else {}

    def body(comm: Communicator) -> None:
        call_each(comm, cta_policy="default")
        x = on_device(comm, np.ones(3, np.float32))
        comm.all_gather(x, algorithm="kernels")
        comm.all_reduce(x, algorithm="two_shot")
        assert not by_proxy(comm)
        call_each(comm)
        assert by_proxy(comm)

    run_ranks(2, body, **options)


def test_under_the_policy_efficiency_kernels_have_few_blocks(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(comm, np.full(1 << 16, comm.rank + 1, np.float32))
        for options in ({}, {"algorithm": "two_shot"}, {"symmetric": True}):
            assert (on_host(comm.all_reduce(x, "max", cta_policy="efficiency", **options)) == 2).all()
        assert on_host(comm.all_gather(x, cta_policy="efficiency")).shape == (1 << 17,)
        assert (on_host(comm.reduce_scatter(x, "sum", cta_policy="efficiency")) == 4).all()
        assert not by_proxy(comm)
        team, most = comm.collectives.team(), comm.runtime.launch_defaults
        assert team.grid(1 << 30, "efficiency") == most.efficient_blocks < team.grid(1 << 30, "default") == most.blocks

    run_ranks(2, body, make_runtime=runtime_with_blocks)


def test_there_are_three_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="cta_policy: 'none' is not one of 'default', 'efficiency', 'zero'"):
        run_ranks(1, lambda _: None, cta_policy="none")
    monkeypatch.setenv("PROXYCCL_CTA_POLICY", "most")
    with pytest.raises(ArgumentError, match="PROXYCCL_CTA_POLICY: 'most' is not one of"):
        run_ranks(1, lambda _: None)


@pytest.mark.parametrize(
    ("option", "values", "words"),
    [("cta_policy", (None, "zero"), "None, rank 1 'zero'"), ("invariant", (True, False), "True, rank 1 False")],
)
def test_ranks_with_different_settings_make_no_communicator(
    cache: Path, option: str, values: tuple[Any, Any], words: str
) -> None:
    require_devices(2)
    bootstraps = ThreadBootstrap.create(2)

    def failure_of(rank: int) -> str:
        with pytest.raises(ArgumentError) as caught:
            Communicator(bootstraps[rank], timeout=TIMEOUT, **{option: values[rank]})
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        failures = set(threads.map(failure_of, range(2)))
    assert failures == {f"{option}: must be the same on all ranks; rank 0 has {words}"}


def call_and_wait(comm: Communicator, x: Any, options: dict[str, Any]) -> None:
    comm.all_reduce(x, **options)
    comm.synchronize()


@pytest.mark.parametrize(
    ("option", "words"), [({"cta_policy": "zero"}, "any, cta_policy zero"), ({"symmetric": True}, "any, symmetric")]
)
def test_ranks_that_ask_for_different_things_are_told(cache: Path, option: dict[str, Any], words: str) -> None:
    def body(comm: Communicator) -> str:
        x, options = on_device(comm, np.ones(4, np.float32)), option if comm.rank == 0 else {}
        with pytest.raises(MismatchError, match=r"^algorithm: ") as caught:
            call_and_wait(comm, x, options)
        return str(caught.value)

    # At least the rank that makes the call last sees both requests.
    assert any(
        re.search(rf"with algorithm {words}\b.* with algorithm any\b", text)
        or re.search(rf"with algorithm any\b.* with algorithm {words}\b", text)
        for text in run_ranks(2, body)
    )


def proxied_if_symmetric(comm: Communicator) -> Selector:
    """Returns tables that choose the proxy for calls of symmetric arrays, and kernels for other calls."""
    kernels = comm.collectives.selector
    tables = {case: SizeTable((), "proxy") if case.symmetric else kernels.tables[case] for case in CASES}
    return Selector(tables)


def registered_on_rank_0(comm: Communicator) -> Any:
    """Returns an array of ones that is symmetric memory only on rank 0."""
    values = np.ones(3000, np.float32)
    if comm.rank == 0:
        array = comm.empty(values.shape, "float32").upload(values)
        wait_for(lambda: registered(comm, array.view()), "the peers' replies")
        return array
    return allocate(comm.group, values.shape, "float32").upload(values)


def test_no_rank_chooses_by_what_it_alone_knows_of_an_array(cache: Path) -> None:
    """If only some ranks have registered the array, all ranks still choose the same algorithm."""

    def body(comm: Communicator) -> None:
        comm.collectives.selector = proxied_if_symmetric(comm)
        for _ in range(3):
            assert (on_host(comm.all_reduce(registered_on_rank_0(comm))) == comm.world_size).all()
        assert not by_proxy(comm)

    run_ranks(MANY, body)


def test_a_promise_of_symmetric_arrays_decides_the_choice_and_not_the_result(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        comm.collectives.selector = proxied_if_symmetric(comm)
        array = registered_on_rank_0(comm)
        assert (on_host(comm.all_reduce(array, symmetric=True)) == comm.world_size).all()
        assert by_proxy(comm)

    run_ranks(2, body)


# -- measuring ---


def test_measured_times_become_limits_between_the_sizes() -> None:
    times = {
        1024: {"one_shot": 1.0, "ring": 2.0},
        4096: {"one_shot": 2.0, "ring": 3.0},
        16384: {"one_shot": 9.0, "ring": 4.0},
    }
    assert table_from(times) == SizeTable(((8192, "one_shot"),), "ring")


def test_beyond_what_was_measured_another_table_goes_on() -> None:
    times = {1024: {"one_shot": 1.0, "ring": 2.0}, 4096: {"one_shot": 2.0, "ring": 1.0}}
    beyond = SizeTable(((512, "two_shot_packets"), (8192, "one_shot")), "two_shot")
    assert table_from(times, beyond) == SizeTable(((2048, "one_shot"), (4096, "ring"), (8192, "one_shot")), "two_shot")


@pytest.mark.hip
def test_every_algorithm_is_measured_for_every_case_and_the_same_on_all_ranks(cache: Path) -> None:
    def body(comm: Communicator) -> dict[Case, dict[int, dict[str, float]]]:
        return tuning.measure(comm.collectives, (1024,), 1, TIMEOUT)

    first, *others = run_ranks(2, body)
    assert all(other == first for other in others)
    assert set(first) == set(CASES)
    for case, times in first.items():
        assert set(times) == {1024}
        expected = set(ALGORITHMS_BY_COLLECTIVE[case.collective]) - {"hierarchical"}  # of one node
        if case.elements == "16-bit floats":
            expected -= {"recursive_doubling", "ring"}
        assert set(times[1024]) == expected
        assert all(seconds > 0 for seconds in times[1024].values())


def test_measuring_ends_when_the_time_is_over(cache: Path) -> None:
    def body(comm: Communicator) -> None:
        times = tuning.measure(comm.collectives, (256, 1024, 4096), 100, 1e-6)
        assert all(set(of_case) == {256} for of_case in times.values())

    run_ranks(2, body)


def test_tuning_gives_all_ranks_the_same_tables_and_right_results(cache: Path) -> None:
    def body(comm: Communicator) -> Selector:
        x = on_device(comm, np.ones(3000, np.float32))
        comm.all_reduce(x)  # tuning must invalidate this prepared call
        selector = comm.tune(sizes=(1024, 16384), iterations=1)
        assert comm.collectives.selector == selector
        for count in (10, 3000, 30000):
            y = on_device(comm, np.full(count, comm.rank + 1, np.float32))
            comm.all_reduce(y)
            assert (on_host(y) == 3).all()
        call_each(comm)
        return selector

    tables = run_ranks(2, body)
    assert tables[0] == tables[1]
    assert tables[0].tables[Case("all_reduce", "other types", False)].beyond in ALGORITHMS


# -- files ---


UNLIKELY = SizeTable(((4321, "one_shot"), (8765, "ring")), "recursive_doubling")


def selector_of(comm: Communicator) -> Selector:
    return comm.collectives.selector


def has_defaults(comm: Communicator) -> bool:
    return comm.collectives.selector == comm.collectives.defaults


def save_unlikely(ranks: int) -> tuple[Path, Selector]:
    """Saves tables that no measurement would give, for `ranks` ranks. Returns the file's path and the tables."""

    def body(comm: Communicator) -> tuple[Path, Selector]:
        selector = comm.collectives.selector.with_table("all_reduce", UNLIKELY)
        machine = tuned.Machine.of(comm.group)
        return (tuned.save(machine, selector) if comm.rank == 0 else tuned.path_of(machine)), selector

    return run_ranks(ranks, body)[0]


@pytest.mark.hip
def test_later_communicators_of_as_many_ranks_start_with_the_measured_tables(cache: Path) -> None:
    measured = run_ranks(2, lambda comm: comm.tune(sizes=(1024,), iterations=1))[0]
    assert run_ranks(2, selector_of) == [measured, measured]
    path, selector = save_unlikely(2)
    assert tuned.files() == [path]
    assert path.is_relative_to(cache)
    assert run_ranks(2, selector_of) == [selector, selector]
    for other in world_sizes(1, 3):
        assert all(run_ranks(other, has_defaults))


def test_all_ranks_take_the_tables_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    unlikely = Selector.for_ranks(MANY, "host").with_table("all_reduce", UNLIKELY)

    def load(group: Group) -> Selector:
        assert group.rank == 0
        return unlikely

    monkeypatch.setattr(tuned, "load", load)
    assert run_ranks(MANY, selector_of) == [unlikely] * MANY


def test_tables_are_not_kept_unless_wanted(cache: Path) -> None:
    run_ranks(2, lambda comm: comm.tune(sizes=(1024,), iterations=1, save=False))
    assert tuned.files() == []


def other_version(text: str) -> str:
    return re.sub(r'"version": "[^"]*"', '"version": "0.0.1"', text)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _: "", "invalid tuning file from .*json"),
        (lambda text: text[: len(text) // 2], "invalid tuning file from"),
        (lambda text: text.replace("8765", "1"), r"limits: must not fall, as in \[4321, 1\]"),
        (lambda text: text.replace("recursive_doubling", "tree"), "unknown algorithm 'tree'"),
        (lambda text: text.replace('"kernels"', '"ring"', 1), "unknown algorithm 'ring'; expected one of kernels"),
        (lambda text: text.replace('"symmetric": true', '"symmetric": false', 1), "expected one for"),
        (other_version, f"measured with version 0.0.1; expected {re.escape(proxyccl.__version__)}"),
        (lambda text: re.sub(r'"cores": \d+', '"cores": 1234', text), "is of another machine: .* 2 ranks on"),
    ],
    ids=["empty", "cut", "limits", "unknown", "misplaced", "incomplete", "old", "foreign"],
)
def test_a_file_that_can_not_be_used_is_ignored_with_a_warning(
    cache: Path, spoil: Callable[[str], str], reason: str
) -> None:
    path, _ = save_unlikely(2)
    path.write_text(spoil(path.read_text()))
    with pytest.warns(UserWarning, match=rf"{reason}.*; the default tables are used. Communicator.tune measures new"):
        assert run_ranks(2, has_defaults) == [True, True]


def test_tables_that_others_could_have_changed_are_neither_read_nor_replaced(cache: Path) -> None:
    path, selector = save_unlikely(2)
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match=f"other users can write to {path.parent} .*; the default tables are used"):
        assert run_ranks(2, has_defaults) == [True, True]
    with pytest.warns(UserWarning, match="used, but could not be saved: cache: other users can write to"):
        run_ranks(1, lambda comm: tuned.keep(comm.group, selector))
    assert list(path.parent.iterdir()) == [path]


def test_tables_that_can_not_be_kept_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuned, "cache_dir", lambda: tmp_path / "file")
    selector = Selector.for_ranks(2, "host")

    def body(comm: Communicator) -> None:
        tuned.keep(comm.group, selector)

    with pytest.warns(UserWarning, match="the measured tables are used, but could not be saved: .*file"):
        run_ranks(1, body)
