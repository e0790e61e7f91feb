"""The managers of experts that `--all2all-backend` names, on a group of the plug-in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from proxyccl_vllm.communicator import ProxyCCLCommunicator
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group, parallel_state
from vllm.distributed.device_communicators import all2all


def communicator_of_experts(backend: str) -> ProxyCCLCommunicator:
    """Makes a device communicator with the arguments that vLLM passes for the experts' group."""
    group, config = get_tp_group(), VllmConfig()
    config.parallel_config.all2all_backend = backend
    with set_current_vllm_config(config):
        return ProxyCCLCommunicator(
            cpu_group=group.cpu_group,
            device=group.device,
            device_group=group.device_group,
            unique_name="ep:9",
            use_all2all=True,
        )


def test_tokens_are_gathered_and_their_results_added(ranks: Any) -> None:
    ranks.run(by_collectives)


def by_collectives() -> None:
    group = get_tp_group()
    rank, world = group.rank_in_group, group.world_size
    made = communicator_of_experts("allgather_reducescatter")
    hidden, weights = torch.full((3, 8), float(rank)), torch.full((3, 2), 0.5 + rank)
    ids, scales = torch.full((3, 2), rank), torch.full((3, 1), rank + 1.0)
    with mock.patch.object(parallel_state, "_EP", group):
        got = made.dispatch(hidden, weights, ids, is_sequence_parallel=True, extra_tensors=[scales])
        for gathered, value in zip((*got[:3], *got[3]), (hidden, weights, ids, scales), strict=True):
            per_rank = [gathered[3 * r] - gathered[0] for r in range(world)]
            assert gathered.shape == (3 * world, value.shape[1])
            assert [each[0].item() for each in per_rank] == list(range(world))
        routed = made.dispatch_router_logits(hidden, weights, is_sequence_parallel=True)
        assert torch.equal(routed[0], got[0])
        assert torch.equal(made.combine(got[0], is_sequence_parallel=True), hidden * world)
    made.destroy()


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency"])
def test_deep_ep_is_found(ranks: Any, backend: str) -> None:
    ranks.run(by_deep_ep, backend)


def by_deep_ep(backend: str) -> None:
    made = communicator_of_experts(backend)
    manager = made.all2all_manager
    if backend == "deepep_low_latency":
        assert type(manager) is all2all.DeepEPLLAll2AllManager
    else:
        assert type(manager) is all2all.DeepEPHTAll2AllManager
        assert manager.get_handle({}).group_size == get_tp_group().world_size
    made.destroy()


def test_an_unknown_manager_is_refused(ranks: Any) -> None:
    ranks.run(by_none)


def by_none() -> None:
    with pytest.raises(ValueError, match="Unknown all2all backend: none"):
        communicator_of_experts("none")
