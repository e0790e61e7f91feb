"""Makes the `deep_ep` calls of programs that use DeepEP, in the same order, without these programs.

In every client's mixture of experts, expert e multiplies its rows by e + 1; `Mixture.expected` is the correct output.

`USED` lists the `deep_ep` names that each client uses. The calls are those of the clients' repositories on 2026-11-27:

- vLLM (the same in release 0.33.0): vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_{ht,ll,v2}.py, and
  vllm/distributed/device_communicators/all2all.py, which makes the buffers. `clean_buffers` of all2all.py clears the
  whole buffer through `get_local_buffer_tensor`.
- SGLang (the same in release 0.5.23): python/sglang/srt/layers/moe/token_dispatcher/deepep.py, and deepep_v2.py for
  DeepEP 2
- Megatron-LM: megatron/core/transformer/moe/fused_a2a.py, which also works without `HybridEPBuffer`.
- TorchTitan: torchtitan/distributed/deepep/deepep.py
- slime: slime_plugins, which wraps `Buffer.__init__`
- verl uses Megatron-LM's code. TensorRT-LLM imports its own copy of DeepEP, `tensorrt_llm.deep_ep`.
- NeMo: nemo_automodel/components/moe/megatron/fused_a2a.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deep_ep
import torch

Tensor = Any


@dataclass(frozen=True)
class Mixture:
    """One rank's tokens and routing.

    Attributes:
        tokens: bfloat16 [T, hidden].
        ids: int64 [T, topk]: the chosen experts, or -1.
        weights: float32 [T, topk].
        experts: number of experts of all ranks together.
        most_tokens: the largest number of tokens of any rank.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    experts: int
    most_tokens: int

    @staticmethod
    def of(rank: int, ranks: int, device: Any = None) -> Mixture:
        """Returns a rank's tokens and routing, on the CPU if `device` is None. Ranks have different numbers of tokens;
        rank 1 has none.
        """
        hidden, topk, experts_per_rank = 1024, 4, 4
        generator = torch.Generator().manual_seed(rank)
        counts, experts = (9, 0, 17, 4), ranks * experts_per_rank
        tokens = torch.randn(counts[rank], hidden, generator=generator).to(torch.bfloat16)
        order = torch.rand(counts[rank], experts, generator=generator).argsort(1)[:, :topk]
        ids = torch.where(torch.rand(order.shape, generator=generator) < 0.2, -1, order)
        weights = torch.rand(ids.shape, generator=generator)
        return Mixture(tokens.to(device), ids.to(device), weights.to(device), experts, max(counts))

    @property
    def expected(self) -> Tensor:
        """The expected output, float32 [T, hidden]: for each token, the weighted sum of its experts' results."""
        factors = torch.where(self.ids >= 0, self.weights * (self.ids + 1), 0).sum(1, keepdim=True)
        return self.tokens.float() * factors


def quantized(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows in float8, and a scale for each 128 elements."""
    groups = tokens.float().view(len(tokens), tokens.shape[1] // 128, 128)
    scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(tokens.shape), scales


def dequantized(rows: Tensor, scales: Tensor) -> Tensor:
    """Converts the rows and scales that `quantized` returned back to float32."""
    groups = rows.float().view(*rows.shape[:-1], scales.shape[-1], -1)
    return (groups * scales.unsqueeze(-1)).reshape(rows.shape)


def sums_of_experts(rows: Tensor, ids: Tensor, weights: Tensor, first_expert: int) -> Tensor:
    """Returns for each received token the weighted sum of the results of this rank's experts."""
    factors = torch.where(ids >= 0, weights * (ids + first_expert + 1), 0).sum(1, keepdim=True)
    return (rows.float() * factors).to(torch.bfloat16)


def experts_of(rank: int, results: Tensor) -> Tensor:
    """Returns the factors by which a rank's experts multiply padded rows: each expert's number plus 1."""
    return (torch.arange(len(results), device=results.device) + rank * len(results) + 1).view(-1, 1, 1)


def only_received(rows: Tensor, counts: Tensor) -> Tensor:
    """Returns the rows with zeros in the padding after each expert's `counts` rows."""
    places = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(places[None, :, None] < counts[:, None, None], rows, 0)


def vllm_high_throughput(group: Any, mixture: Mixture, *, float8: bool) -> Tensor:
    """Makes the calls of vLLM's high-throughput path: normal mode without events. Returns the output."""
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    per_rank, token_data, none = mixture.experts // buffer.group_size, mixture.tokens, None
    per_destination, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=mixture.ids,
        num_experts=mixture.experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    received, ids, weights, counts, handle, event = buffer.dispatch(
        x=quantized(token_data) if float8 else token_data,
        handle=None,
        num_tokens_per_rank=per_destination,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
        expert_alignment=1,
        config=deep_ep.Buffer.get_dispatch_config(buffer.group_size),
        previous_event=none,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert ids.dtype == torch.int64
    assert counts == [int((ids == expert).sum()) for expert in range(per_rank)]
    rows = dequantized(*received) if float8 else received
    combined, _, event = buffer.combine(
        x=sums_of_experts(rows, ids, weights, buffer.rank * per_rank),
        handle=handle,
        topk_weights=None,
        config=deep_ep.Buffer.get_combine_config(buffer.group_size),
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert event.event is None
    output = torch.empty_like(mixture.tokens)
    output.copy_(combined, non_blocking=True)
    buffer.destroy()
    return output


def vllm_low_latency(group: Any, mixture: Mixture, *, float8: bool, asynchronous: bool) -> Tensor:
    """Makes the calls of vLLM's low-latency path: dispatch with a receive hook, then combine into the caller's tensor,
    with a receive hook if `asynchronous`. Returns the output.
    """
    ranks = group.size() if hasattr(group, "size") else group.world_size
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=mixture.most_tokens,
            hidden=mixture.tokens.shape[1],
            num_ranks=ranks,
            num_experts=mixture.experts,
        ),
        low_latency_mode=True,
        num_qps_per_rank=mixture.experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )
    received, counts, handle, _event, hook = buffer.low_latency_dispatch(
        mixture.tokens,
        mixture.ids,
        mixture.most_tokens,
        mixture.experts,
        use_fp8=float8,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=True,
    )
    hook()
    rows = dequantized(received[0], received[1].contiguous()) if float8 else received.float()
    assert rows.shape == (mixture.experts // ranks, ranks * mixture.most_tokens, mixture.tokens.shape[1])
    rows = only_received(rows, counts)
    output = torch.empty_like(mixture.tokens)
    _, _, hook = buffer.low_latency_combine(
        (rows * experts_of(buffer.rank, rows)).to(torch.bfloat16),
        mixture.ids,
        mixture.weights,
        handle,
        async_finish=False,
        zero_copy=False,
        return_recv_hook=asynchronous,
        out=output,
    )
    if asynchronous:
        hook()
    buffer.destroy()
    return output


class SGLang:
    """SGLang's dispatcher, which uses one buffer in normal and low-latency mode, with asynchronous calls."""

    def __init__(self, group: Any, mixture: Mixture) -> None:
        ranks = group.size() if hasattr(group, "size") else group.world_size
        configs = (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Config(num_sms=24))
        hidden_bytes = mixture.tokens.shape[1] * 2
        self.buffer = deep_ep.Buffer(
            group,
            max(config.get_nvl_buffer_size_hint(hidden_bytes, ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(hidden_bytes, ranks) for config in configs),
            low_latency_mode=True,
            num_qps_per_rank=max(deep_ep.Buffer.num_sms, mixture.experts // ranks),
            allow_mnnvl=True,
        )
        self.mixture = mixture

    def normal(self) -> Tensor:
        """Makes the calls that SGLang makes for prompts (normal mode). Returns the output."""
        buffer, mixture = self.buffer, self.mixture
        previous = deep_ep.Buffer.capture()
        per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
            mixture.ids,
            mixture.experts,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=previous is not None,
        )
        received, ids, weights, counts, handle, event = buffer.dispatch(
            quantized(mixture.tokens),
            topk_idx=mixture.ids,
            topk_weights=mixture.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=True,
            expert_alignment=128,
            config=None,
        )
        event.current_stream_wait()
        assert all(count % 128 == 0 for count in counts)
        first = buffer.rank * len(counts)
        output = sums_of_experts(dequantized(*received), ids, weights, first)
        combined, _, event = buffer.combine(
            output,
            handle,
            async_finish=True,
            previous_event=deep_ep.Buffer.capture(),
            allocate_on_comm_stream=True,
            config=None,
        )
        event.current_stream_wait()
        return combined

    def low_latency(self, *, hooks: bool) -> Tensor:
        """Makes the calls that SGLang makes for decoding (low-latency mode), with hooks or with events, and with scales
        in DeepGEMM's layout. Returns the output.
        """
        buffer, mixture = self.buffer, self.mixture
        buffer.clean_low_latency_buffer(mixture.most_tokens, mixture.tokens.shape[1], mixture.experts)
        (rows, scales), counts, handle, event, hook = buffer.low_latency_dispatch(
            mixture.tokens,
            mixture.ids,
            mixture.most_tokens,
            mixture.experts,
            use_fp8=True,
            async_finish=not hooks,
            return_recv_hook=hooks,
            round_scale=True,
            use_ue8m0=True,
        )
        hook() if hooks else event.current_stream_wait()
        assert scales.dtype == torch.int32
        assert scales.stride()[-2] == 1
        assert scales.stride()[-1] % 4 == 0  # DeepGEMM's bulk copies need multiples of 16 bytes
        exponents = scales.contiguous().view(torch.uint8).view(*rows.shape[:2], -1)
        values = dequantized(rows, (exponents.to(torch.int32) << 23).view(torch.float32))
        values = only_received(values, counts)
        combined, event, hook = buffer.low_latency_combine(
            x=(values * experts_of(buffer.rank, values)).to(torch.bfloat16),
            topk_idx=mixture.ids,
            topk_weights=mixture.weights,
            handle=handle,
            async_finish=not hooks,
            return_recv_hook=hooks,
        )
        hook() if hooks else event.current_stream_wait()
        return combined


class _MegatronDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, experts: int, buffer: Any) -> Any:
        previous = deep_ep.utils.EventOverlap(deep_ep.utils.EventHandle())
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, row_ids, row_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        after.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_ids, row_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, rows_grad: Tensor, _ids: Any, probs_grad: Tensor, _counts: Any, _handle: Any) -> Any:
        grad, probs, after = ctx.buffer.combine(
            rows_grad.contiguous(),
            ctx.handle,
            topk_weights=probs_grad.float(),
            previous_event=deep_ep.utils.EventOverlap(deep_ep.utils.EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        after.current_stream_wait()
        return grad, None, probs, None, None


class _MegatronCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Any, handle: Any) -> Tensor:
        combined, _, _ = buffer.combine(x, handle=handle, async_finish=False, previous_event=None)
        ctx.buffer, ctx.handle = buffer, handle
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, _, _, _, _, _ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle, previous_event=None)
        return rows, None, None


def megatron(group: Any, mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Makes the calls of Megatron-LM's fused dispatch and combine, and of their backward passes.

    Returns:
        The output, and the gradients of tokens and weights for an output gradient of ones.
    """
    ranks = group.size() if hasattr(group, "size") else group.world_size
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    hidden_bytes = mixture.tokens.shape[1] * 2
    buffer = deep_ep.Buffer(
        group,
        config.get_nvl_buffer_size_hint(hidden_bytes, ranks),
        config.get_rdma_buffer_size_hint(hidden_bytes, ranks),
    )
    tokens, weights = mixture.tokens.clone().requires_grad_(), mixture.weights.clone().requires_grad_()
    rows, ids, row_weights, counts, handle = _MegatronDispatch.apply(
        tokens, mixture.ids, weights, mixture.experts, buffer
    )
    first = buffer.rank * len(counts)
    output = _MegatronCombine.apply(sums_of_experts(rows, ids, row_weights, first), buffer, handle)
    output.sum().backward()
    return output.detach(), tokens.grad, weights.grad


def vllm_elastic(group: Any, mixture: Mixture, *, float8: bool, decoding: bool) -> Tensor:
    """Makes the calls of vLLM's path for DeepEP 2, and returns the output. For prompts, dispatch expands the rows;
    for decoding, dispatch does not make the CPU wait.
    """
    buffer = deep_ep.ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=mixture.most_tokens,
        hidden=mixture.tokens.shape[1],
        num_topk=mixture.ids.shape[1],
        use_fp8_dispatch=float8,
        explicitly_destroy=True,
    )
    first = buffer.rank_idx * mixture.experts // buffer.num_ranks
    received, ids, weights, handle, event = buffer.dispatch(
        x=quantized(mixture.tokens) if float8 else mixture.tokens,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
        num_experts=mixture.experts,
        num_max_tokens_per_rank=1 << (mixture.most_tokens - 1).bit_length() if decoding else None,
        do_expand=not decoding,
        do_cpu_sync=not decoding,
        async_with_compute_stream=False,
    )
    assert event.event is None
    rows = dequantized(*received) if float8 else received.float()
    counts = handle.num_recv_tokens_per_expert_list
    if decoding:
        assert counts == []
        places = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        came = places < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        ids, weights, rows = torch.where(came, ids, -1), torch.where(came, weights, 0), torch.where(came, rows, 0)
    else:
        assert ids is None
        numbers = torch.arange(len(counts), device=rows.device)
        ids = numbers.repeat_interleave(torch.tensor(counts, device=rows.device), output_size=sum(counts)).unsqueeze(1)
        weights = weights.unsqueeze(1)
    combined, _, event = buffer.combine(
        x=sums_of_experts(rows, ids, weights, first),
        handle=handle,
        topk_weights=None,
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    output = torch.empty_like(mixture.tokens)
    output.copy_(combined, non_blocking=True)
    buffer.destroy()
    return output


def sglang_elastic(group: Any, mixture: Mixture) -> Tensor:
    """Makes SGLang's asynchronous calls for DeepEP 2, with scales in DeepGEMM's layout. Returns the output."""
    sizes = {"num_topk": mixture.ids.shape[1], "use_fp8_dispatch": True, "allow_hybrid_mode": True}
    hidden = mixture.tokens.shape[1]
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(group, mixture.most_tokens, hidden, **sizes)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=mixture.most_tokens, hidden=hidden, **sizes)
    assert buffer.num_bytes >= hint
    num_sms = buffer.get_theoretical_num_sms(mixture.experts, mixture.ids.shape[1])
    received, ids, weights, handle, event = buffer.dispatch(
        quantized(mixture.tokens),
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
        num_experts=mixture.experts,
        num_max_tokens_per_rank=mixture.most_tokens,
        expert_alignment=128,
        num_sms=num_sms,
        previous_event=deep_ep.ElasticBuffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
        use_tma_aligned_col_major_sf=True,
    )
    event.current_stream_wait()
    assert all(count % 128 == 0 for count in handle.num_recv_tokens_per_expert_list)
    first = buffer.rank_idx * len(handle.num_recv_tokens_per_expert_list)
    combined, _, event = buffer.combine(
        sums_of_experts(dequantized(*received), ids, weights, first),
        handle=handle,
        num_sms=num_sms,
        previous_event=deep_ep.ElasticBuffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    return combined


class _NemoDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, experts: int, buffer: Any) -> Any:
        rows, _, row_probs, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_experts=experts,
            do_cpu_sync=False,
            do_expand=True,
            do_zero_padding=True,
            async_with_compute_stream=False,
        )
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_probs, handle.num_unaligned_recv_tokens_per_expert, handle

    @staticmethod
    def backward(ctx: Any, rows_grad: Tensor, probs_grad: Tensor, _counts: Any, _handle: Any) -> Any:
        grad, probs, _ = ctx.buffer.combine(
            rows_grad.contiguous(), ctx.handle, topk_weights=probs_grad.float(), async_with_compute_stream=False
        )
        return grad, None, probs, None, None


class _NemoCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Any, handle: Any) -> Tensor:
        combined, _, _ = buffer.combine(x, handle)
        ctx.buffer, ctx.handle = buffer, handle
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, _, _, _, _ = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, do_cpu_sync=False, do_expand=True, do_zero_padding=True
        )
        return rows, None, None


def nemo(group: Any, mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Makes NeMo's calls for dispatch, combine and their backward passes; the dispatches do not make the CPU wait.
    Returns the same values as `megatron`.
    """
    buffer = deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=mixture.most_tokens,
        hidden=mixture.tokens.shape[1],
        num_topk=mixture.ids.shape[1],
    )
    tokens, weights = mixture.tokens.clone().requires_grad_(), mixture.weights.clone().requires_grad_()
    rows, row_weights, counts, handle = _NemoDispatch.apply(tokens, mixture.ids, weights, mixture.experts, buffer)
    ends = counts.cumsum(0)
    places = torch.arange(len(rows), device=rows.device)
    ids = torch.searchsorted(ends, places, right=True).clamp(max=len(counts) - 1)
    factors = row_weights * (ids + buffer.rank_idx * len(counts) + 1)
    output = _NemoCombine.apply((rows.float() * factors.unsqueeze(1)).to(torch.bfloat16), buffer, handle)
    output.sum().backward()
    return output.detach(), tokens.grad, weights.grad


def torchtitan(group: Any, mixture: Mixture) -> Tensor:
    """Makes the calls of TorchTitan's operators. Every call waits for an event; the backward pass reuses the handle of
    the forward pass. Returns the output.
    """
    buffer = deep_ep.Buffer(group, 0, 0)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        topk_idx=mixture.ids, num_experts=mixture.experts
    )
    after: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}

    def event() -> Any:
        return deep_ep.utils.EventOverlap(deep_ep.utils.EventHandle())

    rows, ids, weights, counts, handle, done = buffer.dispatch(
        x=mixture.tokens,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights.to(torch.float32),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event(),
        **after,
    )
    done.current_stream_wait()
    output = sums_of_experts(rows, ids, weights, buffer.rank * len(counts))
    combined, _, done = buffer.combine(x=output, handle=handle, previous_event=event(), **after)
    done.current_stream_wait()
    layout = ("topk_idx", "topk_weights", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank")
    absent = dict.fromkeys((*layout, "num_tokens_per_expert"))
    gradients, *_, done = buffer.dispatch(x=combined, handle=handle, previous_event=event(), **absent, **after)
    done.current_stream_wait()
    tokens, scores, done = buffer.combine(
        x=gradients, handle=handle, topk_weights=weights, previous_event=event(), **after
    )
    done.current_stream_wait()
    assert tokens.shape == mixture.tokens.shape
    assert torch.equal(scores, torch.where(mixture.ids >= 0, mixture.weights, 0))
    return combined


USED = {
    "vLLM": "Buffer Config EventOverlap ElasticBuffer Buffer.set_num_sms Buffer.get_low_latency_rdma_size_hint "
    "Buffer.get_dispatch_config Buffer.get_combine_config Buffer.capture Buffer.get_local_buffer_tensor Buffer.destroy "
    "Buffer.low_latency_query_mask_buffer Buffer.low_latency_clean_mask_buffer",
    "SGLang": "Buffer Config Buffer.num_sms Buffer.capture Buffer.get_dispatch_config Buffer.get_combine_config "
    "Buffer.get_low_latency_rdma_size_hint Buffer.clean_low_latency_buffer Config.get_nvl_buffer_size_hint "
    "Config.get_rdma_buffer_size_hint",
    "Megatron-LM": "Buffer utils.EventHandle utils.EventOverlap Buffer.set_num_sms Buffer.get_dispatch_config",
    "TorchTitan": "Buffer utils.EventHandle utils.EventOverlap Buffer.get_combine_config",
    "NeMo": "ElasticBuffer EPHandle",
    "slime": "Buffer.__init__",
    "DeepEP's tests": "Buffer.is_sm90_compiled topk_idx_t __version__ get_physical_domain_size get_logical_domain_size",
}
"""For each client, the names of `deep_ep` that the client uses."""

CLIENTS: dict[str, Callable[[Any, Mixture], Tensor]] = {
    "vLLM high throughput": lambda group, mixture: vllm_high_throughput(group, mixture, float8=False),
    "vLLM high throughput, float8": lambda group, mixture: vllm_high_throughput(group, mixture, float8=True),
    "vLLM low latency": lambda group, mixture: vllm_low_latency(group, mixture, float8=False, asynchronous=False),
    "vLLM low latency, float8": lambda group, mixture: vllm_low_latency(group, mixture, float8=True, asynchronous=True),
    "SGLang normal": lambda group, mixture: SGLang(group, mixture).normal(),
    "SGLang low latency, hooks": lambda group, mixture: SGLang(group, mixture).low_latency(hooks=True),
    "SGLang low latency, events": lambda group, mixture: SGLang(group, mixture).low_latency(hooks=False),
    "Megatron-LM": lambda group, mixture: megatron(group, mixture)[0],
    "TorchTitan": torchtitan,
    "vLLM elastic": lambda group, mixture: vllm_elastic(group, mixture, float8=False, decoding=False),
    "vLLM elastic, float8": lambda group, mixture: vllm_elastic(group, mixture, float8=True, decoding=False),
    "vLLM elastic decoding": lambda group, mixture: vllm_elastic(group, mixture, float8=False, decoding=True),
    "SGLang elastic": sglang_elastic,
    "NeMo elastic": lambda group, mixture: nemo(group, mixture)[0],
}
"""For each client, a function that makes the client's calls for a rank's mixture, and returns the output."""


def require_close(output: Tensor, mixture: Mixture, *, float8: bool) -> None:
    """Raises AssertionError if an output's error exceeds what rounding to float8 or bfloat16 can cause."""
    greatest = mixture.expected.abs().amax(1, keepdim=True).clamp(min=1e-3)
    error = ((output.float() - mixture.expected).abs() / greatest).amax() if len(output) else torch.tensor(0.0)
    assert error < (0.07 if float8 else 0.02), float(error)
