"""A layer accepts numeric arguments of any integer type, and checks their bounds before it allocates anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, DispatchCombine, DispatchCombineContext, EPAll2AllLayer, EPConfig
from support.device_arrays import on_device, on_host
from support.ranks import Ranks

LAYER: dict[str, Any] = {
    "max_tokens": 4,
    "hidden": 16,
    "topk": 2,
    "num_tot_experts": 4,
    "num_sm": 2,
    "max_recv_tokens": 40,
    "scale_elements": 16,
    "num_scales": 1,
    "expert_alignment": 2,
    "output_buffers": 0,
    "capacity": 2,
}
CONFIG: dict[str, Any] = {
    "max_tokens": 4,
    "hidden": 16,
    "topk": 2,
    "num_experts": 4,
    "rank": 0,
    "world_size": 2,
    "local_world_size": 2,
}
COMBINE: dict[str, Any] = {"hidden": 16, "max_tokens": 4, "experts_per_rank": 2, "topk": 2, "num_sm": 2}
WRONG: list[Any] = [-1, True, 1.0, "2", None, np.float32(2), 2**31, 2**62, 2**64, 10**30]


def layer_on(comm: Communicator, **options: Any) -> EPAll2AllLayer:
    place = {"rank": comm.rank, "world_size": comm.world_size, "local_world_size": comm.local_world_size}
    return EPAll2AllLayer(comm, dtype="float32", **{**place, **LAYER, **options})


OPTIONAL = ("max_recv_tokens", "num_scales", "expert_alignment")


def test_numbers_of_a_layer(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        for argument in (*LAYER, "rank", "world_size", "local_world_size"):
            for value in WRONG:
                if value is None and argument in OPTIONAL:
                    continue
                with pytest.raises(ArgumentError) as caught:
                    layer_on(comm, **{argument: value})
                assert caught.value.argument == argument, (argument, value, caught.value)

    pair.run(body)


@pytest.mark.parametrize("lost", [3, 2.0, True, "0", [0.0], [True], [None], [3], [-1], [1, 1], [2**40]])
def test_lost_ranks_are_a_sequence_of_ranks(pair: Ranks, lost: Any) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError) as caught:
            layer_on(comm, lost_ranks=lost)
        assert caught.value.argument == "lost_ranks"

    pair.run(body)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("max_tokens", {"max_tokens": 2**24, "hidden": 2**28}),
        ("max_recv_tokens", {"max_recv_tokens": 2**31 - 1, "hidden": 2**20}),
        ("max_tokens", {"max_tokens": 2**22, "hidden": 2**20, "max_recv_tokens": None}),
        ("max_tokens", {"layout": "padded", "max_recv_tokens": None, "expert_alignment": None, "hidden": 2**28,
                        "max_tokens": 2**14, "num_tot_experts": 128}),
        ("capacity", {"capacity": 2**20, "hidden": 2**24, "max_recv_tokens": None}),
    ],
)  # fmt: skip
def test_sizes_that_no_memory_holds_are_refused(pair: Ranks, argument: str, options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError) as caught:
            layer_on(comm, **options)
        assert caught.value.argument == argument, caught.value

    pair.run(body)


def test_integers_of_numpy_are_taken(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        numbers = {name: np.int64(value) for name, value in LAYER.items()}
        place = {"rank": np.int32(comm.rank), "world_size": np.uint8(2), "local_world_size": np.int16(2)}
        with layer_on(comm, **numbers, **place) as layer:
            rows = on_device(comm, np.ones((3, 16), np.float32))
            got, _, desc = layer.dispatch(rows, on_device(comm, np.zeros((3, 2), np.int32)))
            assert got.shape == (40, 16)
            assert (on_host(layer.combine(got, desc)) == 2).all()
        lost = np.array([], np.int64)
        layer_on(comm, lost_ranks=lost).finalize()
        moe = DispatchCombine(comm, **{name: np.int64(value) for name, value in COMBINE.items()})
        assert type(moe.hidden) is type(moe.experts_per_rank) is int

    pair.run(body)


@pytest.mark.parametrize("argument", CONFIG)
def test_numbers_of_a_configuration(argument: str) -> None:
    for value in WRONG:
        with pytest.raises(ArgumentError) as caught:
            EPConfig(**{**CONFIG, argument: value})
        assert caught.value.argument == argument, (value, caught.value)
    assert getattr(EPConfig(**{**CONFIG, argument: np.int64(CONFIG[argument])}), argument) == CONFIG[argument]


def test_numbers_of_the_standalone_flow_and_of_the_context(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        for argument in COMBINE:
            for value in WRONG:
                with pytest.raises(ArgumentError) as caught:
                    DispatchCombine(comm, **{**COMBINE, argument: value})
                assert caught.value.argument == argument, (value, caught.value)
        config = EPConfig(**{**CONFIG, "rank": comm.rank})
        for value in (*WRONG, 0):
            with pytest.raises(ArgumentError, match=r"^capacity: "):
                DispatchCombineContext.create(config, value, ep_group=comm)
        ctx = DispatchCombineContext.create(config, np.int64(1), ep_group=comm)
        for value in WRONG:
            with pytest.raises(ArgumentError, match=r"^dispatch_recv_tokens: "):
                ctx.reallocate_dispatch_output_buf(value)
        assert ctx.reallocate_dispatch_output_buf(np.int64(9))[0].shape[0] == 9
        ctx.finalize()

    pair.run(body)


def test_the_alignment_of_counts_is_a_number(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        with layer_on(comm, max_recv_tokens=None) as layer:
            rows = on_device(comm, np.ones((1, 16), np.float32))
            desc = layer.dispatch(rows, on_device(comm, np.zeros((1, 2), np.int32)))[2]
            for value in (*WRONG, 0):
                with pytest.raises(ArgumentError, match=r"^alignment: "):
                    desc.num_tokens_per_expert(value)
            assert desc.num_tokens_per_expert(np.int64(4)) == [4 if comm.rank == 0 else 0, 0]

    pair.run(body)
