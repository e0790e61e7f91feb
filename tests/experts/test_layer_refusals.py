"""Wrong calls of the expert-parallel layer raise errors that name the argument, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    ArgumentError,
    ClosedError,
    Communicator,
    EPAll2AllLayer,
    MismatchError,
    WaitTimeoutError,
)
from support.cases.expert_layer import (
    Case,
    Plan,
    announce_by,
    check,
    check_layer,
    dispatch_of,
    placed,
    plan_of,
    run_ranks,
    same,
    same_numbers,
    same_rows,
)
from support.device_arrays import on_device, on_host
from support.ranks import Ranks
from support.running import TIMEOUT, impatient


def refused(argument: str, call: Callable[[], object], match: str | None = None) -> None:
    with pytest.raises(ArgumentError, match=match) as caught:
        call()
    assert caught.value.argument == argument, caught.value


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ep_group", object()),
        ("max_tokens", 0),
        ("max_tokens", 4.0),
        ("max_tokens", 2**31),
        ("hidden", -1),
        ("topk", 0),
        ("topk", 17),
        ("rank", 1),
        ("rank", -1),
        ("num_tot_experts", 0),
        ("num_tot_experts", 3),
        ("local_world_size", 0),
        ("local_world_size", 3),
        ("world_size", 4),
        ("dtype", "int32"),
        ("dtype", "float33"),
        ("weight_dtype", "int8"),
        ("num_sm", 0),
        ("max_recv_tokens", 0),
        ("max_recv_tokens", 1.5),
        ("expert_alignment", 0),
        ("expert_alignment", 1 << 31),
    ],
)
def test_wrong_constructor_arguments_are_refused_by_name(pair: Ranks, argument: str, value: Any) -> None:
    def body(comm: Communicator) -> None:
        good: dict[str, Any] = {
            "ep_group": comm,
            "max_tokens": 4,
            "hidden": 8,
            "topk": 2,
            "rank": comm.rank,
            "num_tot_experts": 4,
            "local_world_size": 2,
            "world_size": 2,
        }
        wrong = (comm.rank + 1) % 2 if (argument, value) == ("rank", 1) else value
        refused(argument, lambda: EPAll2AllLayer(**{**good, argument: wrong}))

    pair.run(body)


def test_local_combine_is_refused_across_nodes() -> None:
    def body(comm: Communicator) -> None:
        refused("enable_local_combine", lambda: Case((4, 4), local_combine=True).layer(comm))

    run_ranks(2, body, local_world_size=1)


@pytest.mark.parametrize(
    ("argument", "option", "value"),
    [
        ("hidden", "hidden", 9),
        ("max_tokens", "spare_tokens", 1),
        ("num_tot_experts", "experts_per_rank", 3),
        ("topk", "topk", 3),
        ("dtype", "dtype", "float64"),
        ("enable_local_combine", "local_combine", True),
    ],
)
def test_differing_configurations_are_refused_on_all(argument: str, option: str, value: Any) -> None:
    case = Case((3, 2, 1))
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        mine = replace(case, **{option: value}) if comm.rank == 1 else case
        refused(argument, lambda: mine.layer(comm))
        check(comm, plan)  # the communicator stays usable

    run_ranks(3, body)


@pytest.mark.parametrize(("argument", "value"), [("weight_dtype", "float64"), ("max_recv_tokens", 20)])
def test_options_that_differ_between_ranks_are_refused_on_all(argument: str, value: Any) -> None:
    case = Case((3, 2, 1))
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        refused(argument, lambda: case.layer(comm, **({argument: value} if comm.rank == 1 else {})))
        check(comm, plan)

    run_ranks(3, body)


@pytest.mark.parametrize("local_world_size", [2, 1])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_an_expert_id_out_of_range_is_refused_on_all_ranks(local_world_size: int, bad: int) -> None:
    plan = plan_of(Case((6, 4), topk=3, local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            tokens, ids = on_device(comm, plan.inputs[comm.rank]), plan.routing.ids[comm.rank].copy()
            if comm.rank == 1:
                ids[2, 1] = ids[3, 0] = bad
            refused("exp_indices", lambda: layer.dispatch(tokens, on_device(comm, ids)), r"rank 1")
            check_layer(comm, plan, layer)

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_with_a_fixed_maximum_a_bad_expert_id_is_told_later(local_world_size: int) -> None:
    case = Case((6, 4), topk=3, local_world_size=local_world_size, spare_rows=9)
    good = plan_of(case)
    plan = Plan(case)
    ids = [ids.copy() for ids in plan.routing.ids]
    ids[1][2, 1] = ids[1][3, 0] = case.experts
    plan.routing = replace(plan.routing, ids=tuple(ids))
    given = [array.copy() for array in ids]
    given[1][2, 1], given[1][3, 0] = -1, case.experts + 1

    def body(comm: Communicator) -> None:
        rank, stream = comm.rank, comm.runtime.create_stream()
        with case.layer(comm, max_recv_tokens=good.most_rows) as layer:
            arrays = plan.inputs[rank], given[rank], plan.weights[rank]
            rows, _, desc = layer.dispatch(*(on_device(comm, array) for array in arrays), stream=stream)
            comm.synchronize(stream)
            refused("exp_indices", layer.check, r"\[2, 1\] on rank 1")
            same_rows(rows, plan.rows[rank], good.most_rows, "output", plan.routing.filled(rank))
            combined = layer.combine(placed(comm, plan.results[rank], good.most_rows), desc)
            same_numbers(combined, plan.combined[rank], "combine")
            check_layer(comm, good, layer)

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.hip
def test_wrong_arrays_are_refused_by_name() -> None:
    case = Case((5,), spare_tokens=3, hidden=4)
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        def ones(*shape: int, dtype: Any = np.float32) -> Any:
            return on_device(comm, np.ones(shape, dtype))

        def zeros(*shape: int, dtype: Any = np.int32) -> Any:
            return on_device(comm, np.zeros(shape, dtype))

        with case.layer(comm) as layer:
            tokens, ids, weights = ones(5, 4), zeros(5, 2), ones(5, 2)
            layer.dispatch(tokens, ids)  # wrong calls must be refused even after a valid call
            for argument, arguments in [
                ("input", (ones(9, 4), zeros(9, 2))),  # more than max_tokens
                ("input", (ones(5, 4, dtype=np.float64), ids)),
                ("input", (ones(5, 3), ids)),
                ("input", (ones(20), ids)),
                ("input", (np.ones((10, 4), np.float32)[::2], ids)),
                ("input", ([1.0], ids)),
                ("input", ((tokens,), ids)),
                ("input", ((tokens, None), ids)),
                ("exp_indices", (tokens, zeros(5, 2, dtype=np.int64))),
                ("exp_indices", (tokens, ids[:4])),
                ("exp_indices", (tokens, zeros(5, 1))),
                ("weight", (tokens, ids, ones(5, 2, dtype=np.float64))),
                ("weight", (tokens, ids, weights[:4])),
                ("weight", (tokens, ids, ones(10))),
                ("full_scatter_indices", (tokens, ids, None, zeros(5, 2, dtype=np.int64))),
                ("full_scatter_indices", (tokens, ids, None, zeros(5, 1))),
            ]:
                refused(argument, lambda a=arguments: layer.dispatch(*a))
                refused(argument, lambda a=arguments: layer.dispatch_send(*a))
            refused("stream", lambda: layer.dispatch(tokens, ids, stream=object()))

            _, _, desc = layer.dispatch(tokens, ids, weights)
            rows = ones(10, 4)
            layer.combine(rows, desc)
            for argument, options in [
                ("input", {"input": ones(9, 4)}),
                ("input", {"input": ones(11, 4)}),
                ("input", {"input": ones(10, 5)}),
                ("input", {"input": ones(10, 4, dtype=np.float16)}),
                ("ep_a2a_layout_desc", {"ep_a2a_layout_desc": object()}),
                ("ep_a2a_layout_desc", {"ep_a2a_layout_desc": None}),
                ("weights", {"weights": ones(9)}),
                ("weights", {"weights": ones(11)}),
                ("weights", {"weights": ones(10, 1)}),
                ("weights", {"weights": ones(10, dtype=np.float64)}),
                ("added", {"added": (ones(5, 4), ones(4, 4))}),
                ("added", {"added": (ones(5, 4, dtype=np.float64),)}),
                ("added", {"added": (ones(5, 4),) * 3}),
                ("added", {"added": (None,)}),
                ("order_ids", {"order_ids": ids}),  # only layers that sum rows rank by rank accept `order_ids`
                ("out", {"out": ones(4, 4)}),
                ("out", {"out": ones(5, 4, dtype=np.float64)}),
                ("out", {"out": rows[:5]}),
                ("stream", {"stream": object()}),
            ]:
                good: dict[str, Any] = {"input": rows, "ep_a2a_layout_desc": desc}
                refused(argument, lambda o=options, g=good: layer.combine(**{**g, **o}))
            refused("input", lambda: layer.redispatch(ones(4, 4), desc))
            refused("input", lambda: layer.redispatch(ones(5, 4, dtype=np.float64), desc))
            refused("ep_a2a_layout_desc", lambda: layer.redispatch(tokens, object()))
            assert np.array_equal(on_host(layer.combine(rows, desc)), np.full((5, 4), 2))
            for _ in range(3):  # later iterations reuse the prepared call
                assert np.array_equal(on_host(layer.combine(rows, desc, added=(ones(5, 4),))), np.full((5, 4), 3))
            assert np.array_equal(on_host(layer.combine(rows, desc)), np.full((5, 4), 2))
            check_layer(comm, plan, layer)

    run_ranks(1, body)


def test_a_read_only_output_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            _, _, desc = dispatch_of(layer, plan, comm)
            out = np.empty_like(plan.combined[comm.rank])
            out.flags.writeable = False
            refused("out", lambda: layer.combine(plan.results[comm.rank], desc, out=out))
            same_numbers(layer.combine(plan.results[comm.rank], desc), plan.combined[comm.rank], "combine")

    if pair.run(lambda comm: comm.runtime.name)[0] != "host":
        pytest.skip("numpy arrays are the host runtime's")
    pair.run(body)


@pytest.mark.parametrize("local_world_size", [2, 1])
@pytest.mark.parametrize("place", [-1, 12, 2**31 - 1, -(2**31), "another slot's"])
def test_scatter_indices_that_are_no_permutation_are_refused(place: int | str, local_world_size: int) -> None:
    case = Case((4, 2), routing="an expert several times", local_world_size=local_world_size)
    plan = plan_of(case)
    scatter = plan.routing.random_scatter(np.random.default_rng(0))
    scatter[1, 1] = scatter[1, 0] if isinstance(place, str) else place

    def body(comm: Communicator) -> str | None:
        with case.layer(comm) as layer:
            arrays = [on_device(comm, array) for array in (plan.inputs[comm.rank], plan.routing.ids[comm.rank])]
            refusal = None
            try:
                layer.dispatch(*arrays, None, on_device(comm, scatter))
                comm.synchronize()
                layer.check()
            except ArgumentError as error:
                refusal = error.argument
            check_layer(comm, plan, layer)
        return refusal

    refusals: list[str | None] = [None, None]
    refusals[int(plan.routing.rank[1 * case.topk + 1])] = "full_scatter_indices"
    assert run_ranks(2, body, local_world_size=local_world_size) == refusals


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_scatter_indices_for_fewer_tokens_than_there_are_are_refused(local_world_size: int) -> None:
    """The library must not read past the scatter indices, although the memory there has correct values."""
    case = Case((4, 2), routing="an expert several times", local_world_size=local_world_size)
    plan = plan_of(case)
    scatter = plan.routing.random_scatter(np.random.default_rng(0))

    def body(comm: Communicator) -> str | None:
        with case.layer(comm) as layer:
            arrays = [on_device(comm, array) for array in (plan.inputs[comm.rank], plan.routing.ids[comm.rank])]
            try:
                layer.dispatch(*arrays, None, on_device(comm, scatter)[:5])
                comm.synchronize()
                layer.check()
            except ArgumentError as error:
                return error.argument
        return None

    last = plan.routing.rank.reshape(6, case.topk)[5]
    expected = ["full_scatter_indices" if (last == rank).any() else None for rank in range(2)]
    assert run_ranks(2, body, local_world_size=local_world_size) == expected


def test_a_descriptor_of_another_layer_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm) as layer, plan.case.layer(comm) as other:
            _, _, desc = dispatch_of(layer, plan, comm)
            results = on_device(comm, plan.results[rank])
            refused("ep_a2a_layout_desc", lambda: other.combine(results, desc))
            refused("ep_a2a_layout_desc", lambda: other.combine_send(results, desc))
            refused("ep_a2a_layout_desc", lambda: other.redispatch(on_device(comm, plan.others[rank]), desc))
            same_numbers(layer.combine(results, desc), plan.combined[rank], "combine")

    pair.run(body)


def test_a_second_send_while_one_is_under_way_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        rank = comm.rank
        arrays = [on_device(comm, array) for array in (plan.inputs[rank], plan.routing.ids[rank])]
        results = on_device(comm, plan.results[rank])
        with plan.case.layer(comm) as layer:
            pending = layer.dispatch_send(*arrays)
            with pytest.raises(ArgumentError):
                layer.dispatch_send(*arrays)
            with pytest.raises(ArgumentError):
                layer.dispatch(*arrays)
            refused("pending", lambda: layer.dispatch_recv(object()))
            refused("pending", lambda: layer.combine_recv(pending))
            rows, _, desc = layer.dispatch_recv(pending)
            same(rows, plan.rows[rank], "output")
            refused("pending", lambda: layer.dispatch_recv(pending))

            pending = layer.combine_send(results, desc)
            with pytest.raises(ArgumentError):
                layer.combine_send(results, desc)
            with pytest.raises(ArgumentError):
                layer.combine(results, desc)
            refused("pending", lambda: layer.dispatch_recv(pending))
            same_numbers(layer.combine_recv(pending), plan.combined[rank], "combine")
            refused("pending", lambda: layer.combine_recv(pending))
            check_layer(comm, plan, layer)

    pair.run(body)


def test_another_call_on_another_rank_is_a_mismatch() -> None:
    plan = plan_of(Case((4, 4)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        _, _, desc = dispatch_of(layer, plan, comm)
        results, others = on_device(comm, plan.results[comm.rank]), on_device(comm, plan.others[comm.rank])

        def call() -> None:
            if comm.rank == 0:
                layer.redispatch(others, desc)
            else:
                layer.combine(results, desc)
            comm.synchronize()

        with pytest.raises(MismatchError) as caught:
            call()
        assert caught.value.argument == "collective"

    run_ranks(2, body)


def test_weights_on_some_ranks_alone_are_a_mismatch() -> None:
    plan = plan_of(Case((4, 4)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        arrays = [plan.inputs[comm.rank], plan.routing.ids[comm.rank], plan.weights[comm.rank]][: 2 + comm.rank]

        def call() -> None:
            layer.dispatch(*(on_device(comm, array) for array in arrays))
            comm.synchronize()

        with pytest.raises(MismatchError):
            call()

    run_ranks(2, body)


def test_a_narrowed_layer_has_its_own_descriptors_and_the_same_call_under_way() -> None:
    plan = plan_of(Case((3, 3), spare_tokens=1))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm, layout="padded")
        arrays = [on_device(comm, array[comm.rank]) for array in (plan.inputs, plan.routing.ids)]
        for wrong in (0, layer.ep_config.max_tokens + 1, 2.0, None):
            with pytest.raises(ArgumentError, match=r"^max_tokens"):
                layer.narrowed(wrong)
        with pytest.raises(ArgumentError, match=r"^input: has . tokens; expected at most max_tokens, 1"):
            layer.narrowed(1).dispatch(*arrays)
        narrow = layer.narrowed(layer.ep_config.max_tokens - 1)
        assert layer.narrowed(layer.ep_config.max_tokens) is layer
        pending = narrow.dispatch_send(*arrays)
        with pytest.raises(ArgumentError, match="another dispatch is under way"):
            layer.dispatch(*arrays)
        rows, _, desc = narrow.dispatch_recv(pending)
        for call in (lambda: layer.combine(rows, desc), lambda: layer.redispatch(arrays[0], desc)):
            with pytest.raises(ArgumentError, match=r"^ep_a2a_layout_desc"):
                call()
        narrow.combine(rows, desc)

    run_ranks(2, body)


@pytest.mark.parametrize("instead", ["dispatch", "combine", "layer", "finalize", "all_reduce"])
def test_calls_of_different_layers_are_a_mismatch(instead: str) -> None:
    plan = plan_of(Case((4, 4)))

    def body(comm: Communicator) -> None:
        layers = [plan.case.layer(comm, layout=layout) for layout in ("expert", "rank")]
        arrays = [on_device(comm, array[comm.rank]) for array in (plan.inputs, plan.routing.ids)]
        (rows, _, desc), _ = (layer.dispatch(*arrays) for layer in layers)
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: layers[1].dispatch(*arrays),
            "combine": lambda: layers[0].combine(rows, desc),
            "layer": lambda: plan.case.layer(comm),
            "finalize": layers[1].finalize,
            "all_reduce": lambda: comm.all_reduce(arrays[0]),
        }

        def call() -> None:
            if comm.rank == 0:
                layers[0].dispatch(*arrays)
            else:
                calls[instead]()
            comm.synchronize()

        with pytest.raises(MismatchError) as caught:
            call()
        assert caught.value.argument == "collective"
        assert instead == "combine" or "dispatch of a layer with 'expert' rows" in str(caught.value)

    run_ranks(2, body)


@pytest.mark.parametrize("announces", ["counts", "masks", "shared_masks"])
def test_a_rank_that_names_no_output_buffer_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, announces: str) -> None:
    """The kernels must notice that the ranks' calls differ, because calls in graphs are not compared at launch."""
    announce_by(announces, monkeypatch)
    plan = plan_of(Case((8, 8)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm, layout="rank", max_recv_tokens=16, output_buffers=1)
        assert layer.ctx.workspace.announces == announces
        if comm.rank == 1:
            monkeypatch.setattr(layer.ctx.workspace, "outputs", None)

        def call() -> None:
            layer.dispatch(*(on_device(comm, array[comm.rank]) for array in (plan.inputs, plan.routing.ids)))
            comm.synchronize()

        with pytest.raises(MismatchError):
            call()

    run_ranks(2, body)


def test_a_missing_rank_is_waited_for_within_the_time_out() -> None:
    plan = plan_of(Case((4, 4)))
    given_up = threading.Event()

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        impatient(comm, 1)

        def call() -> None:
            dispatch_of(layer, plan, comm)
            comm.synchronize()

        if comm.rank == 1:
            assert given_up.wait(TIMEOUT)
        with pytest.raises(WaitTimeoutError) as caught:
            call()
        if comm.rank == 0:
            assert (caught.value.rank, caught.value.peer) == (0, 1)
            given_up.set()

    run_ranks(2, body)


def test_a_layer_of_a_closed_communicator_is_closed() -> None:
    plan = plan_of(Case((4,)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        comm.close()
        with pytest.raises(ClosedError):
            dispatch_of(layer, plan, comm)
        layer.finalize()

    run_ranks(1, body)


@pytest.mark.host_only(reason="the arrays are NumPy's")
def test_the_result_of_a_combine_overlaps_only_sums_to_add() -> None:
    def body(comm: Communicator) -> None:
        with EPAll2AllLayer(comm, 8, 256, 2, 0, 4, 1, 1, dtype="float32", layout="rank") as layer:
            ids = np.tile(np.int32([0, 1]), (8, 1))
            rows, _, desc = layer.dispatch(np.ones((8, 256), np.float32), ids)
            memory = np.ones((9, 256), np.float32)
            out, slots = memory[1:], memory[1, :16].reshape(8, 2)
            calls: tuple[dict[str, Any], ...] = (
                {"added": (memory[:8],)},
                {"added": (out, memory[:8])},
                {"weights": memory[8, : len(rows)]},
                {"topk_weights": slots},
                {"order_ids": slots.view(np.int32)},
            )
            for options in calls:
                refused("out", lambda given=options: layer.combine(rows, desc, out=out, **given), "overlaps another")
            sent = layer.combine_send(rows, desc, topk_weights=slots)
            refused("out", lambda: layer.combine_recv(sent, out=out), "overlaps another")
            assert (layer.combine_recv(sent) == 1).all()
            assert (memory == 1).all()
            assert layer.combine(rows, desc, added=(out,), out=out) is out
            assert (out == 2).all()

    run_ranks(1, body)
