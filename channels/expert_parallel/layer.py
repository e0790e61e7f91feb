"""EPAll2AllLayer: the all-to-all of a mixture of experts, from tokens to experts and back."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from proxyccl.channels.collectives.arguments import input_view
from proxyccl.channels.collectives.barrier import barrier
from proxyccl.channels.expert_parallel.arguments import input_array, output_array
from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.expert_parallel.context import (
    GATHER,
    LAYOUT,
    RECEIVE,
    ROUTE,
    SCALED_ELEMENTS,
    SEND,
    DispatchCombineContext,
    DispatchInputs,
    agree_on,
    as_communicator,
    closing_on_error,
)
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.device.arrays import ArrayView
from proxyccl.device.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, CapacityError
from proxyccl.device.runtime import StreamLike

_FLOAT8 = "float8_e4m3fn"
_OWN_NAMES = {"token_dtype": "dtype", "num_experts": "num_tot_experts"}  # the layer's names for fields of EPConfig


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch that was sent; `EPAll2AllLayer.dispatch_recv` takes it."""

    desc: EPAllToAllLayoutDesc
    inputs: DispatchInputs
    stream: StreamLike


@dataclass(frozen=True)
class PendingCombine:
    """A combine that was sent; `EPAll2AllLayer.combine_recv` takes it."""

    desc: EPAllToAllLayoutDesc
    rows: ArrayView
    weights: ArrayView | None
    stream: StreamLike


class EPAll2AllLayer:
    """Sends tokens to the ranks of their experts, and sums the experts' results.

    Each token's row goes once to every rank of its node that has one of its experts, and once to each other node that
    has one. The receiver copies it to the rows of its experts. All ranks construct the layer together and make the same
    calls in the same order; their numbers of tokens may differ.

    Calls are queued on the caller's stream. Without `max_recv_tokens` (the exact mode) `dispatch` waits on the CPU for
    the number of received rows, but not for the rows. With it, `dispatch` does not wait and can be captured in a graph.

    If torch records gradients and an input requires one, `dispatch` and `combine` are recorded. This must be so on all
    ranks or on none, since the backward pass calls the layer too. `redispatch` and the calls in two halves are not
    recorded.

    Args:
        ep_group: a `Communicator`, an MPI communicator or a torch process group. For the last two the layer makes a
            Communicator, which `finalize` closes.
        max_tokens: the most tokens of one rank in one dispatch.
        hidden: elements of a token.
        topk: experts that each token chooses, 1 to 16.
        rank: this rank in the group.
        num_tot_experts: experts of all ranks together; rank r has the r-th share of them.
        local_world_size: ranks of a node.
        world_size: ranks of the group.
        dtype: of tokens: "bfloat16", "float16", "float32" or "float64", by name or torch's or numpy's type.
        weight_dtype: of routing weights: one of the same.
        num_sm: the most blocks, and so the most multiprocessors, that a kernel of the layer uses.
        enable_local_combine: sum a token's rows on each rank first, rounded to `dtype`. This sends less data, but
            rounds the result twice. Only on one node.
        use_aot: use only kernels that were compiled beforehand (`proxyccl compile`).
        max_recv_tokens: the number of rows of every output; None for outputs of the exact size.
        dispatch_dtype: None to send tokens as they are, or "float8_e4m3fn" to send them in float8: each 128 elements
            of a row share a float32 scale, and element times scale is the value. `combine` keeps to `dtype`.
        capacity: see `DispatchCombineContext.create`.

    Raises:
        ArgumentError: an argument is wrong, is not the group's, or differs between ranks.
        CompileError: with use_aot, a kernel was not compiled beforehand.
        ResourceError: no memory or channel ids are left.
    """

    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: Any = "bfloat16",
        weight_dtype: Any = "float32",
        num_sm: int = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        max_recv_tokens: int | None = None,
        dispatch_dtype: Any = None,
        capacity: int = 2,
    ) -> None:
        try:
            config = EPConfig(
                max_tokens=max_tokens,
                hidden=hidden,
                topk=topk,
                num_experts=num_tot_experts,
                rank=rank,
                world_size=world_size,
                local_world_size=local_world_size,
                token_dtype=dtype,
                weight_dtype=weight_dtype,
            )
        except ArgumentError as error:
            if error.argument not in _OWN_NAMES:
                raise
            message = str(error).removeprefix(f"{error.argument}: ")
            raise ArgumentError(_OWN_NAMES[error.argument], message) from None
        if enable_local_combine and not config.is_intra_node:
            raise ArgumentError("enable_local_combine", "is only for one node; across nodes each node sends a sum")
        if max_recv_tokens is not None and (not isinstance(max_recv_tokens, int) or max_recv_tokens < 1):
            raise ArgumentError("max_recv_tokens", f"must be a positive number of rows, not {max_recv_tokens!r}")
        if dispatch_dtype is not None:
            if as_dtype(dispatch_dtype, "dispatch_dtype").name != _FLOAT8:
                raise ArgumentError("dispatch_dtype", f"must be None or {_FLOAT8}, not {dispatch_dtype!r}")
            if hidden % SCALED_ELEMENTS:
                raise ArgumentError(
                    "hidden", f"must be a multiple of {SCALED_ELEMENTS}, the elements that share a scale, not {hidden}"
                )
        communicator, owned = as_communicator(ep_group, config)
        options = {
            "num_sm": num_sm,
            "enable_local_combine": bool(enable_local_combine),
            "max_recv_tokens": max_recv_tokens,
            "dispatch_dtype": None if dispatch_dtype is None else _FLOAT8,
        }
        self.ep_config = config
        self.max_recv_tokens = max_recv_tokens
        self.quantized = dispatch_dtype is not None
        with closing_on_error(communicator, owned=owned):
            agree_on(communicator.group, config, options, _OWN_NAMES)
            self.ctx = DispatchCombineContext(
                communicator,
                config,
                capacity=capacity,
                num_sm=num_sm,
                local_combine=bool(enable_local_combine),
                owns_communicator=owned,
                quantized=self.quantized,
                use_aot=bool(use_aot),
            )
        self._sent: PendingDispatch | None = None
        self._returned: PendingCombine | None = None

    def __enter__(self) -> EPAll2AllLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()

    def __repr__(self) -> str:
        config = self.ep_config
        return (
            f"<EPAll2AllLayer of {config.num_experts} experts on {config.world_size} ranks, top {config.topk}, "
            f"{config.hidden} x {config.token}>"
        )

    def finalize(self) -> None:
        """Releases the layer's memory. All ranks call it together; calling it twice does nothing."""
        self.ctx.finalize()

    def ep_barrier_all(self, stream: StreamLike = None, intra_node_only: bool = False) -> None:
        """Waits on the stream until all ranks have made this call.

        Args:
            stream: as for `Communicator.barrier`.
            intra_node_only: wait only for the ranks of this node. All ranks of the group must call it even so.
        """
        self.ctx.require_usable()
        barrier(self.ctx.communicator.collectives, stream, intra_node_only=intra_node_only)

    # -- dispatch ---

    def dispatch(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any = None,
        full_scatter_indices: Any = None,
        *,
        stream: StreamLike = None,
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        """Sends each token to its experts.

        Args:
            input: [T, hidden] of `dtype`; T from 0 to max_tokens, and may differ between ranks. With dispatch_dtype
                also a pair of rows in float8 and their scales, float32 [T, hidden / 128].
            exp_indices: int32 [T, topk]: the experts of each token. The id `num_tot_experts` drops the slot: nothing
                is sent for it, and it adds zero in `combine`.
            weight: [T, topk] of `weight_dtype`, to send along; or None. All ranks give it, or none.
            full_scatter_indices: int32 [tokens of all ranks, topk], or None: the row of every slot. Tokens and rows are
                numbered over all ranks, in the order of ranks. For each rank it must be a permutation of the rank's
                rows.
            stream: where to queue it; as for `Communicator.all_reduce`.

        Returns:
            The rows, [R, hidden]: one for each slot of this rank's experts, ordered by expert, then the source's rank,
            then token, then k, unless full_scatter_indices give another order; their weights, [R], or None; and the
            descriptor. With dispatch_dtype the rows are a pair, [R, hidden] of float8 and [R, hidden / 128] of float32.
            With max_recv_tokens the arrays have that many rows; the first `desc.num_recv_tokens` are filled.

        Raises:
            ArgumentError: an argument is wrong on this rank, and nothing was done; or an expert id is out of range on
                any rank, which all ranks raise, and the layer stays usable.
            CapacityError: more rows came to a rank than max_recv_tokens; see `check`.
            MismatchError: another rank makes another call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        autograd = None if self.quantized else _recording(input, weight)
        if autograd is not None:
            recorded: tuple[Any, Any, EPAllToAllLayoutDesc] = autograd.dispatch(
                self, input, exp_indices, weight, full_scatter_indices, stream
            )
            return recorded
        inputs, stream = self._dispatch_arguments(input, exp_indices, weight, full_scatter_indices, stream)
        if self.max_recv_tokens is None:
            self._refuse_capture(stream)
        pending = PendingDispatch(self.ctx.describe("dispatch", inputs), inputs, stream)
        if self.max_recv_tokens is not None:
            return self._receive_fixed(ROUTE | SEND | GATHER | RECEIVE, pending, stream)
        self.ctx.begin(ROUTE | GATHER, pending.desc, inputs, stream)
        return self._receive_exact(SEND | RECEIVE, pending, stream)

    def dispatch_send(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any = None,
        full_scatter_indices: Any = None,
        *,
        stream: StreamLike = None,
    ) -> PendingDispatch:
        """The first half of `dispatch`: queues the sends and does not wait.

        The arguments must stay as they are until `dispatch_recv`. One dispatch can be under way at a time.
        """
        inputs, stream = self._dispatch_arguments(input, exp_indices, weight, full_scatter_indices, stream)
        desc = self.ctx.describe("dispatch_send", inputs)
        self.ctx.begin(ROUTE | SEND, desc, inputs, stream)
        self._sent = PendingDispatch(desc, inputs, stream)
        return self._sent

    def dispatch_recv(
        self, pending: PendingDispatch, *, stream: StreamLike = None
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        """The second half of `dispatch`: receives the rows. Returns and raises as `dispatch`."""
        self.ctx.require_usable()
        if pending is not self._sent or pending is None:
            raise ArgumentError("pending", "is not the dispatch of this layer that is under way")
        stream = pending.stream if stream is None else stream
        if self.max_recv_tokens is not None:
            self._sent = None
            return self._receive_fixed(GATHER | RECEIVE, pending, stream)
        self._refuse_capture(stream)
        self._sent = None
        self.ctx.begin(GATHER, pending.desc, pending.inputs, stream)
        return self._receive_exact(RECEIVE, pending, stream)

    def redispatch(self, input: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc, *, stream: StreamLike = None) -> Any:
        """Sends other values of the same tokens with the routing of an earlier dispatch. Nothing is counted again.

        It is the adjoint of `combine`.

        Args:
            input: [T, hidden] of `dtype`.
            ep_a2a_layout_desc: of a dispatch of this layer.
            stream: as for `dispatch`.

        Returns:
            The rows, as that dispatch ordered them.
        """
        desc = self._own_desc(ep_a2a_layout_desc)
        config = self.ep_config
        shape = (desc.num_dispatch_token_cur_rank, config.hidden)
        return self._redispatch(self._input(input, "input", shape, config.token.name), desc, stream)

    def _redispatch(self, tokens: ArrayView, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        self._refuse_under_way()
        output = self.ctx.arrays.new(tokens.owner, (desc.rows, tokens.shape[1]), tokens.dtype)
        self.ctx.repeat(desc, tokens, self._view(output), self.ctx.stream_for(stream, tokens.owner))
        return output

    def _receive_exact(
        self, phases: int, pending: PendingDispatch, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        desc = pending.desc
        rows = self.ctx.await_rows(desc)
        bad = self.ctx.bad_expert("exp_indices")
        if bad is not None:
            end = RECEIVE if phases == RECEIVE else LAYOUT  # rows that were sent must still be received
            self.ctx.receive(end, desc, pending.inputs, 0, None, None, stream)
            raise bad
        output, weights, views = self._new_output(pending.inputs, rows)
        self.ctx.receive(phases, desc, pending.inputs, rows, views, None, stream)
        self._check_if_done(stream)
        return output, weights, desc

    def _receive_fixed(
        self, phases: int, pending: PendingDispatch, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        assert self.max_recv_tokens is not None
        desc, inputs = pending.desc, pending.inputs
        output, weights, views = self._new_output(inputs, self.max_recv_tokens)
        desc.num_recv_tokens = self.ctx.arrays.new(inputs.tokens.owner, (1,), "int32")
        received = self._view(desc.num_recv_tokens)
        self.ctx.receive(phases, desc, inputs, self.max_recv_tokens, views, received, stream)
        self._check_if_done(stream)
        return output, weights, desc

    def _new_output(self, inputs: DispatchInputs, rows: int) -> tuple[Any, Any, tuple[ArrayView | None, ...]]:
        """Returns new rows and weights for the caller, and views of them and of the rows' scales."""
        config, like, new = self.ep_config, inputs.tokens.owner, self.ctx.arrays.new
        weights = None if inputs.weights is None else new(like, (rows,), config.weight)
        output = new(like, (rows, config.hidden), _FLOAT8 if self.quantized else config.token)
        views = self._view(output), None if weights is None else self._view(weights)
        if not self.quantized:
            return output, weights, views
        scales = new(like, (rows, config.hidden // SCALED_ELEMENTS), "float32")
        return (output, scales), weights, (*views, self._view(scales))

    # -- combine ---

    def combine(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        out: Any = None,
        stream: StreamLike = None,
    ) -> Any:
        """Sends the experts' rows back, and sums the rows of each token.

        On one node the sum is made in the order of k, in float32 (float64 for float64), and rounded once. With
        enable_local_combine each rank's partial sum is rounded, and these are summed in the order of ranks. Across
        nodes the same holds for each node's partial sum.

        Args:
            input: [R, hidden] of `dtype`, in the order of the dispatch's output.
            ep_a2a_layout_desc: of that dispatch.
            weights: float32 [R]: the factor of each row in the sum, such as the weights that the dispatch returned;
                None for 1. All ranks give it, or none.
            out: [T, hidden], or None for a new array.
            stream: as for `dispatch`.

        Returns:
            `out`, or the new array. Raises as `dispatch`.
        """
        autograd = _recording(input, weights)
        if autograd is not None:
            if out is not None:
                raise ArgumentError("out", "can't be given if torch records the call for a backward pass")
            return autograd.combine(self, input, ep_a2a_layout_desc, weights, stream)
        desc, rows, scales, stream = self._combine_arguments(input, ep_a2a_layout_desc, weights, stream)
        output, target = self._combine_output(out, rows, desc)
        self.ctx.combine("combine", SEND | RECEIVE, desc, rows, scales, target, stream)
        return output

    def combine_send(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        stream: StreamLike = None,
    ) -> PendingCombine:
        """The first half of `combine`: queues the sends and does not wait.

        `input` and `weights` must stay as they are until `combine_recv`. One combine can be under way at a time.
        """
        desc, rows, scales, stream = self._combine_arguments(input, ep_a2a_layout_desc, weights, stream)
        self.ctx.combine("combine_send", SEND, desc, rows, scales, None, stream)
        self._returned = PendingCombine(desc, rows, scales, stream)
        return self._returned

    def combine_recv(self, pending: PendingCombine, *, out: Any = None, stream: StreamLike = None) -> Any:
        """The second half of `combine`: sums the received rows. Returns and raises as `combine`."""
        self.ctx.require_usable()
        if pending is not self._returned or pending is None:
            raise ArgumentError("pending", "is not the combine of this layer that is under way")
        output, target = self._combine_output(out, pending.rows, pending.desc)
        self._returned = None
        stream = pending.stream if stream is None else stream
        self.ctx.combine("combine_recv", RECEIVE, pending.desc, pending.rows, pending.weights, target, stream)
        return output

    # -- checking ---

    def check(self) -> None:
        """Raises the errors of the dispatches that have ended since the last check: the same on all ranks that have
        waited for them.

        With max_recv_tokens nothing else raises these errors, as dispatch does not wait.

        Raises:
            CapacityError: more rows came to a rank than max_recv_tokens. Those that did not fit were left out, and
                count as zero in `combine`.
            ArgumentError: an expert id was out of range, or full_scatter_indices no permutation. Bad ids were dropped.
        """
        self.ctx.require_usable()
        most, bad = self.ctx.most_rows(), self.ctx.bad_expert("exp_indices")
        if self.ctx.bad_indices():
            raise ArgumentError("full_scatter_indices", "must be a permutation of this rank's rows")
        if self.max_recv_tokens is None:
            return
        if bad is not None:
            raise bad
        if most > self.max_recv_tokens:
            raise CapacityError(
                f"a rank received {most} rows; those beyond max_recv_tokens, {self.max_recv_tokens}, were left out",
                most,
            )

    def _check_if_done(self, stream: StreamLike) -> None:
        if stream is None and self.ctx.runtime_name == "host":  # the call has waited for its end
            self.check()

    def _dispatch_arguments(
        self, input: Any, exp_indices: Any, weight: Any, full_scatter_indices: Any, stream: StreamLike
    ) -> tuple[DispatchInputs, StreamLike]:
        self._refuse_under_way()
        config = self.ep_config
        pair = isinstance(input, tuple)
        if pair and (not self.quantized or len(input) != 2):
            raise ArgumentError("input", "a pair of rows and scales needs a layer with dispatch_dtype")
        rows, dtype = (input[0], _FLOAT8) if pair else (input, config.token.name)
        tokens = self._input(rows, "input", (-1, config.hidden), dtype)
        count = tokens.shape[0]
        if count > config.max_tokens:
            raise ArgumentError("input", f"has {count} tokens; expected at most max_tokens, {config.max_tokens}")
        ids = self._input(exp_indices, "exp_indices", (count, config.topk), "int32")
        weights = scatter = None
        if weight is not None:
            weights = self._input(weight, "weight", (count, config.topk), config.weight.name)
        if full_scatter_indices is not None:
            scatter = self._input(full_scatter_indices, "full_scatter_indices", (-1, config.topk), "int32")
        stream = self.ctx.stream_for(stream, rows)
        if pair:
            shape = (count, config.hidden // SCALED_ELEMENTS)
            tokens = self.ctx.pack(tokens, self._input(input[1], "input", shape, "float32"), stream)
        elif self.quantized:
            tokens = self.ctx.quantize(tokens, stream)
        return DispatchInputs(tokens, ids, weights, scatter), stream

    def _combine_arguments(
        self, input: Any, desc: EPAllToAllLayoutDesc, weights: Any, stream: StreamLike
    ) -> tuple[EPAllToAllLayoutDesc, ArrayView, ArrayView | None, StreamLike]:
        desc = self._own_desc(desc)
        if self._returned is not None:
            raise ArgumentError("combine", "another combine is under way; call combine_recv first")
        config = self.ep_config
        rows = self._input(input, "input", (desc.rows, config.hidden), config.token.name)
        scales = None if weights is None else self._input(weights, "weights", (desc.rows,), "float32")
        return desc, rows, scales, self.ctx.stream_for(stream, input)

    def _combine_output(self, out: Any, rows: ArrayView, desc: EPAllToAllLayoutDesc) -> tuple[Any, ArrayView]:
        shape = (desc.num_dispatch_token_cur_rank, self.ep_config.hidden)
        return output_array(self.ctx.group, out, rows, shape, self.ep_config.token)

    def _own_desc(self, desc: EPAllToAllLayoutDesc) -> EPAllToAllLayoutDesc:
        self.ctx.require_usable()
        if not isinstance(desc, EPAllToAllLayoutDesc) or desc.owner is not self.ctx:
            raise ArgumentError("ep_a2a_layout_desc", "is not the descriptor of a dispatch of this layer")
        return desc

    def _refuse_under_way(self) -> None:
        self.ctx.require_usable()
        if self._sent is not None:
            raise ArgumentError("dispatch", "another dispatch is under way; call dispatch_recv first")

    def _refuse_capture(self, stream: StreamLike) -> None:
        runtime = self.ctx.group.runtime
        if runtime.name != "host" and runtime.is_capturing(runtime.stream_handle(stream)):
            raise ArgumentError(
                "max_recv_tokens",
                "is needed to capture a dispatch in a graph, which can't wait for its size",
            )

    def _view(self, array: Any) -> ArrayView:
        return input_view(self.ctx.group, array, "out")

    def _input(self, x: Any, argument: str, shape: tuple[int, ...], dtype: str) -> ArrayView:
        return input_array(self.ctx.group, x, argument, shape, dtype)


def _recording(*inputs: Any) -> ModuleType | None:
    """The module that records a call for torch's backward pass, if one of its inputs requires a gradient; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return None
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return None
    from proxyccl.channels.expert_parallel import autograd

    return autograd
