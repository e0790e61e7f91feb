"""Dispatch and combine for torch's backward pass, in which each is the other's adjoint. Imported where torch is loaded.

Every rank that records a call must run its backward pass, as every rank must make the call. What a fixed maximum leaves
undefined is zero here, rows and gradients alike, since experts take their own gradients from both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
    from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
    from proxyccl.device.arrays import ArrayView
    from proxyccl.device.runtime import StreamLike


def dispatch(
    layer: EPAll2AllLayer, tokens: Any, expert_ids: Any, weights: Any, scatter: Any, stream: StreamLike
) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
    """`EPAll2AllLayer.dispatch`, recorded."""
    rows, row_weights, desc = _Dispatch.apply(layer, tokens, expert_ids, weights, scatter, stream)
    return rows, row_weights, desc


def combine(layer: EPAll2AllLayer, rows: Any, desc: EPAllToAllLayoutDesc, weights: Any, stream: StreamLike) -> Any:
    """`EPAll2AllLayer.combine` without `out`, recorded."""
    return _Combine.apply(layer, rows, desc, weights, stream)


class _Dispatch(torch.autograd.Function):  # type: ignore[misc]
    """A token's gradient is the sum of its rows' gradients; a weight's is that of its row's weight."""

    @staticmethod
    def forward(
        ctx: Any, layer: EPAll2AllLayer, tokens: Any, expert_ids: Any, weights: Any, scatter: Any, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        rows, row_weights, desc = layer.dispatch(tokens, expert_ids, weights, scatter, stream=stream)
        outputs = ((rows, ctx.needs_input_grad[1]), (row_weights, ctx.needs_input_grad[3]))
        for output, _ in outputs:
            _clear_rest(output, desc)
        ctx.mark_non_differentiable(*(output for output, wanted in outputs if output is not None and not wanted))
        ctx.layer, ctx.desc = layer, desc
        return rows, row_weights, desc

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, rows_grad: Any, row_weights_grad: Any, _: None) -> tuple[Any, ...]:
        layer, desc = ctx.layer, ctx.desc
        tokens_grad = weights_grad = None
        if ctx.needs_input_grad[1]:
            tokens_grad = layer.combine(rows_grad.contiguous(), desc)
        if ctx.needs_input_grad[3]:
            values, stream = _given(layer, row_weights_grad.contiguous())
            weights_grad = layer.ctx.collect(desc, values, stream)
        return None, tokens_grad, None, weights_grad, None, None


class _Combine(torch.autograd.Function):  # type: ignore[misc]
    """A row's gradient is its token's, times its weight; a weight's is the product of that gradient and its row."""

    @staticmethod
    def forward(
        ctx: Any, layer: EPAll2AllLayer, rows: Any, desc: EPAllToAllLayoutDesc, weights: Any, stream: StreamLike
    ) -> Any:
        output = layer.combine(rows, desc, weights=weights, stream=stream)
        ctx.layer, ctx.desc = layer, desc
        ctx.save_for_backward(rows if ctx.needs_input_grad[3] else None, weights)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, output_grad: Any) -> tuple[Any, ...]:
        layer, desc = ctx.layer, ctx.desc
        rows, weights = ctx.saved_tensors
        rows_grad, weights_grad = layer.redispatch(output_grad.contiguous(), desc), None
        if ctx.needs_input_grad[3]:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            weights_grad = torch.einsum("rh,rh->r", rows.to(wide), rows_grad.to(wide)).to(weights.dtype)
            _clear_rest(weights_grad, desc)
        if weights is not None and ctx.needs_input_grad[1]:
            values, stream = _given(layer, rows_grad)
            layer.ctx.scale(values, _given(layer, weights)[0], stream)
        _clear_rest(rows_grad, desc)
        return None, rows_grad if ctx.needs_input_grad[1] else None, None, weights_grad, None


def _given(layer: EPAll2AllLayer, x: Any) -> tuple[ArrayView, StreamLike]:
    """A tensor for the layer's context, and the stream on which torch works with it."""
    comm = layer.ctx.communicator
    return comm.collectives.input(x, "gradient"), comm.stream_for(None, x)


def _clear_rest(rows: Any, desc: EPAllToAllLayoutDesc) -> None:
    """Zeroes the rows that are not filled, without waiting for how many they are."""
    if rows is None or desc.num_recv_tokens is None:
        return
    rest = torch.arange(rows.shape[0], device=rows.device) >= desc.num_recv_tokens
    rows.masked_fill_(rest.reshape(-1, *(1,) * (rows.dim() - 1)), 0)
