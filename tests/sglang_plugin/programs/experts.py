"""One rank of two that run SGLang's dispatchers of DeepEP 1 and 2. The rank prints each case's error (or "") as JSON.

python experts.py RANK RANKS PORT
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from started import DEVICE, print_outcomes  # isort: skip  # before SGLang's other modules
import torch
import torch.distributed as dist
from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2
from sglang.srt.layers.moe.utils import DeepEPMode
from sglang.srt.runtime_context import get_parallel

RANK, RANKS, PORT = map(int, sys.argv[1:4])
TOKENS, EXPERTS, HIDDEN, TOPK = 11, 8, 256, 2
LOCAL = EXPERTS // RANKS

dist.init_process_group("proxyccl", init_method=f"tcp://127.0.0.1:{PORT}", rank=RANK, world_size=RANKS)
with torch.device("cpu"):
    make = torch.Generator().manual_seed(RANK)
    x = torch.randn(TOKENS, HIDDEN, generator=make).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=make)[:TOPK] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOPK, generator=make)
x, ids, weights = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
chosen = SimpleNamespace(topk_ids=ids, topk_weights=weights)
OPTIONS = {
    "group": dist.group.WORLD,
    "router_topk": TOPK,
    "permute_fusion": True,
    "num_experts": EXPERTS,
    "num_local_experts": LOCAL,
    "hidden_size": HIDDEN,
    "params_dtype": torch.bfloat16,
    "deepep_mode": DeepEPMode.AUTO,
}


def factor(expert: torch.Tensor) -> torch.Tensor:
    """Returns the factor by which each expert multiplies its rows."""
    return (expert + 1).float()


def check(combined: torch.Tensor) -> None:
    expected = x.float() * (weights * factor(ids)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def results(rows: torch.Tensor, given: Any) -> torch.Tensor:
    """Returns the weighted sums of the results that this rank's experts compute from rows."""
    mine = given.topk_ids >= 0
    scales = torch.where(mine, factor(given.topk_ids + RANK * LOCAL) * given.topk_weights, 0)
    return (rows.float() * scales.sum(1, keepdim=True)).bfloat16()


def the_package_is_ours() -> None:
    assert deepep.Buffer.__module__.startswith("proxyccl.deep_ep")
    assert deepep_v2.ElasticBuffer.__module__.startswith("proxyccl.deep_ep")


def low_latency() -> None:
    one = deepep._DeepEPDispatcherImplLowLatency(return_recv_hook=True, **OPTIONS)
    for _ in range(2):
        given = one.dispatch_b(*one.dispatch_a(x, chosen))
        experts = torch.arange(RANK * LOCAL, (RANK + 1) * LOCAL)
        rows = (given.hidden_states.float() * factor(experts).view(-1, 1, 1)).bfloat16()
        check(one.combine_b(*one.combine_a(rows, given.topk_ids, given.topk_weights)))


def low_latency_in_nvfp4() -> None:
    with mock.patch.object(deepep, "get_deepep_output_dtype", return_value=deepep.DispatcherOutputDtype.NVFP4):
        one = deepep._DeepEPDispatcherImplLowLatency(return_recv_hook=True, **OPTIONS)
    scale = torch.tensor(100.0)
    one.quant_config = {"input_global_scale": scale}
    given = one.dispatch_b(*one.dispatch_a(x, chosen))
    packed, tiles = given.hidden_states.permute(2, 0, 1), given.hidden_states_scale.view(torch.float8_e4m3fn)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(2).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((magnitudes, -magnitudes))[codes]
    scales = tiles.float().permute(5, 2, 1, 0, 4, 3).reshape(LOCAL, -1, HIDDEN // 16)[:, : values.shape[1]]
    experts = torch.arange(RANK * LOCAL, (RANK + 1) * LOCAL)
    rows = values * (scales / scale).repeat_interleave(16, -1) * factor(experts).view(-1, 1, 1)
    combined = one.combine_b(*one.combine_a(rows.bfloat16(), given.topk_ids, given.topk_weights))
    expected = x.float() * (weights * factor(ids)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.25, atol=0.1 * expected.abs().max().item())


def single_batch_overlap() -> None:
    """Combines with the arguments for Hopper and for Blackwell GPUs, after kernels have raised all counters."""
    for blackwell in (False, True):
        one = deepep._DeepEPDispatcherImplLowLatency(return_recv_hook=True, **OPTIONS)
        one.device_module = mock.MagicMock()
        given = one.dispatch_b(*one.dispatch_a(x, chosen))
        rows = given.hidden_states.shape[1]
        counters = LOCAL if blackwell else LOCAL * -(-rows // 64)  # the number that compute_overlap_args gives
        signal = torch.full((counters,), 3, dtype=torch.uint32 if blackwell else torch.int32)
        overlap = SimpleNamespace(
            overlap=True, stream=mock.MagicMock(), wait_event=None, num_sms=3, signal=signal, threshold=3
        )
        one.set_overlap_args(overlap, {"block_m": 64, "threshold": 3})
        experts = torch.arange(RANK * LOCAL, (RANK + 1) * LOCAL)
        made = (given.hidden_states.float() * factor(experts).view(-1, 1, 1)).bfloat16()
        with (
            mock.patch.object(deepep, "is_blackwell", return_value=blackwell),
            mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        ):
            check(one.combine_b(*one.combine_a(made, given.topk_ids, given.topk_weights)))


def normal() -> None:
    one = deepep._DeepEPDispatcherImplNormal(async_finish=False, **OPTIONS)
    given = one.dispatch_b(*one.dispatch_a(x, chosen))
    rows = results(given.hidden_states, given)
    check(one.combine_b(*one.combine_a(rows, given.topk_ids, given.topk_weights)))


def _second(prompts: bool) -> None:
    with (
        mock.patch.object(deepep_v2, "get_is_extend_in_batch", return_value=prompts),
        mock.patch.object(deepep_v2, "_get_allow_hybrid_mode", return_value=False),
    ):
        one = deepep_v2._DeepEPv2Impl(
            group=dist.group.WORLD,
            router_topk=TOPK,
            num_experts=EXPERTS,
            num_local_experts=LOCAL,
            hidden_size=HIDDEN,
            scale_format=SimpleNamespace(ue8m0=True, tma_aligned=True),
            num_max_dispatch_tokens_per_rank=128,
            use_fp8_dispatch=False,
        )
        get_parallel().override_permanently(tp_size=RANKS, attn_dp_size=1, attn_cp_size=1, tp_group=None)
        given = one.dispatch(x, chosen)
        rows = given.hidden_states
        if given.is_expanded:  # each expert's rows begin at a multiple of 128
            made, first = torch.zeros_like(rows), 0
            for expert, end in enumerate(given.psum_num_recv_tokens_per_expert.tolist()):
                scales = factor(torch.tensor(RANK * LOCAL + expert)) * given.topk_weights[first:end, None]
                made[first:end] = (rows[first:end].float() * scales).bfloat16()
                first = -(-end // 128) * 128
        else:
            made = results(rows, given)
        check(one.combine(SimpleNamespace(hidden_states=made, topk_weights=None, routewise_layout=None)))


def prompts_of_version_2() -> None:
    _second(prompts=True)


def decoding_of_version_2() -> None:
    _second(prompts=False)


with ExitStack() as patches:  # replaces SGLang's queries of a GPU and of the server's settings
    for target, name, value in (
        (torch.cuda, "get_device_properties", lambda *_, **__: SimpleNamespace(multi_processor_count=132)),
        (deepep, "get_deepep_output_dtype", lambda *_: deepep.DispatcherOutputDtype.BF16),
        (deepep, "get_deepep_config", lambda: ""),
        (deepep, "is_tbo_enabled", lambda: False),
        (deepep.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
        (deepep, "get_global_expert_distribution_recorder", mock.MagicMock),
    ):
        patches.enter_context(mock.patch.object(target, name, value))
    print_outcomes(
        (
            the_package_is_ours,
            low_latency,
            low_latency_in_nvfp4,
            single_batch_overlap,
            normal,
            prompts_of_version_2,
            decoding_of_version_2,
        )
    )
dist.destroy_process_group()
