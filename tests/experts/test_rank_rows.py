"""Layers with layout="rank" (one row per token and rank) and "padded" rows, compared with numpy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, CapacityError, Communicator, EPAll2AllLayer
from proxyccl.channels.expert_parallel import geometry, recording
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.device._native import lib
from support.cases.expert_worlds import World, WorldOptions, open_world, params, world_name
from support.cases.reference import computed_once, numpy_dtype
from support.device_arrays import on_device, on_host, overwrite
from support.devices import runtime_with_blocks
from support.ranks import Ranks
from support.running import run_ranks

Values = NDArray[Any]
HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """The inputs of all ranks.

    Attributes:
        tokens: number of tokens of each rank.
        ids_dtype: type of the expert ids.
        drop: the share of slots that choose no expert.
    """

    tokens: tuple[int, ...]
    experts_per_rank: int = 3
    topk: int = 4
    dtype: str = "float32"
    ids_dtype: str = "int64"
    drop: float = 0.2
    num_sm: int = 3
    hidden: int = HIDDEN

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    @functools.cached_property
    def ids(self) -> list[Values]:
        """The expert ids of each rank's tokens. No token chooses an expert twice."""
        rng, out = np.random.default_rng(1), []
        for tokens in self.tokens:
            all_ids = max(self.experts, self.topk)
            chosen = np.array([rng.permutation(all_ids) for _ in range(tokens)], np.int64)
            chosen = chosen.reshape(tokens, all_ids)[:, : self.topk]
            none = (rng.random(chosen.shape) < self.drop) | (chosen >= self.experts)
            out.append(np.where(none, rng.choice([-1, self.experts], chosen.shape), chosen).astype(self.ids_dtype))
        return out

    @functools.cached_property
    def inputs(self) -> list[Values]:
        rng = np.random.default_rng(2)
        return [rng.normal(size=(tokens, self.hidden)).astype(numpy_dtype(self.dtype)) for tokens in self.tokens]

    @functools.cached_property
    def weights(self) -> list[NDArray[np.float32]]:
        rng = np.random.default_rng(3)
        return [rng.random(ids.shape).astype(np.float32) for ids in self.ids]

    def here(self, rank: int) -> list[NDArray[np.bool_]]:
        """Returns, for each source rank, a mask of the slots that choose an expert of `rank`."""
        return [(ids >= 0) & (ids < self.experts) & (ids // self.experts_per_rank == rank) for ids in self.ids]

    def layer(self, comm: Communicator, **options: Any) -> EPAll2AllLayer:
        sizes = (
            max(1, *self.tokens),
            self.hidden,
            self.topk,
            comm.rank,
            self.experts,
            comm.local_world_size,
            comm.world_size,
        )
        return EPAll2AllLayer(comm, *sizes, **{"dtype": self.dtype, "num_sm": self.num_sm, "layout": "rank", **options})

    def arguments(self, comm: Communicator) -> list[Any]:
        return [on_device(comm, arrays[comm.rank]) for arrays in (self.inputs, self.ids, self.weights)]


@dataclass(frozen=True)
class Rows:
    """The rows that a rank should receive: one row per token that chooses at least one of the rank's experts."""

    rows: Values
    experts: NDArray[np.int32]
    weights: NDArray[np.float32]
    tokens: NDArray[np.int32]
    per_expert: list[int]


@computed_once
def rows_by_rank(case: Case, rank: int) -> Rows:
    here = case.here(rank)
    came = [mask.any(axis=1) for mask in here]
    first = rank * case.experts_per_rank

    def of_all(arrays: list[Values]) -> Values:
        return np.concatenate([array[token] for array, token in zip(arrays, came, strict=True)])

    mask, ids = of_all(here), of_all(case.ids)
    local = np.where(mask, ids - first, -1).astype(case.ids_dtype)
    return Rows(
        rows=of_all(case.inputs),
        experts=local,
        weights=np.where(mask, of_all(case.weights), 0).astype(np.float32),
        tokens=np.concatenate([np.flatnonzero(token) for token in came]).astype(np.int32),
        per_expert=[int((local == expert).sum()) for expert in range(case.experts_per_rank)],
    )


def same(got: Any, expected: Values) -> None:
    values = on_host(got)
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
    assert values.tobytes() == expected.tobytes()


def sums_over_ranks(case: Case, rank: int, results: list[Values]) -> Values:
    """Returns a rank's combined output if `results` are the results of each rank's rows. The results of a token, one
    per rank, are added in the order in which the token's slots first choose a rank.
    """
    total = np.zeros((case.tokens[rank], case.hidden), np.float32)
    first = sum(case.tokens[:rank])
    row_of = []  # row_of[owner][token] is the token's row on rank `owner`
    for owner in range(case.ranks):
        came = np.concatenate(case.here(owner)).any(axis=1)
        row_of.append((np.cumsum(came) - came)[first:])
    for token, ids in enumerate(case.ids[rank]):
        kept = ids[(ids >= 0) & (ids < case.experts)]
        for owner in dict.fromkeys((kept // case.experts_per_rank).tolist()):
            total[token] += results[owner][row_of[owner][token]].astype(np.float32)
    return total.astype(numpy_dtype(case.dtype))


def check_rank_rows(comm: Communicator, case: Case, **options: Any) -> None:
    rank = comm.rank
    expected = [rows_by_rank(case, each) for each in range(case.ranks)]
    results = [(3 * each.rows).astype(each.rows.dtype) for each in expected]
    mine, count = expected[rank], len(expected[rank].rows)
    with case.layer(comm, **options) as layer:
        most = layer.max_recv_tokens
        for halves in (False, True):
            if halves:
                rows, weights, desc = layer.dispatch_recv(layer.dispatch_send(*case.arguments(comm)))
            else:
                rows, weights, desc = layer.dispatch(*case.arguments(comm))
            same(on_host(rows)[:count], mine.rows)
            same(on_host(weights)[:count], mine.weights)
            same(on_host(desc.local_expert_ids)[:count], mine.experts)
            same(on_host(desc.source_tokens)[:count], mine.tokens)
            assert (on_host(desc.local_expert_ids)[count:] == -1).all()
            if most is None:
                assert desc.num_tokens_per_expert() == mine.per_expert
                assert desc.num_tokens_per_expert(8) == [-(-rows // 8) * 8 for rows in mine.per_expert]
            padding = 0 if most is None else most - count
            back = layer.combine(on_device(comm, np.pad(results[rank], ((0, padding), (0, 0)))), desc)
            same(on_host(back) + 0, sums_over_ranks(case, rank, results) + 0)
            if layer.ctx.workspace.outputs is not None:  # peers load rows that are in output buffers
                loaded = layer.combine_input(desc)
                overwrite(loaded, np.pad(results[rank], ((0, padding), (0, 0))))
                same(on_host(layer.combine(loaded, desc)) + 0, sums_over_ranks(case, rank, results) + 0)
                same(
                    on_host(layer.combine(rows, desc)) + 0, sums_over_ranks(case, rank, [e.rows for e in expected]) + 0
                )
                if rank == 0:  # rank 0's rows are in no buffer, so it must send them; peers load the other ranks' rows
                    rows = on_device(comm, on_host(rows))
                same(
                    on_host(layer.combine(rows, desc)) + 0, sums_over_ranks(case, rank, [e.rows for e in expected]) + 0
                )
            given = case.weights[rank]
            kept = (case.ids[rank] >= 0) & (case.ids[rank] < case.experts)
            sent = on_device(comm, np.pad(mine.weights, ((0, padding), (0, 0))))
            same(layer.combine_weights(sent, desc), np.where(kept, given, 0).astype(np.float32))
            same(on_host(layer.redispatch(case.arguments(comm)[0], desc))[:count], mine.rows)


def check_padded_rows(comm: Communicator, case: Case) -> None:
    rank, per_rank = comm.rank, case.experts_per_rank
    ids = [np.where(ids < 0, case.experts, ids).astype(np.int32) for ids in case.ids]
    with case.layer(comm, layout="padded") as layer:
        for halves in (False, True):
            arguments = [on_device(comm, arrays[rank]) for arrays in (case.inputs, ids)]
            rows, _, desc = (
                layer.dispatch_recv(layer.dispatch_send(*arguments)) if halves else layer.dispatch(*arguments)
            )
            got, room = on_host(rows), case.ranks * max(1, *case.tokens)
            assert got.shape == (per_rank, room, case.hidden)
            tokens, counts = on_host(desc.source_tokens).reshape(per_rank, room), on_host(desc.expert_rows)
            row_of = on_host(desc.slot_rows)[rank, : len(ids[rank])]
            told = on_host(desc.token_dst_scatter_idx)[rank // comm.local_world_size, : len(ids[rank])]
            own = ids[rank] // per_rank == rank
            assert (told[own] == row_of[own]).all()
            for local in range(per_rank):
                came = [(each == rank * per_rank + local).any(axis=1) for each in ids]
                values = np.concatenate([x[token] for x, token in zip(case.inputs, came, strict=True)])
                assert counts[local] == len(values)
                same(got[local, : len(values)], values)
                same(tokens[local, : len(values)], np.concatenate([np.flatnonzero(t) for t in came]).astype(np.int32))
            weights = on_device(comm, case.weights[rank]) if layer.sums_on_own_node else None
            total = np.zeros((case.tokens[rank], case.hidden), np.float32)
            for k in range(case.topk):
                factor = case.weights[rank][:, k] if weights is not None else np.ones(case.tokens[rank], np.float32)
                kept = ids[rank][:, k] < case.experts
                total[kept] += (case.inputs[rank].astype(np.float32) * factor[:, None])[kept]
            if halves:
                back = layer.combine_recv(layer.combine_send(rows, desc, topk_weights=weights))
            else:
                back = layer.combine(rows, desc, topk_weights=weights)
            np.testing.assert_allclose(
                on_host(back).astype(np.float32), total, rtol=1e-6 if case.dtype == "float32" else 1e-2
            )


WORLDS: list[WorldOptions] = [(size, {}) for size in (1, 2, 3, 5)]
WORLDS += [(3, {"announced_slots": 0}), (4, {"few_tokens": 0, "announced_slots": 0})]
WORLDS += [(4, {"local_world_size": 2, "batch_tokens": 3})]
REPRESENTED = [(5, {})]  # runs only with --full, because the case of 3 ranks also has one node


@pytest.fixture(scope="module", params=params(WORLDS, REPRESENTED), ids=world_name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request.param) as opened:
        yield opened


TOKENS = (7, 0, 13, 1, 5)
CASES = [
    Case(TOKENS),
    Case(TOKENS, topk=1, ids_dtype="int32", dtype="bfloat16"),
    Case(TOKENS, topk=16, experts_per_rank=1, drop=0.9),
    Case(TOKENS, drop=1.0),
    Case(TOKENS, experts_per_rank=64, topk=8, num_sm=20),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_row_for_each_rank(world: World, case: Case) -> None:
    case = Case(**{**case.__dict__, "tokens": TOKENS[: world.world_size]})
    world.run(lambda comm: check_rank_rows(comm, case))


@pytest.mark.parametrize(
    "options",
    [
        {"max_recv_tokens": 40},
        {"enable_local_combine": True},
        {"output_buffers": 1},
        {"output_buffers": 2, "max_recv_tokens": 40},
        {"output_buffers": 1, "keeps_outputs": True, "enable_local_combine": True},
        {"output_buffers": 1, "keeps_outputs": True, "max_recv_tokens": 40},
    ],
    ids=repr,
)
def test_a_row_for_each_rank_with(world: World, options: dict[str, Any]) -> None:
    if not world.one_node and "enable_local_combine" in options:
        pytest.skip("sums of ranks are for one node")
    case = Case(TOKENS[: world.world_size])
    world.run(lambda comm: check_rank_rows(comm, case, **options))


@pytest.mark.parametrize("options", [{}, {"output_buffers": 1}], ids=repr)
@pytest.mark.parametrize("times", [1, 500])
def test_ranks_are_added_in_their_order(times: int, options: dict[str, Any]) -> None:
    """A token's rows are added in the order of the ranks, as by DeepEP's `Buffer`, whatever the order of the token's
    experts.
    """
    values = [2.0**30, 1.0, -(2.0**30), 1.0]  # the float32 sum of these values depends on the order of addition
    orders = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [3, 0, -1, 2]] * times, np.int32)

    def body(comm: Communicator) -> None:
        sizes = (len(orders), HIDDEN, 4, comm.rank, 4, 4, 4)
        with EPAll2AllLayer(comm, *sizes, dtype="float32", layout="rank", num_sm=2, **options) as layer:
            tokens = np.zeros((len(orders), HIDDEN), np.float32)
            rows, _, desc = layer.dispatch(on_device(comm, tokens), on_device(comm, orders))
            results = np.full(rows.shape, values[comm.rank], np.float32)
            for added, expected in ((), [1, 1, 1, 1]), ((on_device(comm, tokens + 64),), [1, 1, 1, 1]):
                combined = on_host(layer.combine(on_device(comm, results), desc, added=added))
                assert combined[:, 0].tolist() == expected * times, combined[:4, 0]

    with Ranks(4, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


def test_a_block_may_have_more_slots_than_it_keeps() -> None:
    case = Case((1100, 3), num_sm=1, hidden=4)
    assert case.tokens[0] * case.topk > lib.PROXYCCL_KEPT_TARGETS
    run_ranks(2, lambda comm: check_rank_rows(comm, case, output_buffers=1))


@pytest.mark.parametrize(
    "options", [{}, {"output_buffers": 1}, {"output_buffers": 1, "max_recv_tokens": 200}], ids=repr
)
def test_masks_of_several_words_and_rows_of_several_pieces(options: dict[str, Any]) -> None:
    case = Case((60, 33), topk=3, hidden=1036)

    def body(comm: Communicator) -> None:
        check_rank_rows(comm, case, **options)
        with case.layer(comm, **options) as layer:
            assert layer.ctx.workspace.experts.choice_packets == 3  # one packet (2 words) per rank, and one for bad ids

    with Ranks(2, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


@pytest.mark.host_only(reason="elsewhere the rows would have to be longer")
def test_rows_whose_words_times_their_pieces_take_more_than_32_bits() -> None:
    hidden = (1 << 21) + 4

    def body(comm: Communicator) -> None:
        sizes = (1, hidden, 1, comm.rank, 2, 2, 2)
        with EPAll2AllLayer(comm, *sizes, dtype="float32", layout="rank", output_buffers=1) as layer:
            assert layer.ctx.workspace.announces == "masks"
            row = np.arange(hidden, dtype=np.float32)
            rows = layer.dispatch((row + comm.rank)[None], np.array([[1 - comm.rank]], np.int32))[0]
            assert np.array_equal(rows[0], row + 1 - comm.rank)

    run_ranks(2, body)


def test_several_blocks_write_the_tables_of_few_tokens_with_many_slots() -> None:
    case = Case((128, 77, 128), topk=8, hidden=4, num_sm=16)

    def body(comm: Communicator) -> None:
        options: dict[str, Any] = {"output_buffers": 2, "max_recv_tokens": 400}
        check_rank_rows(comm, case, **options)
        with case.layer(comm, **options) as layer:
            experts = layer.ctx.workspace.experts
            assert (layer.ctx.workspace.announces, experts.blocks) == ("masks", 16)

    with Ranks(3, make_runtime=functools.partial(runtime_with_blocks, blocks=16)) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("max_recv_tokens", [None, 2000])
def test_blocks_announce_shares_of_many_tokens(max_recv_tokens: int | None) -> None:
    case = Case((700, 333, 0), topk=3, hidden=4)

    def body(comm: Communicator) -> None:
        options: dict[str, Any] = {"output_buffers": 2, "max_recv_tokens": max_recv_tokens}
        check_rank_rows(comm, case, **options)
        with case.layer(comm, **options) as layer:
            experts = layer.ctx.workspace.experts
            # 11 packets per rank (one for every 64 of at most 700 tokens), and one packet per block for bad ids.
            assert experts.choice_packets == experts.blocks + 3 * 11

    with Ranks(3, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


def test_masks_are_for_as_many_ranks_as_a_word_has_bits() -> None:
    def packets(ranks: int, tokens: int, buffers: int = 0) -> int:
        options = LayerOptions(tokens, 8, 4, 0, 2 * ranks, ranks, ranks, layout="rank", output_buffers=buffers)
        made = geometry.Geometry(options, blocks=4, threads=512, nodes=1, local_size=ranks)
        return int(made.experts.choice_packets)

    assert packets(64, 8) == 1 + 64
    assert packets(65, 8) == 0
    assert packets(8, 8192, buffers=1) == 4 + 8 * 128
    assert packets(8, 9000, buffers=1) == 0  # all ranks' choices would not fit in a block's memory


@pytest.mark.host_only(reason="its blocks have few threads, and it needs no devices")
def test_more_ranks_than_a_block_had_threads() -> None:
    case = Case((2,) * 17, experts_per_rank=1, topk=2)
    run_ranks(17, lambda comm: check_rank_rows(comm, case, output_buffers=1))


@pytest.mark.parametrize("case", CASES[:4], ids=range(4))
def test_padded_rows(world: World, case: Case) -> None:
    case = Case(**{**case.__dict__, "tokens": TOKENS[: world.world_size]})
    world.run(lambda comm: check_padded_rows(comm, case))


@pytest.mark.parametrize("buffers", [0, 1])
@pytest.mark.parametrize("announced", [True, False])
def test_all_ranks_learn_that_a_layer_is_too_small(
    announced: bool, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not announced:
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)

    def body(comm: Communicator) -> None:
        case, larger = Case((3, 2)), Case((9, 2))
        with case.layer(comm, grows=True, output_buffers=buffers) as layer:
            layer.dispatch(*case.arguments(comm))
            with pytest.raises(CapacityError) as caught:
                layer.dispatch(*larger.arguments(comm))
            assert caught.value.needed == 9
            same(layer.dispatch(*case.arguments(comm))[0], rows_by_rank(case, comm.rank).rows)

    with Ranks(2, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("announced", [True, False])
def test_an_output_stays_until_its_buffer_is_taken_again(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not announced:
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)

    def body(comm: Communicator) -> None:
        cases = [Case((3 + i, 2)) for i in range(3)]
        with Case((9, 2)).layer(comm, output_buffers=2) as layer:
            outputs = [layer.dispatch(*case.arguments(comm))[0] for case in cases[:2]]
            halves = layer.dispatch_recv(layer.dispatch_send(*cases[2].arguments(comm)))[0]  # takes no buffer
            for case, rows in zip(cases, [*outputs, halves], strict=True):
                same(rows, rows_by_rank(case, comm.rank).rows)
            again, _, desc = layer.dispatch(*cases[2].arguments(comm))
            same(again, rows_by_rank(cases[2], comm.rank).rows)
            same(outputs[1], rows_by_rank(cases[1], comm.rank).rows)
            assert desc.output_buffer == 1
            overwrite(again, 5)
            assert (on_host(outputs[0]).reshape(-1)[:1] == 5).all()  # the same memory

    with Ranks(2, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("max_recv_tokens", [None, 40])
@pytest.mark.parametrize("announced", [True, False])
def test_one_rank_alone_may_record_its_dispatches(
    announced: bool, max_recv_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only one rank's tokens require a gradient, that rank's outputs stay valid; other ranks reuse buffers."""
    if not announced:
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)

    class Recorder:
        def dispatch(self, layer: Any, call: Callable[[], Any], *_: Any) -> Any:
            return call()

    recording_threads: set[int] = set()

    def recorder_of(*_: Any) -> Recorder | None:
        return Recorder() if threading.get_ident() in recording_threads else None

    monkeypatch.setattr(recording, "recorder_of", recorder_of)

    def body(comm: Communicator) -> None:
        cases = [Case((3 + i, 2)) for i in range(3)]
        with Case((9, 2)).layer(comm, output_buffers=1, max_recv_tokens=max_recv_tokens) as layer:
            outputs = []
            for case in cases:  # later iterations reuse the prepared calls
                recording_threads.update([threading.get_ident()] if comm.rank == 1 else [])
                rows, _, desc = layer.dispatch(*case.arguments(comm))
                recording_threads.discard(threading.get_ident())
                outputs.append(rows)
                sums = sums_over_ranks(case, comm.rank, [rows_by_rank(case, rank).rows for rank in range(2)])
                same(on_host(layer.combine(rows, desc)) + 0, sums + 0)
            for case, rows in zip(cases, outputs, strict=True) if comm.rank == 1 else ():
                expected = rows_by_rank(case, comm.rank).rows
                same(on_host(rows)[: len(expected)], expected)

    with Ranks(2, make_runtime=runtime_with_blocks) as ranks:
        ranks.run(body)


def test_what_is_refused() -> None:
    def body(comm: Communicator) -> None:
        case = Case((3,))

        def refused(argument: str, call: Callable[[], Any]) -> None:
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.argument == argument

        refused("layout", lambda: case.layer(comm, layout="token"))
        refused("weight_dtype", lambda: case.layer(comm, weight_dtype="float64"))
        refused("num_tot_experts", lambda: Case((3,), experts_per_rank=4096).layer(comm))
        refused("output_buffers", lambda: case.layer(comm, layout="expert", output_buffers=1))
        refused("output_buffers", lambda: case.layer(comm, output_buffers=-1))
        refused("output_buffers", lambda: case.layer(comm, output_buffers=1.0))
        refused("max_recv_tokens", lambda: case.layer(comm, layout="padded", max_recv_tokens=5))
        refused("expert_alignment", lambda: case.layer(comm, expert_alignment=8))
        refused("max_tokens", lambda: Case((3 << 20,), experts_per_rank=1024).layer(comm, layout="padded"))
        layer = case.layer(comm)
        rows, ids, weights = case.arguments(comm)
        refused("full_scatter_indices", lambda: layer.dispatch(rows, ids, weights, ids))
        bad = on_device(comm, np.full((3, 4), case.experts + 1))
        refused("exp_indices", lambda: layer.dispatch(rows, bad, weights))
        refused("exp_indices", lambda: case.layer(comm, output_buffers=1).dispatch(rows, bad, weights))
        aligned = case.layer(comm, layout="expert", expert_alignment=8)
        narrow = on_device(comm, case.ids[comm.rank].astype(np.int32))
        refused("full_scatter_indices", lambda: aligned.dispatch(rows, narrow, weights, narrow))
        desc = layer.dispatch(rows, ids)[2]
        refused("alignment", lambda: desc.num_tokens_per_expert(0))
        double = case.layer(comm, layout="expert", weight_dtype="float64")
        refused("combine_weights", lambda: double.combine_weights(weights, desc))
        fixed = case.layer(comm, max_recv_tokens=9).dispatch(rows, ids)[2]
        refused("num_tokens_per_expert", fixed.num_tokens_per_expert)

    with Ranks(1) as ranks:
        ranks.run(body)
