"""A dispatch's descriptor may be passed only to calls of the same layer, after the dispatch has been received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, ClosedError, Communicator, EPAll2AllLayer
from support.device_arrays import on_device, on_host
from support.ranks import Ranks
from support.running import run_ranks

TOKENS, HIDDEN, TOPK, PER_RANK = 6, 16, 2, 2
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fixed": {"max_recv_tokens": 32},
    "padded": {"layout": "padded"},
    "by rank": {"layout": "rank"},
    "by rank, fixed": {"layout": "rank", "max_recv_tokens": 16},
    "aligned": {"expert_alignment": 4},
}


def layer_on(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    ranks = comm.world_size
    sizes = (TOKENS, HIDDEN, TOPK, comm.rank, PER_RANK * ranks, comm.local_world_size, ranks)
    return EPAll2AllLayer(comm, *sizes, dtype="float32", **options)


def arguments(comm: Communicator) -> tuple[Any, Any]:
    ids = np.arange(TOKENS * TOPK, dtype=np.int32).reshape(TOKENS, TOPK) % (PER_RANK * comm.world_size)
    return on_device(comm, np.ones((TOKENS, HIDDEN), np.float32)), on_device(comm, ids)


def calls_with(layer: EPAll2AllLayer, comm: Communicator, desc: Any) -> dict[str, Callable[[], object]]:
    """Returns every call that takes a descriptor, with arrays of the shapes that an unfilled descriptor would allow."""
    leading = (PER_RANK, TOKENS * comm.world_size) if layer.layout == "padded" else (desc.rows,)
    rows = on_device(comm, np.ones((*leading, HIDDEN), np.float32))
    values = on_device(comm, np.ones(leading, np.float32))
    tokens = arguments(comm)[0]
    weights = on_device(comm, np.ones((TOKENS, TOPK), np.float32))
    return {
        "combine": lambda: layer.combine(rows, desc),
        "combine_send": lambda: layer.combine_send(rows, desc),
        "combine_weights": lambda: layer.combine_weights(values, desc),
        "combine_input": lambda: layer.combine_input(desc),
        "weights_by_row": lambda: layer.weights_by_row(weights, desc),
        "redispatch": lambda: layer.redispatch(tokens, desc),
    }


def all_refused(calls: dict[str, Callable[[], object]], match: str) -> None:
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match=match) as caught:
            call()
        assert caught.value.argument == "ep_a2a_layout_desc", name


@pytest.mark.parametrize("kind", KINDS)
def test_a_dispatch_is_received_before_its_descriptor_serves(pair: Ranks, kind: str) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, **KINDS[kind]) as layer:
            pending = layer.dispatch_send(*arguments(comm))
            all_refused(calls_with(layer, comm, pending.desc), "was not received; call dispatch_recv first")
            for name in ("topk_indices_tensor", "token_dst_scatter_idx"):
                with pytest.raises(ArgumentError, match="was not received"):
                    getattr(pending.desc, name)
            rows, _, desc = layer.dispatch_recv(pending)
            expected = TOPK if layer.layout != "rank" else 1  # both experts of a token are on one rank
            assert (on_host(layer.combine(rows, desc)) == expected).all()
            assert on_host(desc.topk_indices_tensor).shape == (TOKENS, TOPK)

    pair.run(body)


def test_the_descriptor_of_a_refused_dispatch_serves_no_call(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm) as layer:
            tokens, ids = arguments(comm)
            pending = layer.dispatch_send(tokens, on_device(comm, on_host(ids) + 7))
            with pytest.raises(ArgumentError, match="exp_indices"):
                layer.dispatch_recv(pending)
            all_refused(calls_with(layer, comm, pending.desc), "was refused and brought no rows")

    pair.run(body)


def test_a_descriptor_of_another_rank_or_a_remade_layer_is_refused(pair: Ranks) -> None:
    shared: list[Any] = [None, None]

    def body(comm: Communicator) -> None:
        layer, other = layer_on(comm), layer_on(comm)
        shared[comm.rank] = layer.dispatch(*arguments(comm))[2]
        comm.barrier()
        all_refused(calls_with(layer, comm, shared[1 - comm.rank]), "of another layer, or of another rank")
        all_refused(calls_with(other, comm, shared[comm.rank]), "of another layer, or of another rank")
        comm.barrier()
        layer.finalize()
        for name, call in calls_with(layer, comm, shared[comm.rank]).items():
            with pytest.raises(ClosedError):
                call()
            assert name
        other.finalize()

    pair.run(body)


@pytest.mark.host_only(reason="fills tables with arbitrary numbers")
def test_a_later_redispatch_of_no_tokens_sends_none() -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm) as layer:
            tokens, ids = (on_host(x) for x in arguments(comm))
            desc = layer.dispatch(tokens, ids)[2]
            for _ in range(2):
                layer.redispatch(tokens, desc)
            count = 0 if comm.rank == 1 else TOKENS
            rows, _, desc = layer.dispatch(tokens[:count], ids[:count])
            places = desc.table("sent_places")
            places[:, count:] = 10**6  # entries past a rank's tokens are undefined
            assert np.array_equal(layer.redispatch(tokens[:count], desc), rows)

    run_ranks(2, body, local_world_size=1)


class Interrupted:
    """An array that raises an interrupt when a call reads its device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise KeyboardInterrupt

    def __dlpack__(self, **_: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_call_is_passed_on() -> None:
    def body(comm: Communicator) -> None:
        x, ids = arguments(comm)
        with layer_on(comm) as layer:
            for _ in range(2):
                layer.dispatch(x, ids)
                with pytest.raises(KeyboardInterrupt):
                    layer.dispatch(x, Interrupted())
            comm.synchronize()

    run_ranks(1, body)


@pytest.mark.host_only(reason="makes types of arrays, which GPUs' arrays do not have")
def test_calls_of_many_types_of_arrays_in_turn() -> None:
    types = [type(f"Rows{number}", (np.ndarray,), {}) for number in range(20)]

    def body(comm: Communicator) -> None:
        x, ids = arguments(comm)
        with layer_on(comm) as layer:
            for kind in (*types, *reversed(types)):
                rows, _, desc = layer.dispatch(x.view(kind), ids)
                assert (layer.combine(rows, desc) == TOPK * x).all()

    run_ranks(1, body)
