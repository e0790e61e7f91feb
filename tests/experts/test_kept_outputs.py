"""Peers store rows directly in output buffers. Output arrays in a buffer stay valid while the program holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, EPAll2AllLayer
from proxyccl.device.arrays.array import as_view
from support.device_arrays import on_device, on_host
from support.devices import most_ranks
from support.ranks import Ranks
from support.running import run_ranks

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 9, 16, 2, 2


def make_layer(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS_PER_RANK * comm.world_size)
    ranks = (comm.local_world_size, comm.world_size)
    kept = {"dtype": "float32", "layout": "rank", "output_buffers": 2, "keeps_outputs": True}
    return EPAll2AllLayer(comm, *sizes, *ranks, **{**kept, **options})


def dispatch(comm: Communicator, layer: EPAll2AllLayer, seed: int) -> tuple[Any, Any]:
    """Makes a dispatch in which every token goes to both ranks. Returns the rows and the descriptor."""
    x = np.full((TOKENS, HIDDEN), 100 * seed + comm.rank, np.float32)
    ids = np.array([[0, EXPERTS_PER_RANK * (comm.world_size - 1)]] * TOKENS, np.int64)
    rows, _, desc = layer.dispatch(on_device(comm, x), on_device(comm, ids))
    return rows, desc


def expected(comm: Communicator, seed: int) -> Any:
    if comm.rank not in (0, comm.world_size - 1):
        return np.empty((0, HIDDEN), np.float32)
    values = [100 * seed + source for source in range(comm.world_size)]
    return np.repeat(np.array(values, np.float32), TOKENS)[:, None] * np.ones(HIDDEN, np.float32)


def lies_in_buffer(layer: EPAll2AllLayer, rows: Any) -> bool:
    outputs = layer.ctx.workspace.outputs
    return outputs is not None and as_view(rows, "rows").ptr in outputs.numbers


@pytest.mark.parametrize("options", [{}, {"max_recv_tokens": 5 * TOKENS}], ids=repr)
@pytest.mark.parametrize("ranks", [size for size in (1, 2, 3) if size <= most_ranks()])
def test_outputs_stay_as_long_as_an_array_of_them(ranks: int, options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        with make_layer(comm, **options) as layer:
            held = [dispatch(comm, layer, seed) for seed in range(5)]
            for seed, (rows, desc) in enumerate(held):
                count = len(expected(comm, seed))
                np.testing.assert_array_equal(on_host(rows)[:count], expected(comm, seed))
                back = on_host(layer.combine(rows, desc))
                np.testing.assert_array_equal(back, min(2, comm.world_size) * (100.0 * seed + comm.rank) + 0 * back)
        for seed, (rows, _) in enumerate(held):  # even after finalize
            count = len(expected(comm, seed))
            np.testing.assert_array_equal(on_host(rows)[:count], expected(comm, seed))

    run_ranks(ranks, body)


@pytest.mark.host_only("arrays of ours on GPUs are copied; tests/deep_ep_clients has torch's")
def test_repeated_calls_keep_no_output(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with make_layer(comm) as layer:
            for seed in range(2):  # the second iteration reuses the prepared calls
                rows, desc = dispatch(comm, layer, seed)
                layer.combine(rows, desc)
                del rows, desc
            held = [dispatch(comm, layer, seed)[0] for seed in range(2)]
            assert [lies_in_buffer(layer, rows) for rows in held] == [True, True]

    pair.run(body)


@pytest.mark.host_only("arrays of ours on GPUs are copied; tests/deep_ep_clients has torch's")
def test_a_buffer_is_free_when_the_last_array_in_it_is_gone(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with make_layer(comm) as layer:
            held = [dispatch(comm, layer, seed)[0] for seed in range(3)]
            assert [lies_in_buffer(layer, rows) for rows in held] == [True, True, False]
            part = held[1][3:5]
            held.clear()
            for seed in range(3):  # each iteration's first dispatch uses the first buffer
                rows, _ = dispatch(comm, layer, seed)
                assert lies_in_buffer(layer, rows)
                beside, _ = dispatch(comm, layer, 7)
                assert not lies_in_buffer(layer, beside), "a part of an output is still held"
                np.testing.assert_array_equal(rows, expected(comm, seed))
                del rows, beside
            np.testing.assert_array_equal(part, expected(comm, 1)[3:5])

    pair.run(body)


@pytest.mark.host_only("as above")
def test_combine_input_is_a_buffer_while_one_is_free(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with make_layer(comm) as layer:
            rows, desc = dispatch(comm, layer, 1)
            first, second = layer.combine_input(desc), layer.combine_input(desc)
            assert [lies_in_buffer(layer, given) for given in (rows, first, second)] == [True, True, False]
            for given in (first, second):
                given[...] = 2 * rows
                np.testing.assert_array_equal(layer.combine(given, desc), 4 * (100.0 + comm.rank) + np.zeros((9, 16)))

    pair.run(body)


def test_keeping_outputs_needs_buffers(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="keeps_outputs: needs output_buffers"):
            make_layer(comm, output_buffers=0)

    pair.run(body)
