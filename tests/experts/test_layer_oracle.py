"""Checks the oracle, which is the numpy reference for the expert-parallel layer, against results worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from support.cases.expert_layer import (
    Case,
    plan_of,
)
from support.cases.expert_oracle import Routing


def test_the_oracle_gives_what_was_worked_out_by_hand() -> None:
    """Each of two nodes has one rank. Rank 0 has experts 0 and 1, rank 1 has 2 and 3; id 4 chooses no expert."""
    ids = np.array([[0, 2], [2, 3], [1, 1]], np.int32), np.array([[3, 4], [0, 2]], np.int32)
    routing = Routing(ids, experts=4, local_world_size=1, max_tokens=4)
    inputs = [np.array([[10.0], [11.0], [12.0]]), np.array([[20.0], [21.0]])]
    assert [rows[:, 0].tolist() for rows in routing.dispatch(inputs)] == [[10, 21, 12, 12], [10, 11, 21, 11, 20]]
    assert [array[:, 0].tolist() for array in routing.combine(routing.dispatch(inputs))] == [[20, 22, 24], [20, 42]]

    layout = routing.layout(0)
    assert layout.num_dispatch_token_cur_rank == 3
    assert layout.num_input_tokens_per_rank.tolist() == [3, 2]
    assert layout.send_reqs_recv_tensor is not None
    assert layout.send_reqs_recv_tensor.tolist() == [
        [[0, 2, -1, -1], [1, 3, -1, -1]],
        [[1, -1, -1, -1], [2, -1, -1, -1]],
    ]
    assert layout.topk_indices_tensor.tolist() == [
        [[0, 2], [2, 3], [1, 1], [-1, -1]],
        [[3, 4], [0, 2], [-1, -1], [-1, -1]],
    ]
    assert layout.token_dst_scatter_idx.tolist() == [
        [[0, 0], [1, 3], [2, 3], [-1, -1]],
        [[-1, -1], [1, -1], [-1, -1], [-1, -1]],
    ]
    assert layout.skipped_token_mapping_indices.tolist() == [0, 1, 2, 2]
    assert layout.skipped_token_topk_mapping_indices.tolist() == [[0, -1], [1, -1], [2, 3], [-1, -1]]


def test_the_oracle_rounds_once_on_one_node_and_twice_by_parts() -> None:
    """float16 has only even numbers from 2048 to 4096, so the sums show where a rounding happens."""
    ids = np.array([[0, 1, 0]], np.int32), np.empty((0, 3), np.int32)
    rows = [np.array([[2048], [1]], np.float16), np.array([[1]], np.float16)]
    for local_world_size, local_combine, total in ((2, False, 2050), (2, True, 2048), (1, False, 2048)):
        routing = Routing(ids, experts=2, local_world_size=local_world_size, max_tokens=1)
        assert routing.combine(rows, local_combine=local_combine)[0].tolist() == [[total]]


def test_the_oracle_takes_the_scatter_indices_of_a_sort() -> None:
    plan = plan_of(Case((9, 0, 14), topk=3, scatter="sorted"))
    own = replace(plan.routing, scatter=None)
    assert np.array_equal(plan.routing.row, own.row)
    other = replace(own, scatter=own.random_scatter(np.random.default_rng(0)))
    assert not np.array_equal(other.row, own.row)
    for mine, theirs in zip(own.dispatch(plan.inputs), other.dispatch(plan.inputs), strict=True):
        assert sorted(map(bytes, mine)) == sorted(map(bytes, theirs))
