"""Records dispatch and combine for torch's backward pass; this module is the `Recorder` of expert-parallel layers. A
dispatch's backward pass is a combine, and a combine's is a dispatch.

Dispatch and combine involve all ranks, so if a call is recorded, all ranks must also run its backward pass. With
`max_recv_tokens`, an output has more rows than were received. Experts compute their parameters' gradients from all rows
and all rows' gradients, so this module sets the unused rows and these rows' gradients to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike


class _Dispatch(torch.autograd.Function):
    """A dispatch sends a token and its weights to experts as rows. A token's gradient is the sum of its rows'
    gradients; a sent weight's gradient is the gradient of the received weight.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: EPAll2AllLayer, call: Callable[[], Dispatched], tokens: Any, weights: Any
    ) -> Dispatched:
        rows, row_weights, desc = call()
        outputs = ((rows, ctx.needs_input_grad[2]), (row_weights, ctx.needs_input_grad[3]))
        for output, _ in outputs:
            _clear_rest(layer, output, desc)
        ctx.mark_non_differentiable(*(output for output, wanted in outputs if output is not None and not wanted))
        ctx.layer, ctx.desc = layer, desc
        return rows, row_weights, desc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows_grad: Any, row_weights_grad: Any, _: None) -> tuple[Any, ...]:
        layer, desc = ctx.layer, ctx.desc
        tokens_grad = weights_grad = None
        if ctx.needs_input_grad[2]:
            tokens_grad = layer.combine(rows_grad.contiguous().resolve_neg(), desc)
        if ctx.needs_input_grad[3]:
            weights_grad = _collect(layer, desc, row_weights_grad.contiguous().resolve_neg())
        return None, None, tokens_grad, weights_grad


class _Redispatch(torch.autograd.Function):
    """A dispatch with the layout of an earlier dispatch. A token's gradient is the sum of its rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, layer: EPAll2AllLayer, call: Callable[[], Any], tokens: Any, desc: EPAllToAllLayoutDesc
    ) -> Any:
        rows = call()
        _clear_rest(layer, rows, desc)
        ctx.layer, ctx.desc = layer, desc
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows_grad: Any) -> tuple[Any, ...]:
        return None, None, ctx.layer.combine(rows_grad.contiguous().resolve_neg(), ctx.desc), None


class _Combine(torch.autograd.Function):
    """A combine. A row's gradient is its token's gradient times the row's weight. A weight's gradient is the dot
    product of the token's gradient and the row.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: EPAll2AllLayer, call: Callable[[], Any], rows: Any, weights: Any, desc: EPAllToAllLayoutDesc
    ) -> Any:
        output = call()
        ctx.layer, ctx.desc = layer, desc
        ctx.save_for_backward(rows if ctx.needs_input_grad[3] else None, weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Any) -> tuple[Any, ...]:
        layer, desc = ctx.layer, ctx.desc
        rows, weights = ctx.saved_tensors
        rows_grad, weights_grad = layer.redispatch(output_grad.contiguous().resolve_neg(), desc), None
        others = products = None
        if ctx.needs_input_grad[3]:
            weights_grad = torch.empty_like(weights)
            others, products = _view(layer, rows), _view(layer, weights_grad)
        factors = _view(layer, weights) if weights is not None and ctx.needs_input_grad[2] else None
        values, stream = _view_and_stream(layer, rows_grad)
        layer.ctx.weigh(values, factors, stream, desc=desc, others=others, products=products)
        return None, None, rows_grad if ctx.needs_input_grad[2] else None, weights_grad, None


# The functions of the protocol `Recorder`.
is_recording = torch.is_grad_enabled
dispatch, redispatch, combine = _Dispatch.apply, _Redispatch.apply, _Combine.apply


def _collect(layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc, grad: Any) -> Any:
    if desc.local_expert_ids is not None:  # a row's weights for experts of other ranks are always zero
        return layer.combine_weights(grad.masked_fill(desc.local_expert_ids < 0, 0), desc)
    values, stream = _view_and_stream(layer, grad)
    return layer.forms.collect(values, desc, stream)


def _view_and_stream(layer: EPAll2AllLayer, x: Any) -> tuple[ArrayView, StreamLike]:
    group = layer.ctx.group
    return input_view(group, x, "gradient"), group.launches.stream_for(None, x)


def _view(layer: EPAll2AllLayer, x: Any) -> ArrayView:
    return _view_and_stream(layer, x)[0]


def _clear_rest(layer: EPAll2AllLayer, rows: Any, desc: EPAllToAllLayoutDesc) -> None:
    """Sets the rows without a token to zero, and does not make the CPU wait for the number of received rows."""
    if rows is None or not (desc.counts_rows or desc.has_gaps):
        return
    values, stream = _view_and_stream(layer, rows)
    if values.dtype == layer.ctx.ep_config.token and len(values.shape) == 2:
        layer.ctx.weigh(values, None, stream, desc=desc)
        return
    if desc.has_gaps:
        rest = desc.row_slots < 0
    else:
        rest = torch.arange(rows.shape[0], device=rows.device) >= desc.num_recv_tokens
    rows.masked_fill_(rest.reshape(-1, *(1,) * (rows.dim() - 1)), 0)
