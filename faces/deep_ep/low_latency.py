"""Low-latency mode: dispatch and combine of few tokens. Outputs have room for the largest number of rows that each
expert can get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from proxyccl.channels.calls._calls import SentCall
from proxyccl.channels.expert_parallel.arguments import output_array, whole_number
from proxyccl.channels.expert_parallel.combine_form import RowSignals
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.deep_ep import nvfp4
from proxyccl.deep_ep.arguments import require_beside, require_ids, require_stats, require_tensor
from proxyccl.deep_ep.handles import Handle, LowLatencyHandle, Routing, Rows
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import ELEMENTS, EXPONENTS_OF_A_WORD, column_major, packed_exponents, quantize_rounded
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError

_MOST_COUNTED = 2**31 - 1
Half = tuple[Callable[[], None], EPAll2AllLayer]
"""The function that receives the rows of a call with a hook, and the call's layer."""


class Options(NamedTuple):
    """The options of `Buffer.low_latency_dispatch`. If `hooked` is set, the call sends rows, and its hook receives
    rows.
    """

    max_tokens: int
    num_experts: int
    num_sms: int
    use_fp8: Any
    round_scale: Any
    use_ue8m0: Any
    use_nvfp4: Any
    hooked: bool


def dispatch(
    layers: Layers,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    stats: torch.Tensor | None,
    global_scale: torch.Tensor | None,
) -> tuple[Rows, torch.Tensor, Handle, Half | None]:
    """Does the work of `Buffer.low_latency_dispatch`. Returns that method's results without the event, and with a
    `Half` or None instead of the hook.
    """
    try:
        key = options, x.shape[1], x.dtype, topk_idx.shape[1], topk_idx.dtype
    except (AttributeError, IndexError, TypeError):  # an argument is not a tensor, so this call raises the error
        return Dispatches(layers, options, x, topk_idx).make(x, topk_idx, stats, global_scale)
    form: Dispatches = layers.forms.get(key) or layers.add_form(key, Dispatches(layers, options, x, topk_idx))
    return form.make(x, topk_idx, stats, global_scale)


class Dispatches:
    """Makes dispatches that have the same options, and tensors that differ only in their number of tokens. The
    constructor checks the tensors of the first such dispatch.
    """

    def __init__(self, layers: Layers, options: Options, x: torch.Tensor, topk_idx: torch.Tensor) -> None:
        use_fp8, self._packs = as_flag(options.use_fp8, "use_fp8"), as_flag(options.use_ue8m0, "use_ue8m0")
        self._to_float4 = as_flag(options.use_nvfp4, "use_nvfp4")
        rounds = as_flag(options.round_scale, "round_scale")
        for name, of_float8 in (("use_fp8", use_fp8), ("round_scale", rounds), ("use_ue8m0", self._packs)):
            if self._to_float4 and of_float8:
                raise ArgumentError("use_nvfp4", f"can't be given with {name}; expected {name}=False")
        self._rounds = rounds and use_fp8
        if self._packs and not rounds:
            raise ArgumentError("use_ue8m0", "needs round_scale=True, because its scales are powers of two")
        _require_tokens(x, topk_idx)
        hidden, most = x.shape[1], options.max_tokens
        num_scales = 0
        if use_fp8 or self._to_float4:
            unit, name = (nvfp4.WORD_ELEMENTS, "use_nvfp4") if self._to_float4 else (ELEMENTS, "use_fp8")
            if hidden % unit:
                raise ArgumentError("x", f"has {hidden} elements in a row; expected a multiple of {unit} with {name}")
            num_scales = hidden // unit
        if self._packs and hidden % (ELEMENTS * EXPONENTS_OF_A_WORD):
            raise ArgumentError("use_ue8m0", f"needs a hidden size that is a multiple of 512, not {hidden}")
        sizes = hidden, topk_idx.shape[1], options.num_experts, "bfloat16", options.num_sms, num_scales
        shape = Shape("padded", *sizes, float4=self._to_float4)
        self._options = options
        self._turns = layers.turns(shape, most) if options.hooked else None
        both = (layers.of_size(shape, most),) if self._turns is None else self._turns.layers
        self._layers = tuple(layer.narrowed(most) for layer in both)
        self._quantizer = nvfp4.Quantizer(self._layers[0].ctx.group) if self._to_float4 else None
        self._experts = self._layers[0].ep_config.num_experts_per_rank

    def make(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        stats: torch.Tensor | None,
        global_scale: torch.Tensor | None,
    ) -> tuple[Rows, torch.Tensor, Handle, Half | None]:
        options, turns = self._options, self._turns
        layer = self._layers[0 if turns is None else turns.next]
        require_stats(stats, self._experts)
        if self._quantizer is not None:
            _require_tokens(x, topk_idx)
            tokens = self._quantizer.quantize(x, nvfp4.require_global_scale(global_scale, x))
        else:
            tokens = quantize_rounded(x) if self._rounds else x

        def finish() -> None:
            if tiles is not None:
                nvfp4.fill_tiles(tiles, rows[1])
            if packed is not None:
                packed.copy_(packed_exponents(rows[1]))
            if stats is not None:
                stats.add_(expert_rows)

        half = None
        if turns is None:
            rows, _, desc = layer.dispatch_unrecorded(tokens, topk_idx)
        else:
            sent = layer.send_unrecorded(tokens, topk_idx)
            half = _dispatch_later(layer, sent, finish)
            turns.next = 1 - turns.next  # changed only if `send_unrecorded` raised no error
            rows, desc = sent.rows, sent.desc
        expert_rows = desc.table("expert_rows")
        packed = column_major(rows[1], packed=True) if self._packs else None
        tiles = nvfp4.new_tiles(rows[1]) if self._to_float4 else None
        if half is None:
            finish()
        handle = LowLatencyHandle(Routing(layer, desc), options.max_tokens, x.shape[1], options.num_experts)
        if tiles is not None:
            return nvfp4.as_deep_ep(rows[0], tiles), expert_rows, handle, half
        return (rows if packed is None else (rows[0], packed)), expert_rows, handle, half


def _require_tokens(x: Any, topk_idx: Any) -> None:
    require_tensor("x", x, (None, None), (torch.bfloat16,))
    require_ids(topk_idx, len(x))


def _dispatch_later(layer: EPAll2AllLayer, pending: SentCall, finish: Callable[[], None]) -> Half:
    """Returns the second half of a dispatch, which receives the rows and then calls `finish`. Call this function as
    soon as the first half is queued. If the layer's next call is made before the second half, the next call receives
    the rows, and the second half only calls `finish`.
    """
    early: list[ProxyCCLError | None] = []

    def end() -> None:
        error: ProxyCCLError | None = None
        try:
            layer.dispatch_recv(pending)
        except (ArgumentError, CapacityError) as refused:
            error = refused
        early.append(error)

    def receive() -> None:
        if not early:
            layer.dispatch_recv(pending)
        elif early[0] is not None:
            raise early[0]
        finish()

    layer.dispatching.end = end
    return receive, layer


def _combine_later(
    layer: EPAll2AllLayer, pending: Any, x: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, Half]:
    """Returns the tensor for a combine's result, and the combine's second half. Call this function as soon as the first
    half is queued.
    """
    early: list[torch.Tensor] = []

    def end() -> None:  # `out` stays unchanged, because the caller may reuse it after an exception
        early.append(layer.combine_recv(pending))

    def receive() -> None:
        if early:
            target.copy_(early[0])
        else:
            layer.combine_recv(pending, out=target)

    layer.combining.end = end
    tokens = pending.desc.num_dispatch_token_cur_rank
    target = x.new_empty(tokens, layer.ep_config.hidden) if out is None else out
    return target, (receive, layer)


def row_signals(
    routing: Routing,
    x: Any,
    comp_signal: Any,
    block_m: Any,
    threshold: Any,
    num_sms: Any,
    src_signals: Any,
    src_signal_expect_value: Any,
) -> RowSignals:
    """Returns the counters of a `Buffer.low_latency_combine` whose rows `x` another kernel still computes. Raises
    ArgumentError unless there is a counter for each block of rows.
    """
    if (comp_signal is None) == (src_signals is None):
        raise ArgumentError("overlap", "expected either comp_signal or src_signals with overlap")
    experts = routing.layer.ep_config.num_experts_per_rank
    rows = routing.desc.rows // experts
    if src_signals is None:
        name, given, block_rows = "comp_signal", comp_signal, whole_number("block_m", block_m, 1)
        complete = whole_number("threshold", threshold, 0, _MOST_COUNTED)
        each = f"each {block_rows} of the {rows} rows of an expert"
    else:
        name, given, block_rows, each = "src_signals", src_signals, rows, "an expert"
        complete = whole_number("src_signal_expect_value", src_signal_expect_value, 0, _MOST_COUNTED)
    blocks, senders = -(-rows // block_rows), 0 if num_sms is None else whole_number("num_sms", num_sms, 1)
    counters = require_tensor(name, given, (None,), (torch.int32, torch.uint32))
    if len(counters) < experts * blocks or not counters.is_contiguous():
        what = f"has {len(counters)} counters; expected {experts * blocks}, contiguous, one for {each}"
        raise ArgumentError(name, what)
    if isinstance(x, torch.Tensor):
        require_beside(name, counters, x)
    return RowSignals(counters.data_ptr(), blocks, block_rows, complete, senders, counters)


def combine(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    out: torch.Tensor | None,
    after: RowSignals | None,
    *,
    hooked: bool,
) -> tuple[torch.Tensor, Half | None]:
    """Returns the result of `Buffer.low_latency_combine`, and the second half, which receives the rows; None instead of
    the second half if `hooked` is False.
    """
    layer, desc = routing.layer, routing.desc
    if not isinstance(x, torch.Tensor) or not isinstance(topk_weights, torch.Tensor):
        _require_results(x, topk_weights, layer, desc)
    if out is not None:
        require_tensor("out", out, (desc.num_dispatch_token_cur_rank, layer.ep_config.hidden), (torch.bfloat16,))
    if after is not None:
        _require_results(x, topk_weights, layer, desc)  # raises errors before any rank sends
        if out is not None:  # the layer checks `out` only in the second half
            given = {"x": x, "topk_weights": topk_weights}
            output_array(layer.ctx.group, out, given, tuple(out.shape), layer.ep_config.token)
    slots = topk_weights if layer.sums_on_own_node else None
    weights = layer.weights_by_row(topk_weights, desc) if slots is None else None
    if not hooked and after is None:
        return layer.combine_unrecorded(x, weights, slots, None, (), desc, out, None), None
    pending = layer.send_back_unrecorded(x, weights, slots, desc, None, after)
    return _combine_later(layer, pending, x, out) if hooked else (layer.combine_recv(pending, out=out), None)


def _require_results(x: Any, topk_weights: Any, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc) -> None:
    desc.require_received(layer.ctx, "handle")
    config, experts = layer.ep_config, layer.ep_config.num_experts_per_rank
    require_tensor("x", x, (experts, desc.rows // experts, config.hidden), (torch.bfloat16,))
    require_tensor("topk_weights", topk_weights, (desc.num_dispatch_token_cur_rank, config.topk), (torch.float32,))
