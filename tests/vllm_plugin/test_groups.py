"""vLLM's calls of a group, compared with gloo's sums, and vLLM's parallel layers, compared with unsharded layers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.distributed import (
    broadcast_tensor_dict,
    get_tp_group,
    parallel_state,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
    tensor_model_parallel_gather,
    tensor_model_parallel_reduce_scatter,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from proxyccl import ArgumentError

NARROW = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def parts_of(x: Any) -> list[Any]:
    """Gathers the tensors of all ranks with gloo."""
    group = get_tp_group()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.world_size)]
    dist.all_gather(parts, x.contiguous(), group=group.cpu_group)
    return parts


def test_vllm_finds_the_plug_in(ranks: Any) -> None:
    assert ranks.run(platform)[0] == ("ProxyCCLPlatform", "proxyccl", "ProxyCCLCommunicator", "tp:0")


def platform() -> Any:
    group = get_tp_group()
    made = group.device_communicator
    return type(current_platform).__name__, dist.get_backend(group.device_group), type(made).__name__, made.unique_name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_collectives(ranks: Any, dtype: Any) -> None:
    ranks.run(collectives, dtype)


def collectives(dtype: Any) -> None:
    group = get_tp_group()
    rank, world = group.rank_in_group, group.world_size
    torch.manual_seed(rank)
    x = torch.randint(-8, 8, (4 * world, 2 * world, 6 * world)).to(dtype)
    kept, parts = x.clone(), parts_of(x)
    total = torch.stack(parts).sum(0, dtype=dtype)
    assert torch.equal(tensor_model_parallel_all_reduce(x), total)
    assert torch.equal(tensor_model_parallel_all_reduce(x.transpose(0, 2)), total.transpose(0, 2))
    for dim in (0, 1, 2, -1):
        assert torch.equal(tensor_model_parallel_all_gather(x, dim), torch.cat(parts, dim))
        assert torch.equal(tensor_model_parallel_reduce_scatter(x, dim), total.chunk(world, dim)[rank])
        got = tensor_model_parallel_gather(x, world - 1, dim)
        assert torch.equal(got, torch.cat(parts, dim)) if rank == world - 1 else got is None
    assert torch.equal(x, kept)
    nothing = torch.empty(0, 8, dtype=dtype)
    assert tensor_model_parallel_all_reduce(nothing).shape == (0, 8)
    assert tensor_model_parallel_all_gather(nothing, 0).shape == (0, 8)


def test_narrow_types_are_gathered(ranks: Any) -> None:
    ranks.run(narrow)


def narrow() -> None:
    group = get_tp_group()
    x = torch.full((2, 8), group.rank_in_group + 1, dtype=torch.uint8)
    for dtype in NARROW:
        for dim in (0, 1):
            got = tensor_model_parallel_all_gather(x.view(dtype), dim)
            assert got.dtype is dtype
            assert torch.equal(got.view(torch.uint8), torch.cat(parts_of(x), dim))


@pytest.mark.parametrize("even", [False, True])
def test_sizes_of_ranks_may_differ(ranks: Any, even: bool) -> None:
    ranks.run(uneven, even)


def uneven(even: bool) -> None:
    group = get_tp_group()
    rank, world = group.rank_in_group, group.world_size
    sizes = [4 if even else 4 * r for r in range(world)]  # rank 0 may have no tokens
    mine = torch.full((sizes[rank], 5), float(rank))
    whole = torch.cat([torch.full((size, 5), float(r)) for r, size in enumerate(sizes)])
    assert torch.equal(group.all_gatherv(mine, 0, sizes), whole)
    first, second = group.all_gatherv([mine, mine.long()], 0, sizes)
    assert torch.equal(first, whole)
    assert torch.equal(second, whole.long())
    assert torch.equal(group.reduce_scatterv(whole, 0, sizes), mine * world)
    assert torch.equal(group.reduce_scatterv(whole.t(), -1, sizes), (mine * world).t())
    output = torch.empty_like(mine)
    assert group.device_communicator.reduce_scatterv_into_output(whole, output, 0, sizes) is output
    assert torch.equal(output, mine * world)


def test_transfers_and_dictionaries(ranks: Any) -> None:
    ranks.run(transfers)


def transfers() -> None:
    group = get_tp_group()
    rank, world = group.rank_in_group, group.world_size
    assert torch.equal(group.device_communicator.broadcast(torch.full((5,), float(rank)), 1), torch.ones(5))
    given = {"a": torch.arange(6.0), "n": 3, "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    got = broadcast_tensor_dict(given if rank == 0 else None, 0)
    assert torch.equal(got["a"], given["a"])
    assert got["n"] == 3
    if rank == 0:
        group.send(torch.arange(10.0), 1)
        group.send_tensor_dict({"h": torch.arange(4.0)}, 1)
    if rank == 1:
        assert torch.equal(group.recv(torch.Size([10]), torch.float32, 0), torch.arange(10.0))
        assert torch.equal(group.recv_tensor_dict(0)["h"], torch.arange(4.0))
    right, left, came = (rank + 1) % world, (rank - 1) % world, torch.empty(3)
    group.device_communicator.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), group.ranks[right], group.device_group),
            dist.P2POp(dist.irecv, came, group.ranks[left], group.device_group),
        ]
    )
    assert torch.equal(came, torch.full((3,), float(left)))


def test_layers_of_a_model(ranks: Any) -> None:
    ranks.run(layers)


def layers() -> None:
    world = get_tp_group().world_size
    torch.manual_seed(7)
    wide = 64 * world
    up, down, table = torch.randn(wide, 32), torch.randn(32, wide), torch.randn(64 * world, 32)
    column, row = ColumnParallelLinear(32, wide, bias=False), RowParallelLinear(wide, 32, bias=False)
    embedding = VocabParallelEmbedding(64 * world, 32)
    for layer, weight in ((column, up), (row, down), (embedding, table)):
        layer.weight.weight_loader(layer.weight, weight)
        layer.quant_method.process_weights_after_loading(layer)
    tokens = torch.arange(0, 64 * world, 9)
    with torch.no_grad():
        hidden = embedding(tokens)
        assert torch.equal(hidden, table[tokens])
        got = row(torch.relu(column(hidden)[0]))[0]
    torch.testing.assert_close(got, torch.relu(table[tokens] @ up.t()) @ down.t(), rtol=1e-3, atol=1e-3)


def test_vllms_sleep_gives_the_groups_memory_back(make_ranks: Any) -> None:
    make_ranks(2).run(sleep)


def sleep() -> None:
    """Makes a second group with vLLM's option for sleep, which the first group lacks."""
    awake, config = get_tp_group(), get_current_vllm_config()
    sleeps = mock.Mock(spec=ModelConfig, enable_nccl_comm_suspend=True, sleep_mode_offload_cudagraph=False)
    with mock.patch.object(config, "model_config", sleeps):
        group = parallel_state.init_model_parallel_group(
            [awake.ranks], awake.local_rank, current_platform.dist_backend, group_name="sleeps"
        )
    backend = group.device_group._get_backend(torch.device("cpu"))
    x = torch.full((1 << 20,), group.rank_in_group + 1.0)
    total = group.all_reduce(x)
    assert backend.memory_stats()["suspend"] > 0
    for _ in range(2):
        parallel_state.suspend_device_comms()
        assert backend.memory_stats()["suspended"] == 1
        with pytest.raises(RuntimeError, match="suspended"):
            group.all_reduce(x)
        assert torch.equal(awake.all_reduce(x), total)
        for _ in range(2):  # vLLM wakes up once for weights and once for the KV cache
            parallel_state.resume_device_comms()
            assert torch.equal(group.all_reduce(x), total)
    group.destroy()


def test_bad_input_is_refused_before_anything_moves(ranks: Any) -> None:
    ranks.run(refusals)


def refusals() -> None:
    group = get_tp_group()
    made, world = group.device_communicator, group.world_size
    x = torch.ones(2 * world, 3)
    for expected, call in (
        (r"dim: is 2; expected a dimension of a tensor of shape", lambda: made.all_gather(x, 2)),
        (r"input_: its size \d is not a multiple of", lambda: made.reduce_scatter(torch.ones(world + 1, 1), 0)),
        (r"sizes: are \[1\]; expected \d sizes from 0 on whose sum is", lambda: made.reduce_scatterv(x, 0, [1])),
        (
            r"sizes: are \[-1, .*; expected \d sizes from 0 on",
            lambda: made.reduce_scatterv(x, 0, [-1, 2 * world + 1] + [0] * (world - 2)),
        ),
        (r"sizes: are \[1\]; expected \d sizes from 0 on whose item \d is", lambda: made.all_gatherv(x, 0, [1])),
        (r"output: is \(1,\); expected", lambda: made.reduce_scatterv_into_output(x, torch.ones(1), 0)),
        (r"dim: is 0; expected a dimension of a tensor of shape \(\)", lambda: made.all_gatherv(torch.ones(()))),
        (r"src: is -1; expected a rank of \d", lambda: made.broadcast(x, -1)),
        (r"src: is \d; expected a rank of \d", lambda: made.broadcast(x, world)),
    ):
        with pytest.raises(ArgumentError, match=expected):
            call()
    with pytest.raises(NotImplementedError, match="all_gatherv: dim is 1; expected 0"):
        made.all_gatherv(x, 1)
    assert tensor_model_parallel_all_reduce(torch.ones(1)).item() == world
