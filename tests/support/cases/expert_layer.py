"""Test cases of the expert-parallel layer, whose expected results expert_oracle.py computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import (
    Communicator,
    EPAll2AllLayer,
)
from proxyccl.channels.expert_parallel import geometry
from support import running
from support.cases.expert_oracle import Routing
from support.cases.reference import numpy_dtype, poison
from support.device_arrays import on_device, on_host
from support.devices import runtime_with_blocks

if TYPE_CHECKING:  # programs of ranks import this module
    import pytest

run_ranks = functools.partial(running.run_ranks, make_runtime=runtime_with_blocks)
Values = NDArray[Any]
DTYPES = ("float32", "float64", "float16", "bfloat16")
ROUTINGS = ("uniform", "one expert", "one rank", "mostly dropped", "all dropped", "an expert several times")


@dataclass(frozen=True)
class Case:
    """A configuration of the layer, and the seed from which all ranks derive all values.

    Attributes:
        tokens: number of tokens of each rank.
        local_world_size: number of ranks per node; None if all ranks are on one node.
        routing: the distribution of the chosen experts, one of ROUTINGS.
        scatter: the full scatter indices to pass, which are None, "sorted" (the layer's own order) or "random".
        alignment: the layer's `expert_alignment`.
        spare_tokens: the layer's max_tokens minus the largest number of tokens of a rank.
        spare_rows: number of rows of each output beyond the largest number that a rank receives; None for outputs of
            exact size.
        halves: whether dispatch and combine are split into send and receive calls.
    """

    tokens: tuple[int, ...]
    experts_per_rank: int = 2
    topk: int = 2
    hidden: int = 8
    dtype: str = "float32"
    local_world_size: int | None = None
    routing: str = "uniform"
    scatter: str | None = None
    alignment: int | None = None
    local_combine: bool = False
    spare_tokens: int = 0
    spare_rows: int | None = None
    halves: bool = False
    num_sm: int = 3
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    @property
    def max_tokens(self) -> int:
        return max(1, *self.tokens) + self.spare_tokens

    def layer(self, comm: Communicator, **options: Any) -> EPAll2AllLayer:
        return EPAll2AllLayer(
            comm,
            self.max_tokens,
            self.hidden,
            self.topk,
            comm.rank,
            self.experts,
            comm.local_world_size,
            comm.world_size,
            **{
                "dtype": self.dtype,
                "num_sm": self.num_sm,
                "enable_local_combine": self.local_combine,
                "expert_alignment": self.alignment,
                **options,
            },
        )

    def expert_ids(self, rank: int) -> NDArray[np.int32]:
        rng = np.random.default_rng((self.seed, rank, 1))
        shape = (self.tokens[rank], self.topk)
        dropped = np.full(shape, self.experts)
        chosen = {
            "uniform": rng.integers(0, self.experts + 1, shape),
            "one expert": np.full(shape, self.experts // 2),
            "one rank": rng.integers(0, self.experts_per_rank, shape),
            "mostly dropped": np.where(rng.random(shape) < 0.9, dropped, rng.integers(0, self.experts, shape)),
            "all dropped": dropped,
            "an expert several times": np.repeat(rng.integers(0, self.experts, (shape[0], 1)), self.topk, axis=1),
        }[self.routing]
        return np.ascontiguousarray(chosen, np.int32)


class Plan:
    """The inputs and expected outputs of all ranks of a case.

    Attributes:
        most_rows: the fixed number of rows of every output; None if outputs have the exact size.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        ids = tuple(case.expert_ids(rank) for rank in range(case.ranks))
        nodes_of = case.local_world_size or case.ranks
        self.routing = Routing(ids, case.experts, nodes_of, case.max_tokens, alignment=case.alignment or 1)
        self.scatter: NDArray[np.int32] | None = None
        if case.scatter is not None:
            flat = self.routing.expert
            self.scatter = flat.argsort(kind="stable").argsort(kind="stable").astype(np.int32).reshape(-1, case.topk)
        if case.scatter == "random":
            self.scatter = self.routing.random_scatter(np.random.default_rng((case.seed, 7)))
        self.routing = replace(self.routing, scatter=self.scatter)
        self.most_rows = None if case.spare_rows is None else max(1, *self.routing.rows) + case.spare_rows

    @functools.cached_property
    def inputs(self) -> list[Values]:
        """Random bytes for each rank's tokens: dispatch does no arithmetic, so even NaNs must arrive unchanged."""
        return [self._bytes(tokens, rank, 0) for rank, tokens in enumerate(self.case.tokens)]

    @functools.cached_property
    def others(self) -> list[Values]:
        return [self._bytes(tokens, rank, 4) for rank, tokens in enumerate(self.case.tokens)]

    @functools.cached_property
    def weights(self) -> list[Values]:
        rngs = [np.random.default_rng((self.case.seed, rank, 2)) for rank in range(self.case.ranks)]
        return [rng.normal(size=ids.shape).astype(np.float32) for rng, ids in zip(rngs, self.routing.ids, strict=True)]

    @functools.cached_property
    def results(self) -> list[Values]:
        """Random results of the experts for the rows of each rank."""
        rngs = [np.random.default_rng((self.case.seed, rank, 3)) for rank in range(self.case.ranks)]
        return [
            rng.normal(size=(rows, self.case.hidden)).astype(numpy_dtype(self.case.dtype))
            for rng, rows in zip(rngs, self.routing.rows, strict=True)
        ]

    @functools.cached_property
    def scales(self) -> list[Values]:
        """Row weights, signed powers of 2: products are exact, so fused multiply-adds do not change the sums."""
        rngs = [np.random.default_rng((self.case.seed, rank, 5)) for rank in range(self.case.ranks)]
        powers = [np.ldexp(1.0, rng.integers(-3, 4, rows)) for rng, rows in zip(rngs, self.routing.rows, strict=True)]
        signs = [rng.choice([-1.0, 1.0], rows) for rng, rows in zip(rngs, self.routing.rows, strict=True)]
        return [(power * sign).astype(np.float32) for power, sign in zip(powers, signs, strict=True)]

    @functools.cached_property
    def rows(self) -> list[Values]:
        return self.routing.dispatch(self.inputs)

    @functools.cached_property
    def other_rows(self) -> list[Values]:
        return self.routing.dispatch(self.others)

    @functools.cached_property
    def row_weights(self) -> list[Values]:
        return self.routing.rows_from(self.weights)

    @functools.cached_property
    def combined(self) -> list[Values]:
        return self.routing.combine(self.results, local_combine=self.case.local_combine)

    @functools.cached_property
    def scaled(self) -> list[Values]:
        return self.routing.combine(self.results, self.scales, local_combine=self.case.local_combine)

    def _bytes(self, rows: int, rank: int, what: int) -> Values:
        dtype = numpy_dtype(self.case.dtype)
        rng = np.random.default_rng((self.case.seed, rank, what))
        return rng.integers(0, 256, (rows, self.case.hidden * dtype.itemsize), np.uint8).view(dtype)


def plan_of(case: Case) -> Plan:
    """Returns a case's plan with all values computed, so that threads can share the plan."""
    plan = Plan(case)
    for name in ("rows", "other_rows", "row_weights", "combined", "scaled"):
        getattr(plan, name)
    return plan


def same(got: Any, expected: Values, what: str) -> None:
    """Asserts that two arrays have equal bytes, shape and type."""
    values = on_host(got)
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape), what
    if values.tobytes() != expected.tobytes():
        wrong = np.argwhere(values != expected)
        raise AssertionError(f"{what}: {len(wrong)} of {expected.size} differ, first at {wrong[:1].tolist()}")


def same_numbers(got: Any, expected: Values, what: str) -> None:
    """Asserts that two arrays have equal numbers; zeros of both signs are equal."""
    same(on_host(got) + np.zeros(1, expected.dtype), expected + np.zeros(1, expected.dtype), what)


def same_rows(got: Any, expected: Values, most: int | None, what: str, filled: Values) -> None:
    """Asserts that the filled rows equal the rows of `expected`, and that `got` has `most` rows (if `most` is None, the
    number of rows of `expected`).
    """
    values = on_host(got)
    assert values.shape[0] == (len(expected) if most is None else most), what
    same(values[: len(expected)][filled], expected[filled], what)


def same_layout(desc: Any, plan: Plan, rank: int) -> None:
    """Asserts that all fields of the descriptor are as expected; fields with an entry per row are compared only for
    filled rows.
    """
    expected = plan.routing.layout(rank)
    for field in fields(expected):
        got, want = getattr(desc, field.name), getattr(expected, field.name)
        if want is None or isinstance(want, int):
            assert got == want, field.name
        elif field.name.startswith("skipped"):
            same_rows(got, want, plan.most_rows, field.name, plan.routing.filled(rank))
        else:
            same(got, want, field.name)


def placed(comm: Communicator, values: Values, rows: int | None = None) -> Any:
    """Returns the values in an array that begins one row into its allocation, so that odd row sizes are misaligned.
    `rows` pads the array to this number of rows.
    """
    before, behind = 1, 0 if rows is None else rows - len(values)
    padded = np.full((before + len(values) + behind, *values.shape[1:]), 7, values.dtype)
    padded[before : before + len(values)] = values
    return on_device(comm, padded)[before:]


def dispatch_of(layer: EPAll2AllLayer, plan: Plan, comm: Communicator, **options: Any) -> Any:
    """Dispatches the case's inputs with weights, and returns the results."""
    rank = comm.rank
    arrays = [placed(comm, array) for array in (plan.inputs[rank], plan.routing.ids[rank], plan.weights[rank])]
    scatter = None if plan.scatter is None else placed(comm, plan.scatter)
    if plan.case.halves:
        return layer.dispatch_recv(layer.dispatch_send(*arrays, scatter, **options))
    return layer.dispatch(*arrays, scatter, **options)


def combine_of(layer: EPAll2AllLayer, plan: Plan, rows: Any, desc: Any, weights: Any = None, out: Any = None) -> Any:
    if plan.case.halves:
        return layer.combine_recv(layer.combine_send(rows, desc, weights=weights), out=out)
    return layer.combine(rows, desc, weights=weights, out=out)


def check_layer(comm: Communicator, plan: Plan, layer: EPAll2AllLayer) -> None:
    """Calls every operation of the layer once and checks the results."""
    rank, most = comm.rank, plan.most_rows
    count, filled = plan.routing.rows[rank], plan.routing.filled(rank)
    rows, weights, desc = dispatch_of(layer, plan, comm)
    same_rows(rows, plan.rows[rank], most, "output", filled)
    same_rows(weights, plan.row_weights[rank], most, "weights", filled)
    same_layout(desc, plan, rank)
    if plan.case.alignment is not None:
        assert np.array_equal(on_host(desc.row_slots)[:count] >= 0, filled)
        if most is None:
            assert desc.num_tokens_per_expert() == plan.routing.rows_of_experts(rank)
    if most is not None:
        assert on_host(desc.num_recv_tokens).tolist() == [count]

    results, scales = placed(comm, plan.results[rank], most), placed(comm, plan.scales[rank], most)
    same_numbers(combine_of(layer, plan, results, desc), plan.combined[rank], "combine")
    expected = plan.scaled[rank]
    guarded = poison((len(expected) + 2) * plan.case.hidden, expected.dtype).reshape(-1, plan.case.hidden)
    edges = guarded[[0, -1]].tobytes()
    base = on_device(comm, guarded)
    out = base[1 : 1 + len(expected)]
    assert combine_of(layer, plan, results, desc, scales, out) is out
    same_numbers(out, expected, "weighted combine")
    assert on_host(base)[[0, -1]].tobytes() == edges, "wrote outside the array"
    again = layer.redispatch(placed(comm, plan.others[rank]), desc)
    same_rows(again, plan.other_rows[rank], most, "redispatch", filled)
    if most is not None:
        layer.check()


def check(comm: Communicator, plan: Plan) -> None:
    with plan.case.layer(comm, max_recv_tokens=plan.most_rows) as layer:
        check_layer(comm, plan, layer)


def announce_by(announces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the layers of a test announce rows by `announces`: "counts" or "shared_masks"; else by their default."""
    if announces in ("counts", "shared_masks"):
        monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 0)
    if announces == "counts":
        monkeypatch.setattr(geometry.Geometry, "_masks_fit", lambda *_: False)
