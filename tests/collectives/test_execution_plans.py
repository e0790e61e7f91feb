"""Execution plans in MSCCL++'s format: every operation, in place and out of place, at several sizes, repeatedly."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyccl import ArgumentError, Communicator, ExecutionPlan, MismatchError, WaitTimeoutError
from proxyccl.device.arrays.array import as_view
from proxyccl.device.arrays.dtypes import DTYPES
from support.cases.graphs import Graph
from support.cases.plan_documents import (
    NOP,
    Ops,
    RankView,
    all_gather,
    all_reduce_by_packets,
    all_reduce_by_reads,
    all_reduce_of_nodes,
    document,
    meet,
    move,
    on,
    own,
    port_packets,
)
from support.device_arrays import on_device, on_host
from support.devices import RUNTIME
from support.ranks import Ranks

pytestmark = pytest.mark.hip

RANKS = 3
Body = Callable[[Communicator], Any]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as opened:
        yield opened


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as opened:
        yield opened


def values(rank: int, count: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Returns a rank's input: small integers, which every type adds exactly."""
    return np.random.default_rng([rank, seed]).integers(1, 9, count).astype(dtype)


def executed(
    group: Ranks, plan: dict[str, Any], count: int, out_count: int, *, dtype: str = "float32", times: int = 3
) -> list[list[np.ndarray]]:
    """Executes a plan `times` times, each time with new inputs. Returns the outputs: one
    list per execution, with one array per rank.
    """
    loaded = ExecutionPlan.load(plan)

    def body(communicator: Communicator) -> list[np.ndarray]:
        results = []
        for seed in range(times):
            x = on_device(communicator, values(communicator.rank, count, dtype, seed))
            out = on_device(communicator, np.zeros(out_count, dtype))
            communicator.execute(loaded, x, out=out)
            communicator.synchronize()
            results.append(on_host(out).copy())
            np.testing.assert_array_equal(on_host(x), values(communicator.rank, count, dtype, seed))
        return results

    by_rank = group.run(body)
    return [[of_rank[i] for of_rank in by_rank] for i in range(times)]


def inputs(world_size: int, count: int, seed: int, dtype: str = "float32") -> list[np.ndarray]:
    return [values(rank, count, dtype, seed) for rank in range(world_size)]


# -- collectives ---


@pytest.mark.parametrize(("kind", "name"), [("memory", "put"), ("port", "put"), ("port", "pws"), ("port", "pwsf")])
def test_an_all_gather_by_each_kind_of_put(ranks: Ranks, kind: str, name: str) -> None:
    for count in (16, 4096):
        for seed, outputs in enumerate(executed(ranks, all_gather(RANKS, kind, name), count, RANKS * count)):
            for output in outputs:
                np.testing.assert_array_equal(output, np.concatenate(inputs(RANKS, count, seed)))


@pytest.mark.parametrize(
    ("reduce_op", "numpy_op", "dtype"),
    [
        ("sum", np.add, "float16"),
        pytest.param("prod", np.multiply, "int32", marks=pytest.mark.full),
        ("min", np.minimum, "int8"),
        pytest.param("max", np.maximum, "float64", marks=pytest.mark.full),
    ],
)
def test_an_all_reduce_that_reads_and_writes_peers(
    ranks: Ranks, reduce_op: str, numpy_op: np.ufunc, dtype: str
) -> None:
    count = RANKS * 16 * 5
    plan = all_reduce_by_reads(RANKS, reduce_op, threadblocks=2)
    for seed, outputs in enumerate(executed(ranks, plan, count, count, dtype=dtype)):
        expected = numpy_op.reduce(inputs(RANKS, count, seed, dtype), dtype=dtype)
        for output in outputs:
            np.testing.assert_array_equal(output, expected)


def one_sided() -> dict[str, Any]:
    """Returns a plan in which rank 0 puts its input into rank 1's output. Only rank 0 lists the port channel."""

    def threadblocks(view: RankView) -> list[Ops]:
        at = {"buffer_id": 0, "index": 0, "size": 1}
        put = move("put", [own("i", 0)], [at], channel_ids=[0], channel_type="port")
        return [[*meet(view), *([] if view.rank else [put, on("flush", [0], "port")]), *meet(view)]]

    plan = document(2, threadblocks, chunks=(1, 1, 0))
    first = plan["gpus"][0]
    first["channels"].append({"channel_type": "port", "connected_to": [1]})
    first["remote_buffers"].append({"rank": 1, "type": "o", "access_channel_types": ["port"]})
    block, last = first["threadblocks"][0], len(first["remote_buffers"]) - 1
    block["channels"].append({"channel_type": "port", "channel_ids": [0]})
    block["remote_buffer_refs"].append({"access_channel_type": "port", "remote_buffer_ids": [last]})
    return plan


def test_a_port_channel_needs_no_counterpart_in_the_peers_program(pair: Ranks) -> None:
    for seed, outputs in enumerate(executed(pair, one_sided(), 1024, 1024)):
        np.testing.assert_array_equal(outputs[1], values(0, 1024, seed=seed))
        assert not outputs[0].any()
    signalled = one_sided()
    signalled["gpus"][0]["threadblocks"][0]["ops"][5]["name"] = "signal"
    with pytest.raises(
        ArgumentError, match="rank 0 signals rank 1 1 times on port channel number 0, which waits never"
    ):
        ExecutionPlan.load(signalled)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.full)])
def test_floats_of_8_bits_are_summed_in_float_and_rounded_once(ranks: Ranks, dtype: str) -> None:
    count, kind = RANKS * 16 * 5, DTYPES[dtype].numpy()
    plan = ExecutionPlan.load(all_reduce_by_reads(RANKS, "sum", threadblocks=2))
    inputs = [np.random.default_rng(rank).uniform(-200, 200, count).astype(kind) for rank in range(RANKS)]

    def body(communicator: Communicator) -> np.ndarray:
        x, out = communicator.empty(count, dtype).upload(inputs[communicator.rank]), communicator.empty(count, dtype)
        communicator.execute(plan, x, out=out)
        communicator.synchronize()
        return out.numpy().astype(np.float32)

    greatest = 448 if dtype == "float8_e4m3fn" else 57344  # sums saturate
    total = sum(each.astype(np.float32) for each in inputs).clip(-greatest, greatest)
    for output in ranks.run(body):
        np.testing.assert_array_equal(output, total.astype(kind).astype(np.float32))


def test_packets_alternate_between_the_halves_of_scratch_memory_and_survive_its_growth(ranks: Ranks) -> None:
    for count in (RANKS * 4, RANKS * 2048, RANKS * 8):
        for seed, outputs in enumerate(executed(ranks, all_reduce_by_packets(RANKS), count, count, times=5)):
            for output in outputs:
                np.testing.assert_array_equal(output, sum(inputs(RANKS, count, seed)))


def test_calls_of_two_sizes_take_turns_and_scratch_memory_grows_meanwhile(ranks: Ranks) -> None:
    """A rank that is already in a short call must not overwrite data that another rank has yet to read in a
    long call.
    """
    plan = ExecutionPlan.load(all_reduce_by_packets(RANKS))
    counts = (RANKS * 4, RANKS * 2048)

    def body(communicator: Communicator) -> None:
        arrays = [[on_device(communicator, np.zeros(count, np.float32)) for _ in range(2)] for count in counts]
        for seed, which in enumerate((0, 0, *(10 * (1, 0)))):
            x, out = arrays[which]
            given = values(communicator.rank, counts[which], seed=seed)
            communicator.runtime.copy(as_view(x, "x").ptr, given.ctypes.data, given.nbytes)
            communicator.execute(plan, x, out=out)
            communicator.synchronize()
            np.testing.assert_array_equal(on_host(out), sum(inputs(RANKS, counts[which], seed)))

    ranks.run(body)


def test_a_call_whose_form_is_kept_uses_the_memory_that_scratch_memory_has_grown_to(ranks: Ranks) -> None:
    """In the last call, rank 0 passes an earlier array and reuses a prepared call; the other ranks pass new arrays."""
    plan = ExecutionPlan.load(all_reduce_by_packets(RANKS))
    short, long = RANKS * 4, RANKS * 4096

    def body(communicator: Communicator) -> None:
        given, zeros = values(communicator.rank, short, seed=0), np.zeros(long, np.float32)
        old, new, larger = (
            [on_device(communicator, array) for array in (x, np.zeros_like(x))] for x in (given, given, zeros)
        )
        last = old if communicator.rank == 0 else new
        for x, out in (old, old, old, larger, last):
            communicator.execute(plan, x, out=out)
        communicator.synchronize()
        np.testing.assert_array_equal(on_host(last[1]), sum(inputs(RANKS, short, 0)))

    ranks.run(body)


# -- every other operation, between two ranks ---


def exchanged(view: RankView) -> tuple[int, int]:
    return view.rank, 1 - view.rank


def gets(view: RankView) -> list[Ops]:
    _, peer = exchanged(view)
    get = move("get", [view.at(peer, "i", 1)], [own("o", 0)], channel_type="memory")
    return [[*meet(view), get, move("copy", [own("i", 0)], [own("o", 1)]), *meet(view)]]


def local_reductions(view: RankView) -> list[Ops]:
    _, peer = exchanged(view)
    put = move("put", [own("i", 0)], [view.at(peer, "s", 0)], channel_type="memory")
    reduce = move("re", [own("i", 1), own("s", 0), own("i", 0)], [own("o", 0)])
    send = move("res", [own("i", 1), own("s", 0)], [own("s", 1), view.at(peer, "o", 1)], channel_type="memory")
    return [[put, *meet(view), reduce, send, *meet(view)]]


def read_reductions(view: RankView) -> list[Ops]:
    _, peer = exchanged(view)
    read = move("rre", [own("i", 0), view.at(peer, "i", 1)], [own("o", 0)], channel_type="memory")
    return [[*meet(view), read, move("copy", [own("i", 1)], [own("o", 1)]), *meet(view)]]


def packets(view: RankView) -> list[Ops]:
    """Sends chunk 0 in packets, sends the peer's packets back, adds packets, and unpacks the returned packets."""
    _, peer = exchanged(view)
    return [
        [
            move("ppkt", [own("i", 0)], [view.at(peer, "s", 0)], channel_type="memory"),
            move("rppkt", [own("s", 0)], [view.at(peer, "s", 1)], channel_type="memory"),
            move("cpkt", [own("i", 1)], [own("s", 2)]),
            NOP,
            move("repkt", [own("i", 0), own("s", 0), own("s", 2)], [own("o", 0)]),
            move("upkt", [own("s", 1)], [own("o", 1)]),
        ]
    ]


def copied_packets(view: RankView) -> list[Ops]:
    """Stores a sum as packets on this rank, and sends the sum to the peer in packets."""
    _, peer = exchanged(view)
    sources = [own("i", 0), own("s", 0)]
    return [
        [
            move("ppkt", [own("i", 1)], [view.at(peer, "s", 0)], channel_type="memory"),
            move("recspkt", sources, [own("o", 0), own("s", 1), view.at(peer, "s", 2)], channel_type="memory"),
            NOP,
            move("recpkt", [own("i", 0), own("s", 1)], [own("o", 0), own("s", 3)]),
            NOP,
            move("upkt", [own("s", 3)], [own("o", 0)]),
            move("upkt", [own("s", 2)], [own("o", 1)]),
        ]
    ]


def packets_by_port(view: RankView) -> list[Ops]:
    _, peer = exchanged(view)
    channel = [view.channel(peer)]
    return [
        [
            move("cpkt", [own("i", 0)], [own("s", 0)]),
            NOP,
            move("ppkt", [own("s", 0)], [view.at(peer, "s", 1)], channel_type="port", channel_ids=channel),
            move("rppkt", [own("s", 1)], [view.at(peer, "s", 2)], channel_type="port", channel_ids=channel),
            move("upkt", [own("s", 1)], [own("o", 0)]),
            move("upkt", [own("s", 2)], [own("o", 1)]),
            on("flush", channel, "port"),
        ]
    ]


def pipelines(view: RankView) -> list[Ops]:
    """Returns the operations of two threadblocks: one copies unit by unit, the other puts the copies. Relaxed signals
    show that both ranks have begun.
    """
    _, peer = exchanged(view)
    first, second = [view.channel(peer, 0)], [view.channel(peer, 1)]
    context = {"unit_size": 64, "num_chunks": 2}
    copies = [move("copy", [own("i", 0, 2)], [own("s", 0, 2)]), NOP, {"name": "sem_release", "semaphore_ids": [0]}]
    puts = [
        {"name": "sem_acquire", "semaphore_ids": [0]},
        NOP,
        move("put", [own("s", 0, 2)], [view.at(peer, "o", 0, 2)], channel_type="memory"),
        NOP,
        on("signal", first),
        on("wait", first),
    ]
    return [
        [{"name": "pipeline", "iter_context": context, "ops": copies}],
        [
            on("rlxsignal", second),
            on("rlxwait", second),
            {"name": "pipeline", "iter_context": context, "ops": puts},
            *meet(view),
        ],
    ]


def port_pipelines(view: RankView) -> list[Ops]:
    _, peer = exchanged(view)
    channel = [view.channel(peer)]
    put = move("pws", [own("i", 0, 2)], [view.at(peer, "o", 0, 2)], channel_type="port", channel_ids=channel)
    return [
        [
            *meet(view, "port"),
            {
                "name": "pipeline",
                "iter_context": {"unit_size": 96, "num_chunks": 2},
                "ops": [put, on("wait", channel, "port")],
            },
            on("flush", channel, "port"),
            *meet(view, "port"),
        ]
    ]


def behind_an_empty_pipeline(_: RankView) -> list[Ops]:
    empty = {"name": "pipeline", "iter_context": {"unit_size": 64, "num_chunks": 1}, "ops": []}
    return [[empty, move("copy", [own("i", 0, 2)], [own("o", 0, 2)])]]


LL = {"protocol": "LL", "use_double_scratch_buffer": True}
Halves = tuple[np.ndarray, np.ndarray]
PROGRAMS: list[tuple[Callable[[RankView], list[Ops]], dict[str, Any], Callable[[Halves, Halves], Halves]]] = [
    (gets, {}, lambda mine, theirs: (theirs[1], mine[0])),
    (local_reductions, {}, lambda mine, theirs: (sum(mine) + theirs[0], theirs[1] + mine[0])),
    (read_reductions, {}, lambda mine, theirs: (mine[0] + theirs[1], mine[1])),
    (packets, LL, lambda mine, theirs: (sum(mine) + theirs[0], mine[0])),
    (copied_packets, LL, lambda mine, theirs: (2 * mine[0] + theirs[1], theirs[0] + mine[1])),
    (packets_by_port, {**LL, "kind": "port"}, lambda mine, theirs: (theirs[0], mine[0])),
    (pipelines, {"channels_to_each": 2, "semaphores": (0,)}, lambda mine, theirs: theirs),
    (port_pipelines, {"kind": "port"}, lambda mine, theirs: theirs),
    (behind_an_empty_pipeline, {}, lambda mine, _: mine),
]


@pytest.mark.parametrize(("program", "fields", "expected"), PROGRAMS, ids=[row[0].__name__ for row in PROGRAMS])
def test_operations_between_two_ranks(pair: Ranks, program: Any, fields: dict[str, Any], expected: Any) -> None:
    plan = document(2, program, chunks=(2, 2, 4), name=program.__name__, **fields)
    count = 2 * 72
    for seed, outputs in enumerate(executed(pair, plan, count, count)):
        halves = [tuple(np.split(each, 2)) for each in inputs(2, count, seed)]
        for rank, output in enumerate(outputs):
            np.testing.assert_array_equal(output, np.concatenate(expected(halves[rank], halves[1 - rank])))


def test_registered_arrays_are_reached_where_they_lie(ranks: Ranks) -> None:
    plan = ExecutionPlan.load(all_reduce_by_reads(RANKS))
    count = RANKS * 16

    def body(communicator: Communicator) -> list[np.ndarray]:
        x, out = (communicator.register(communicator.empty(count, "float32")) for _ in range(2))
        mixed = communicator.register(communicator.empty(count, "float32"))
        results = []
        for seed, target in enumerate((out, mixed, out)):
            x.array.upload(values(communicator.rank, count, seed=seed))
            assert communicator.execute(plan, x, out=target) is target
            communicator.synchronize()
            results.append(on_host(target.array))
        return results

    for results in ranks.run(body):
        for seed, result in enumerate(results):
            np.testing.assert_array_equal(result, sum(inputs(RANKS, count, seed)))


def test_registered_arrays_of_one_size_are_told_apart(pair: Ranks) -> None:
    plan = ExecutionPlan.load(all_gather(2, "port", "put"))

    def body(communicator: Communicator) -> list[np.ndarray]:
        given = [values(communicator.rank, 64, seed=seed) for seed in range(2)]
        arrays = [communicator.register(on_device(communicator, each)) for each in given]
        out = on_device(communicator, np.zeros(128, np.float32))
        results = []
        for array in arrays:
            communicator.execute(plan, array, out=out)
            communicator.synchronize()
            results.append(on_host(out).copy())
        return results

    for results in pair.run(body):
        for seed, result in enumerate(results):
            np.testing.assert_array_equal(result, np.concatenate(inputs(2, 64, seed)))


def test_an_array_that_is_registered_again_is_named_by_its_new_ids(pair: Ranks) -> None:
    plan = ExecutionPlan.load(all_gather(2, "port", "put"))

    def body(communicator: Communicator) -> np.ndarray:
        x, other = (communicator.empty(48) for _ in range(2))
        for seed, array in enumerate((x, other)):
            array.upload(values(communicator.rank, 48, seed=seed))
        out = on_device(communicator, np.zeros(96, np.float32))
        registered = communicator.register(x)
        communicator.execute(plan, registered, out=out)
        communicator.synchronize()
        communicator.deregister(registered)
        communicator.register(other)  # takes the ids
        communicator.execute(plan, communicator.register(x), out=out)
        communicator.synchronize()
        return on_host(out)

    for result in pair.run(body):
        np.testing.assert_array_equal(result, np.concatenate(inputs(2, 48, 0)))


def scattered_and_gathered(view: RankView) -> list[Ops]:
    """Makes an all-gather that reads no input after its first write to an output."""
    put = move("put", [own("i", 0)], [view.at(1 - view.rank, "s", 0)], channel_type="memory")
    copies = [
        move("copy", [own("i", 0)], [own("o", view.rank)]),
        move("copy", [own("s", 0)], [own("o", 1 - view.rank)]),
    ]
    return [[put, *meet(view), *copies, *meet(view)]]


def by_outputs(view: RankView) -> list[Ops]:
    """Makes an all-gather that writes an output before it reads its input again, so it does not work in place."""
    me, peer = view.rank, 1 - view.rank
    put = move("put", [own("i", 0)], [view.at(peer, "o", me)], channel_type="memory")
    return [[*meet(view), put, *meet(view), move("copy", [own("i", 0)], [own("o", me)]), *meet(view)]]


@pytest.mark.parametrize("registered", [False, True], ids=["any", "registered"])
@pytest.mark.parametrize("program", [scattered_and_gathered, by_outputs])
def test_an_input_that_lies_in_the_output_is_copied_for_a_plan_that_does_not_work_in_place(
    pair: Ranks, program: Callable[[RankView], list[Ops]], registered: bool
) -> None:
    plan = ExecutionPlan.load(document(2, program, chunks=(1, 2, 1), collective="allgather", name=program.__name__))

    def body(communicator: Communicator) -> list[np.ndarray]:
        whole = communicator.empty(128, "float32")
        out = communicator.register(whole) if registered else whole
        results = []
        for seed in range(3):
            whole.upload(np.repeat(values(communicator.rank, 64, seed=seed)[None], 2, 0).reshape(-1))
            own_rows = dataclasses.replace(
                whole.view(), ptr=whole.ptr + communicator.rank * 256, shape=(64,), owner=whole
            )
            communicator.execute(plan, own_rows, out=out)
            communicator.synchronize()
            results.append(on_host(whole).copy())
        return results

    for results in pair.run(body):
        for seed, result in enumerate(results):
            np.testing.assert_array_equal(result, np.concatenate(inputs(2, 64, seed)))


def test_chunks_that_a_plan_does_not_write_keep_what_they_held(pair: Ranks) -> None:
    def program(view: RankView) -> list[Ops]:
        put = move("put", [own("i", 0)], [view.at(1 - view.rank, "o", 1)], channel_type="memory")
        return [[*meet(view), put, *meet(view)]]

    plan = ExecutionPlan.load(document(2, program, chunks=(2, 2, 0)))

    def body(communicator: Communicator) -> list[np.ndarray]:
        results = []
        for held in (7, 8):
            out = on_device(communicator, np.full(32, held, np.float32))
            communicator.execute(plan, on_device(communicator, values(communicator.rank, 32)), out=out)
            communicator.synchronize()
            results.append(on_host(out))
        return results

    for rank, results in enumerate(pair.run(body)):
        for held, result in zip((7, 8), results, strict=True):
            np.testing.assert_array_equal(result[:16], np.full(16, held))
            np.testing.assert_array_equal(result[16:], values(1 - rank, 32)[:16])


# -- in place ---


def in_place_all_reduce(view: RankView) -> list[Ops]:
    me, peer = view.rank, 1 - view.rank
    sources = [own("i", me), view.at(peer, "i", me)]
    targets = [own("i", me), view.at(peer, "i", me)]
    return [[*meet(view), move("rres", sources, targets, channel_type="memory"), *meet(view)]]


def in_place_all_gather(view: RankView) -> list[Ops]:
    me, peer = view.rank, 1 - view.rank
    return [[*meet(view), move("put", [own("o", me)], [view.at(peer, "o", me)], channel_type="memory"), *meet(view)]]


def in_place_reduce_scatter(view: RankView) -> list[Ops]:
    me, peer = view.rank, 1 - view.rank
    return [
        [
            move("put", [own("i", peer)], [view.at(peer, "s", 0)], channel_type="memory"),
            *meet(view),
            move("re", [own("i", me), own("s", 0)], [own("o", 0)]),
            *meet(view),
        ]
    ]


@pytest.mark.parametrize("aliased", [True, False])
@pytest.mark.parametrize(
    ("program", "chunks"),
    [(in_place_all_reduce, (2, 2, 0)), (in_place_all_gather, (1, 2, 0)), (in_place_reduce_scatter, (2, 1, 1))],
)
def test_in_place_the_smaller_array_is_the_ranks_share(
    pair: Ranks, program: Any, chunks: tuple[int, int, int], aliased: bool
) -> None:
    plan = document(2, program, chunks=chunks, inplace=True, name=program.__name__)
    share = 32
    x_count, out_count = chunks[0] * share, chunks[1] * share

    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        mine, rank = values(communicator.rank, x_count), communicator.rank
        if not aliased:
            x, out = on_device(communicator, mine), on_device(communicator, np.zeros(out_count, np.float32))
        elif x_count < out_count:
            out = on_device(communicator, np.concatenate([mine, mine]))
            x = out[rank * share : (rank + 1) * share]
        else:
            x = on_device(communicator, mine.copy())
            out = x if x_count == out_count else x[rank * share : (rank + 1) * share]
        assert communicator.execute(plan, x, out=out) is out
        communicator.synchronize()
        return on_host(out).copy(), on_host(x).copy()

    all_inputs = inputs(2, x_count, 0)
    total = np.concatenate(all_inputs) if x_count < out_count else sum(all_inputs)
    for rank, (out, x) in enumerate(pair.run(body)):
        np.testing.assert_array_equal(out, total if out_count >= x_count else np.split(total, 2)[rank])
        if not aliased:
            np.testing.assert_array_equal(x, all_inputs[rank])


def test_a_result_without_out_is_x_or_a_new_array(pair: Ranks) -> None:
    in_place = document(2, in_place_all_reduce, chunks=(2, 2, 0), inplace=True)
    gather = all_gather(2)

    def body(communicator: Communicator) -> tuple[bool, tuple[int, ...]]:
        x = on_device(communicator, np.ones((8, 4), np.float32))
        same = communicator.execute(in_place, x) is x
        gathered = communicator.execute(json.dumps(gather), x)
        communicator.synchronize()
        return same, tuple(gathered.shape)

    assert pair.run(body) == [(True, (16, 4))] * 2


# -- several nodes ---


@pytest.fixture(scope="module")
def nodes() -> Iterator[Ranks]:
    """Opens four ranks of this host as two simulated nodes of two ranks each."""
    with Ranks(4, local_world_size=2) as opened:
        yield opened


@pytest.mark.parametrize("plan", [all_gather(4, "port", "pws"), port_packets(4)], ids=["puts", "packets"])
def test_port_channels_reach_other_nodes(nodes: Ranks, plan: dict[str, Any]) -> None:
    for count in (16, 4096):
        for seed, outputs in enumerate(executed(nodes, plan, count, 4 * count)):
            for output in outputs:
                np.testing.assert_array_equal(output, np.concatenate(inputs(4, count, seed)))


def test_a_plan_has_memory_channels_inside_nodes_and_port_channels_between_them(nodes: Ranks) -> None:
    for count in (8, 4096):
        for seed, outputs in enumerate(executed(nodes, all_reduce_of_nodes(4, 2), count, count, times=5)):
            for output in outputs:
                np.testing.assert_array_equal(output, sum(inputs(4, count, seed)))


def test_a_memory_channel_between_nodes_is_refused_on_all_ranks_with_its_operation(nodes: Ranks) -> None:
    def program(view: RankView) -> list[Ops]:
        if view.rank == 1:  # the first signal stays in the node, the second goes to another node
            return [[*(NOP for _ in range(3)), on("signal", [view.channel(0)]), on("signal", [view.channel(2)])]]
        return [[on("wait", [view.channel(1)])]] if view.rank in (0, 2) else []

    plan = ExecutionPlan.load(document(4, program, chunks=(1, 1, 0)))

    def body(communicator: Communicator) -> str:
        with pytest.raises(ArgumentError) as refused:
            communicator.execute(plan, on_device(communicator, np.zeros(4, np.float32)))
        return str(refused.value)

    assert set(nodes.run(body)) == {
        "plan: rank 1, threadblock 0, operation 4 (signal): a memory channel to rank 2, which kernels of rank 1 can't "
        "reach; expected port channels between nodes, and between devices that are not peers"
    }


def test_a_read_of_another_node_is_refused_and_channels_that_nothing_uses_are_not(nodes: Ranks) -> None:
    def reads(view: RankView) -> list[Ops]:
        if view.rank != 0:
            return []
        return [[move("get", [view.at(3, "i", 0)], [own("o", 0)], channel_type="memory")]]

    def copies(view: RankView) -> list[Ops]:
        return [[move("copy", [own("i", 0)], [own("o", 0)])]]

    plans = [ExecutionPlan.load(document(4, each, chunks=(1, 1, 0), name=each.__name__)) for each in (reads, copies)]

    def body(communicator: Communicator) -> np.ndarray:
        x = on_device(communicator, values(communicator.rank, 16))
        out = on_device(communicator, np.zeros(16, np.float32))
        with pytest.raises(ArgumentError, match=r"rank 0, threadblock 0, operation 0 \(get\): .* to rank 3"):
            communicator.execute(plans[0], x, out=out)
        communicator.execute(plans[1], x, out=out)
        communicator.synchronize()
        return on_host(out)

    for rank, out in enumerate(nodes.run(body)):
        np.testing.assert_array_equal(out, values(rank, 16))


# -- errors, time-outs ---


def test_ranks_that_execute_different_plans_are_told(pair: Ranks) -> None:
    def body(communicator: Communicator) -> None:
        plan = all_gather(2) if communicator.rank else all_gather(2, "port")
        communicator.execute(plan, on_device(communicator, np.zeros(64, np.float32)))

    with pytest.raises(MismatchError, match="with different algorithm"):
        pair.run(body)


def late(communicator: Communicator, plan: dict[str, Any], x: Any) -> str:
    """Executes a plan that times out, and returns the time-out's message."""

    def execute() -> None:
        communicator.execute(plan, x)
        communicator.synchronize()

    with pytest.raises(WaitTimeoutError) as error:
        execute()
    return str(error.value)


def test_a_wait_that_is_too_long_names_rank_threadblock_and_operation() -> None:
    plan = all_gather(2)

    def body(communicator: Communicator) -> str:
        x = on_device(communicator, np.zeros(64, np.float32))
        communicator.execute(plan, x)
        communicator.synchronize()
        if communicator.rank == 1:  # rank 1's wait ends because rank 0 has failed
            with pytest.raises(WaitTimeoutError):
                communicator.group.exchange.barrier("a rank that stays away")
            return ""
        communicator.timeout = 0.3
        return late(communicator, plan, x)

    with Ranks(2) as two:
        text = two.run(body)[0]
    assert "operation 2 of threadblock 0 of its execution plan from rank 1" in text


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a function that sets a field of a plan's JSON, or removes the field if `value` is None."""

    def change(plan: dict[str, Any]) -> None:
        at: Any = plan
        *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
        for step in steps:
            at = at[step]
        if value is None:
            del at[last]
        else:
            at[last] = value

    return change


OPS = "gpus.1.threadblocks.0.ops"
# Fields of operations on switch channels, as MSCCL++'s language writes them.
_SWITCH = {"channel_type": "switch", "reduce_op": "sum"}
_CHUNK = {"type": "i", "index": 0, "size": 9}
_MULTICAST = {"switch_channel_id": 0, "index": 0, "size": 1}
SWITCHED: list[tuple[str, dict[str, Any]]] = [
    (
        "glre",
        {"buffer_type": "i", "buffer_offset": 0, "size": 1, "dst_chunk": _CHUNK, "channel_ids": [0], **_SWITCH},
    ),
    ("glres", {"src_buff": [_MULTICAST], "dst_buff": [_MULTICAST], **_SWITCH}),
    ("gstore", {"src_buff": [_CHUNK], "dst_buff": [_MULTICAST], "channel_type": "switch"}),
    ("gstorepkt", {"src_buff": [_CHUNK], "dst_buff": [_MULTICAST], "channel_type": "switch"}),
]
PLACE = r"rank 1, threadblock 0, operation "
BROKEN = [
    (changed("gpus", []), "has no gpus"),
    (changed("gpus.1.id", 2), r"gpus\[1\] has id 2"),
    (changed("gpus.1.input_chunks", 2), "rank 1 has 2 input and 2 output chunks"),
    (changed("gpus.1.threadblocks.0.id", 1), "rank 1: threadblocks must be numbered"),
    (changed("gpus.1.channels.0.connected_to", [1]), "rank 1 has a memory channel to rank 1"),
    (
        changed("gpus.1.channels.0.channel_type", "switch"),
        "a channel of type 'switch' needs a switch",
    ),
    (changed("gpus.1.channels", []), PLACE + r"1 \(signal\): memory channel 0 of the rank; the rank has 0"),
    (changed("gpus.0.channels", []), "rank 0, threadblock 0, operation 1"),
    *(
        (changed(f"{OPS}.4", {"name": name, **more}), PLACE + rf"4 \({name}\): {name} needs a switch that multicasts")
        for name, more in SWITCHED
    ),
    (changed(f"{OPS}.1.channel_ids", [1]), PLACE + r"1 \(signal\): memory channel 1; the threadblock has 1"),
    (changed(f"{OPS}.1.channel_ids", [0, 0]), PLACE + r"1 \(signal\): channel_ids \[0, 0\] name a channel twice"),
    (
        changed(f"{OPS}.1.channel_type", "none"),
        PLACE + r"1 \(signal\): channel_type 'none'; expected 'memory' or 'port'",
    ),
    (changed(f"{OPS}.1.name", "nop"), "rank 1 signals rank 0 2 times on memory channel number 0, which waits 3 times"),
    (changed(f"{OPS}.4.name", "jump"), PLACE + r"4 \(jump\): the operation is unknown"),
    (changed(f"{OPS}.4.name", "pipeline"), "expected iter_context"),
    (changed(f"{OPS}.4.ops", [NOP]), "only a pipeline contains operations"),
    (changed(f"{OPS}.4.src_buff", []), "src_buff has 0 entries"),
    (changed(f"{OPS}.4.src_buff.0.index", 1), PLACE + r"4 \(copy\): src_buff\[0\]: chunks 1 to 1 of rank 1's input"),
    (changed(f"{OPS}.4.src_buff.0.type", None), r"src_buff\[0\]: expected only type"),
    (changed(f"{OPS}.4.tbg_info", {"tb_id": 2, "tbg_size": 2}), "tb_id 2 of 2"),
    (changed(f"{OPS}.4.reduce_op", "xor"), "reduce_op 'xor'"),
    (changed(f"{OPS}.4.dst_buff.0.size", 2), "ranges of 1, 2 chunks|chunks 1 to 2"),
    (changed(f"{OPS}.5.name", "ppkt"), "packets in a plan whose protocol is 'Simple'"),
    (changed(f"{OPS}.5.dst_buff.0.buffer_id", 3), r"dst_buff\[0\]: remote buffer 3; the threadblock has 3"),
    (changed("gpus.1.remote_buffers.1.rank", 1), r"dst_buff\[0\]: a buffer of rank 1"),
    (changed("gpus.1.remote_buffers.1.access_channel_types", ["port"]), "does not allow memory channels"),
    (
        changed(f"{OPS}.4", {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}),
        "2 threadblocks; the rank has 1",
    ),
    (changed(f"{OPS}.4", {"name": "sem_acquire", "semaphore_ids": [0]}), "semaphore 0; the rank has 0"),
    (changed(f"{OPS}.4.surprise", 1), r"ops\[4\].*surprise"),
    (changed("protocol", "LL128"), "LL128"),
    (changed("gpus.1.scratch_chunks", -1), "scratch_chunks"),
]


@pytest.mark.host_only(reason="only reads JSON")
@pytest.mark.parametrize(("change", "text"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_plan_is_refused_when_it_is_loaded(change: Callable[[dict[str, Any]], None], text: str) -> None:
    plan = copy.deepcopy(all_gather(2))
    change(plan)
    with pytest.raises(ArgumentError, match=text):
        ExecutionPlan.load(plan)


@pytest.mark.host_only(reason="only reads JSON")
@pytest.mark.parametrize("given", [3, "{", b"[]", {"name": "only"}])
def test_what_is_no_plan_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match="plan"):
        ExecutionPlan.load(given)


@pytest.mark.host_only(reason="only reads JSON")
def test_barriers_and_semaphores_that_do_not_come_out_even_are_refused() -> None:
    def barriers(view: RankView) -> list[Ops]:
        return [[{"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}], [NOP]]

    def semaphores(view: RankView) -> list[Ops]:
        return [[{"name": "sem_release", "semaphore_ids": [0]}]]

    with pytest.raises(ArgumentError, match="barrier 0 is of 2 threadblocks, but 0 arrive"):
        ExecutionPlan.load(document(2, barriers, chunks=(1, 1, 0)))
    with pytest.raises(ArgumentError, match="semaphore 0 is acquired never and released 1 times"):
        ExecutionPlan.load(document(2, semaphores, chunks=(1, 1, 0), semaphores=(0,)))


@pytest.mark.host_only(reason="only reads JSON")
def test_a_plan_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(all_gather(4)))
    plan = ExecutionPlan.load(path)
    assert (plan.name, plan.collective, plan.world_size, plan.in_place) == ("memory put", "allgather", 4, False)


@pytest.mark.parametrize(
    ("count", "dtype", "out", "text"),
    [
        (6, "float32", None, "24 bytes; the plan takes multiples of 16"),
        (64, "float32", np.zeros(64, np.float32), "has 64 elements; expected 128"),
        (64, "float32", np.zeros(128, np.int32), "element type int32; expected the type of x"),
        (1 << 12, "float32", None, "32768 bytes; the plan is for 0 to 4096"),
    ],
)
def test_arrays_that_do_not_fit_the_plan_are_refused(pair: Ranks, count: int, dtype: str, out: Any, text: str) -> None:
    plan = ExecutionPlan.load({**all_gather(2), "max_message_size": 4096})

    def body(communicator: Communicator) -> None:
        x = on_device(communicator, np.zeros(count, dtype))
        target = None if out is None else on_device(communicator, out)
        with pytest.raises(ArgumentError, match=text):
            communicator.execute(plan, x, out=target)

    pair.run(body)


# -- random plans ---


@st.composite
def random_plans(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Draws a plan that copies chunks of inputs to chunks of the peer's outputs. Returns the plan and its copies: the
    receiving rank, the output's chunk and the input's chunk.
    """
    chunks = draw(st.integers(1, 4))
    free = [(rank, chunk) for rank in range(2) for chunk in range(chunks)]
    moves = []
    for rank, target in draw(st.permutations(free))[: draw(st.integers(1, len(free)))]:
        moves.append((rank, target, draw(st.integers(0, chunks - 1))))
    kind = draw(st.sampled_from(["memory", "port"]))
    by_get = kind == "memory" and draw(st.booleans())
    parts = draw(st.integers(1, 3))

    def program(view: RankView) -> list[Ops]:
        peer = 1 - view.rank
        ops: Ops = []
        for rank, target, source in moves:
            if by_get and rank == view.rank:
                ops.append(move("get", [view.at(peer, "i", source)], [own("o", target)], channel_type=kind))
            elif not by_get and rank == peer:
                put = move("put", [own("i", source)], [view.at(peer, "o", target)], channel_type=kind)
                ops.append({**put, "channel_ids": [view.channel(peer)]})
        blocks = []
        for part in range(parts):
            split = [{**op, "tbg_info": {"tb_id": part, "tbg_size": parts}} for op in ops]
            barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": parts}
            around = meet(view, kind) if part == 0 else []
            # Puts by port channels are complete when the threadblock that made them has flushed.
            flush = [on("flush", [view.channel(peer)], kind)] if kind == "port" else []
            blocks.append([*around, barrier, *split, *flush, barrier, *around])
        return blocks

    return document(2, program, chunks=(chunks, chunks, 0), kind=kind), moves


@settings(max_examples=12, deadline=None)
@given(random_plans(), st.integers(1, 9))
def test_random_plans_move_what_they_say(pair: Ranks, case: tuple[dict[str, Any], Any], units: int) -> None:
    plan, moves = case
    chunks = plan["gpus"][0]["input_chunks"]
    for seed, outputs in enumerate(executed(pair, plan, chunks * units * 4, chunks * units * 4, times=2)):
        given_chunks = [np.split(each, chunks) for each in inputs(2, chunks * units * 4, seed)]
        expected = [[np.zeros(units * 4, np.float32) for _ in range(chunks)] for _ in range(2)]
        for rank, target, source in moves:
            expected[rank][target] = given_chunks[1 - rank][source]
        for output, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(output, np.concatenate(wanted))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all fields and entries of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


WHOLE = all_reduce_by_packets(2)


@pytest.mark.host_only(reason="only reads JSON")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(leaves(WHOLE))), st.sampled_from([None, -1, 0, 1, 7, 1 << 40, "x", "port", [], {}, [7], 1.5])
)
def test_a_plan_with_any_field_replaced_is_loaded_or_refused(path: tuple[Any, ...], value: Any) -> None:
    plan = copy.deepcopy(WHOLE)
    at: Any = plan
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with contextlib.suppress(ArgumentError):  # `load` may raise no other exception
        assert ExecutionPlan.load(plan).world_size == 2


# -- plans as algorithms of collectives ---


def test_a_plan_stands_for_the_algorithm_of_a_collective(pair: Ranks) -> None:
    reduce, gather = ExecutionPlan.load(all_reduce_by_reads(2)), ExecutionPlan.load(all_gather(2))

    def body(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = on_device(communicator, values(communicator.rank, 64))
        out = on_device(communicator, np.zeros(64, np.float32))
        communicator.all_reduce(x, out=out, algorithm=reduce)
        gathered = communicator.all_gather(x, algorithm=gather)
        communicator.synchronize()
        with pytest.raises(ArgumentError, match="is for 'allgather'; expected a plan for 'allreduce'"):
            communicator.all_reduce(x, algorithm=gather)
        with pytest.raises(ArgumentError, match=r"is 'max', but .* works out sum"):
            communicator.all_reduce(x, "max", out=out, algorithm=reduce)
        communicator.all_reduce(x, algorithm=reduce)  # in place, although the plan works only out of place
        communicator.synchronize()
        return on_host(out), on_host(gathered), on_host(x)

    for out, gathered, reduced in pair.run(body):
        np.testing.assert_array_equal(out, sum(inputs(2, 64, 0)))
        np.testing.assert_array_equal(reduced, sum(inputs(2, 64, 0)))
        np.testing.assert_array_equal(gathered, np.concatenate(inputs(2, 64, 0)))


@pytest.mark.gpu_only
def test_a_captured_execution_replays(pair: Ranks) -> None:
    if RUNTIME != "cuda":
        pytest.skip("captures through CUDA's driver")
    plan = ExecutionPlan.load(all_reduce_by_packets(2))

    def body(communicator: Communicator) -> list[np.ndarray]:
        x = communicator.empty(64, "float32").upload(values(communicator.rank, 64))
        out = communicator.empty(64, "float32")
        stream = communicator.runtime.create_stream()
        communicator.execute(plan, x, out=out, stream=stream)
        communicator.synchronize()
        graph = Graph(stream, lambda: communicator.execute(plan, x, out=out, stream=stream))
        results = []
        for seed in range(1, 4):
            x.upload(values(communicator.rank, 64, seed=seed))
            graph.launch()
            communicator.synchronize()
            results.append(out.numpy())
        return results

    for results in pair.run(body):
        for seed, result in enumerate(results, 1):
            np.testing.assert_array_equal(result, sum(inputs(2, 64, seed)))
