"""`Buffer`, with the calls of DeepEP 1.2.1, for GPU tensors and, on the host runtime, for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.geometry import aligned
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.deep_ep import low_latency, normal
from proxyccl.deep_ep.arguments import LOW_LATENCY, NORMAL, refuse, refuse_unknown, require_tensor
from proxyccl.deep_ep.config import MOST_BYTES, Config
from proxyccl.deep_ep.connected import Connected
from proxyccl.deep_ep.handles import Handle, Rows
from proxyccl.deep_ep.layers import Layers, Masks
from proxyccl.deep_ep.normal import dispatch_layout
from proxyccl.deep_ep.utils import EventHandle, EventOverlap
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import AbortedError, ArgumentError, CommunicatorError
from proxyccl.torch_tensors.untraced import untraced

_BEFORE_WORST_TOKENS = 9  # arguments of dispatch


@untraced
class Buffer(Connected):
    """Dispatch and combine for the ranks of a group. All ranks construct the buffer together and make the same calls.

    Args:
        group: a process group of torch, of any backend, or a `Communicator`; or None with `comm`.
        num_nvl_bytes, num_rdma_bytes: stored as attributes, without other effect. Memory is allocated when a call needs
            it.
        low_latency_mode: stored as an attribute, without other effect; every buffer works in both modes.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: without effect.
        explicitly_destroy: whether the caller calls `destroy`; if False, the memory lives until the process ends.
        enable_shrink: whether the buffer continues after ranks are lost. On each remaining rank, one call raises an
            error that names the lost rank: the call in progress or, on a rank that is between two calls, the next call.
            Each rank then repeats its forward pass from the first layer, because the ranks' calls may have stopped in
            different layers. The first dispatch runs on the remaining ranks, sends nothing to the lost ranks' experts,
            and keeps all shapes. On GPUs, results of calls that were launched before the error may be wrong: before
            results are used, synchronize and call `communicator.check`, which raises the error without replacing the
            next call's.
        comm: an MPI communicator, instead of `group`.

    Attributes:
        num_sms: the largest number of multiprocessors that a kernel of a call without a config takes; `set_num_sms`
            sets it.
        rank, group_size, group: this rank's number, the number of ranks, and the group, all including lost ranks.
        communicator: the communicator of the remaining ranks, for calls that DeepEP lacks.

    Raises:
        ArgumentError: neither group nor comm was given, or a number is out of range.
        CommunicatorError: a peer failed or did not arrive; see its subclasses.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        **others: Any,
    ) -> None:
        refuse_unknown("Buffer", others)
        source = group if group is not None else comm
        if source is None:
            raise ArgumentError("group", "must be a process group, or comm an MPI communicator; both are None")
        num_nvl_bytes = whole_number("num_nvl_bytes", num_nvl_bytes, 0, MOST_BYTES)
        num_rdma_bytes = whole_number("num_rdma_bytes", num_rdma_bytes, 0, MOST_BYTES)
        whole_number("num_qps_per_rank", num_qps_per_rank, 0)
        enable_shrink = as_flag(enable_shrink, "enable_shrink")
        super().__init__(source, explicitly_destroy=explicitly_destroy)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.rank, self.group_size = self._rank_and_ranks
        self._nodes = self.group_size // self.communicator.local_world_size
        self._masks = Masks(self.group_size)

    # -- queries ---

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: no feature depends on the GPU's architecture."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the largest number of multiprocessors that a kernel of later calls takes. The number must be even, and
        the same on all ranks.
        """
        number = whole_number("new_num_sms", new_num_sms, 1)
        if number % 2:
            raise ArgumentError("new_num_sms", f"must be an even number, not {new_num_sms!r}")
        Buffer.num_sms = number

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event that follows all work queued on the current stream so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the default config, which is the same for any number of ranks."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the number of bytes of a low-latency dispatch and combine in bfloat16, which callers pass as
        `num_rdma_bytes`: 2 * num_max_dispatch_tokens_per_rank rows for each rank, and half as many for each expert.
        """
        tokens = whole_number("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
        row = 2 * whole_number("hidden", hidden, 0)
        ranks, experts = whole_number("num_ranks", num_ranks, 1), whole_number("num_experts", num_experts, 1)
        return aligned((2 * ranks + experts) * tokens * row)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Returns a tensor without elements, because there is no buffer of a fixed layout. Clearing this tensor does
        nothing.

        Raises:
            NotImplementedError: the caller requests a part of the buffer.
        """
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype", f"must be a torch.dtype, not {type(dtype).__name__}")
        self._usable()
        if size is not None or offset:
            reason = "its memory belongs to layers, which are made when calls need them"
            raise refuse("get_local_buffer_tensor(size=, offset=)", reason)
        runtime = self.communicator.runtime
        return torch.empty(0, dtype=dtype, device="cpu" if runtime.name == "host" else f"cuda:{runtime.device}")

    # -- normal mode ---

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts this rank's tokens by their destinations.

        Args:
            topk_idx: int64 [T, topk]: the experts of each token; -1 in a slot without an expert.
            num_experts: the number of experts of all ranks together.
            previous_event: the event that an asynchronous call waits for, instead of the current stream.
            async_finish: whether the call is asynchronous. The current stream does not wait for an asynchronous call;
                the caller waits for the event instead.
            allocate_on_comm_stream: without effect; the results can always be used on the current stream.

        Returns:
            num_tokens_per_rank, int32 [ranks]; num_tokens_per_rdma_rank, int32 [nodes], or None on one node;
            num_tokens_per_expert, int32 [num_experts]; is_token_in_rank, bool [T, ranks]; and the event.
        """
        call = lambda: dispatch_layout(topk_idx, num_experts, self.group_size, self._nodes)  # noqa: E731
        layout, event = self._run(call, (previous_event,), topk_idx, NORMAL, apart=async_finish)
        return *layout, event

    def dispatch(
        self,
        x: Rows,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        Args:
            x: [T, hidden] of bfloat16 (or float16, float32, float64); or a pair of float8_e4m3fn rows and their scales,
                [T, n] or [T] of float32 or int32.
            handle: the handle of an earlier dispatch, whose routing is reused; None for a new routing. With a handle,
                omit the arguments from num_tokens_per_rank to num_worst_tokens.
            num_tokens_per_rank, num_tokens_per_rdma_rank: ignored.
            is_token_in_rank, num_tokens_per_expert: as `get_dispatch_layout` returned them.
            topk_idx: int64 or int32 [T, topk]: the experts of each token; -1 in a slot without an expert. With None,
                each token goes to its ranks in is_token_in_rank, at most 16, and the returned number of rows of each
                expert is the sum of the ranks' num_tokens_per_expert. Either all ranks pass topk_idx, or no rank does.
            topk_weights: float32 [T, topk], or None. Either all ranks pass weights, or no rank does.
            expert_alignment: the returned number of rows of each expert is rounded up to a multiple of this number.
            num_worst_tokens: the number of rows of every output, the same on all ranks; 0 for outputs of the exact
                size, for which the CPU waits. If num_worst_tokens is not 0, a rank can send at most num_worst_tokens /
                ranks tokens or, if that is more, the largest number of tokens that any rank sent in the first call with
                num_worst_tokens. num_worst_tokens also works across nodes.
            config: its num_sms limits the number of multiprocessors; None for `Buffer.num_sms`. All ranks pass the same
                number.
            previous_event, async_finish, allocate_on_comm_stream: as for `get_dispatch_layout`.

        Returns:
            A tuple of: recv_x, the received rows, of the type of x, ordered by source rank and token; recv_topk_idx,
            the experts' numbers on this rank, or -1 for experts of other ranks; recv_topk_weights, in which received
            rows have 0 where recv_topk_idx is -1; a list of the number of rows of each expert of this rank, which is []
            with num_worst_tokens; the handle; and the event. Without topk_idx, recv_topk_idx and recv_topk_weights are
            None. With a handle, all except recv_x and the event are None.

        Raises:
            ArgumentError: an argument is wrong; an expert id is out of range on any rank.
            MismatchError: another rank makes a different call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        if others:
            refuse_unknown("dispatch", others)
        layers = self._layers_of_the_left()
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ArgumentError("topk_idx", "can't be given with a handle, which has the routing")
            self._require_current(handle, "rank")
            again = lambda: normal.repeat(x, handle)  # noqa: E731
            rows, event = self._run(again, (previous_event,), (x, handle), NORMAL, apart=async_finish)
            return rows, None, None, None, None, event
        if topk_idx is None and topk_weights is not None:
            raise ArgumentError("topk_weights", "can't be given without topk_idx")
        if is_token_in_rank is None or num_tokens_per_expert is None:
            name = "is_token_in_rank" if is_token_in_rank is None else "num_tokens_per_expert"
            raise ArgumentError(name, "must be given without a handle")
        if config is not None and not isinstance(config, Config):
            raise ArgumentError("config", f"must be a Config or None, not {type(config).__name__}")
        expert_alignment = whole_number("expert_alignment", expert_alignment, 1)
        num_worst_tokens = whole_number("num_worst_tokens", num_worst_tokens, 0)
        num_sms = Buffer.num_sms if config is None else config.num_sms

        options = normal.Options(self.group_size, expert_alignment, num_worst_tokens or None, num_sms, self._nodes)
        used = (x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        if topk_idx is None:
            call = lambda: normal.dispatch_to_ranks(layers, options, x, is_token_in_rank, num_tokens_per_expert)  # noqa: E731
        else:
            call = lambda: normal.dispatch(layers, options, *used)  # noqa: E731
        dispatched, event = self._run(call, (previous_event,), used, NORMAL, apart=async_finish)
        return *dispatched, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends rows back and sums each token's rows, in float32.

        Args:
            x: [rows, hidden], in the order of the dispatch's output.
            handle: the handle of that dispatch.
            topk_weights: float32 [rows, topk], zero where the dispatch's expert id is -1; or None. Either all ranks
                pass weights, or no rank does.
            bias: one or two tensors [T, hidden], which are added to the sums before rounding; or None.
            config: ignored: a combine uses as many multiprocessors as its dispatch.
            previous_event, async_finish, allocate_on_comm_stream: as for `get_dispatch_layout`.

        Returns:
            A tuple of: the sums, [T, hidden]; the sums of topk_weights, float32 [T, topk], or None without weights; and
            the event. Raises the errors of `dispatch`.
        """
        if others:
            refuse_unknown("combine", others)
        routing, used = self._require_current(handle, "rank"), (x, topk_weights, bias, handle)
        call = lambda: normal.combine(x, handle, routing, topk_weights, bias)  # noqa: E731
        combined, event = self._run(call, (previous_event,), used, NORMAL, apart=async_finish)
        return *combined, event

    def internode_dispatch(self, *arguments: Any, **options: Any) -> Any:
        """Calls `dispatch`, which also works across nodes. As in DeepEP, the positional argument after expert_alignment
        is config and not num_worst_tokens.
        """
        worst = (0,) if len(arguments) > _BEFORE_WORST_TOKENS else ()
        return self.dispatch(*arguments[:_BEFORE_WORST_TOKENS], *worst, *arguments[_BEFORE_WORST_TOKENS:], **options)

    def internode_combine(self, *arguments: Any, **options: Any) -> Any:
        """Calls `combine`, which also works across nodes."""
        return self.combine(*arguments, **options)

    # -- low-latency mode ---

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: normal mode and low-latency mode share no memory, so a change of mode needs no clearing."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[Rows, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Sends each token to its experts. The output has room for the largest number of rows that an expert can get.

        Two dispatches with hooks, and their combines, can be in progress at the same time. If the hook of the first
        dispatch was not called, a third dispatch first receives the first dispatch's rows.

        Args:
            x: bfloat16 [T, hidden], any hidden size; with use_fp8 a multiple of 128.
            topk_idx: int64 or int32 [T, topk]: the experts of each token; -1 in a slot without an expert. A token
                should not choose an expert twice: each choice takes a row, and the expert may run out of rows.
            num_max_dispatch_tokens_per_rank: the largest number of tokens of one rank; the same on all ranks.
            num_experts: the number of experts of all ranks together.
            cumulative_local_expert_recv_stats: int32 [experts of this rank], to which the number of each expert's rows
                is added; or None.
            dispatch_wait_recv_cost_stats: must be None.
            use_fp8: whether rows are sent in float8 and returned as a pair of rows and scales.
            round_scale: whether scales are rounded to powers of two.
            use_ue8m0: whether scales are returned as packed exponents, which needs round_scale.
            use_nvfp4: whether rows are sent in NVFP4, as forks of DeepEP do: each 16 values have a float8 scale, and
                element * scale / x_global_scale is the value (device/kernels/nvfp4_rows.h has the formula). With
                use_nvfp4, the hidden size must be a multiple of 64, and use_fp8 must be False.
            x_global_scale: with use_nvfp4, a float32 tensor of one value, or of several equal values, of which the
                first is used; None for 1. All ranks pass the same value.
            async_finish: as for `get_dispatch_layout`; can't be combined with return_recv_hook.
            return_recv_hook: whether the call only sends, and returns a hook that receives the rows. The caller calls
                the hook once, and leaves x and topk_idx unchanged until then.

        Returns:
            A tuple of: the rows, bfloat16 [experts of this rank, ranks * num_max_dispatch_tokens_per_rank, hidden], or
            a pair of such rows in float8_e4m3fn and their scales, float32 [..., hidden / 128] or int32 [..., hidden /
            512], in which the scales of consecutive rows are adjacent in memory; the number of rows of each expert,
            int32 [experts of this rank]; the handle; the event; and the hook, or None without return_recv_hook. Raises
            the errors of `dispatch`, and CapacityError if an expert got more rows than the output has room for. On
            GPUs, rows with wrong ids and rows without room are dropped without an error, because the CPU does not wait
            for the call.

            With use_nvfp4 the pair is uint8 [rows, hidden / 2, experts], in which the low bits of a byte hold the first
            of two values, and uint8 [32, 4, tiles, 4, hidden / 64, experts], whose bytes are float8_e4m3fn: the scale
            of row 128 t + 32 g + b of an expert, and of the elements from 64 w + 16 c on, is at [b, g, t, c, w].
        """
        if others:
            refuse_unknown("low_latency_dispatch", others)
        if dispatch_wait_recv_cost_stats is not None:
            raise refuse("dispatch_wait_recv_cost_stats", "kernels don't measure their waits; `proxyccl trace` does")
        if return_recv_hook is not False:
            return_recv_hook = _is_hooked(async_finish, return_recv_hook)
        max_tokens = whole_number("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        num_experts = whole_number("num_experts", num_experts, 1)
        options = low_latency.Options(
            max_tokens, num_experts, Buffer.num_sms, use_fp8, round_scale, use_ue8m0, use_nvfp4, return_recv_hook
        )
        layers, stats = self._layers_of_the_left(), cumulative_local_expert_recv_stats
        call = lambda: low_latency.dispatch(layers, options, x, topk_idx, stats, x_global_scale)  # noqa: E731
        used = (x, topk_idx, stats, x_global_scale)
        made, event = self._run(call, (None,), used, LOW_LATENCY, apart=async_finish)
        rows, counts, handle, half = made
        return rows, counts, handle, event, half and self._once(*half, LOW_LATENCY)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int | None = None,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        **others: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Sends the experts' rows back, and sums each token's rows times their weights, in float32.

        Args:
            x: bfloat16, of the shape of the dispatch's rows.
            topk_idx: the dispatch's expert ids; ignored, because the handle contains them.
            topk_weights: float32 [T, topk].
            handle: the dispatch's handle.
            use_logfmt: without effect: rows are sent in bfloat16.
            zero_copy: without effect: rows are always read from `x`, without a copy.
            async_finish, return_recv_hook: as for `low_latency_dispatch`. With a hook, x and topk_weights must not
                change until the hook is called.
            out: bfloat16 [T, hidden], or None for a new tensor.
            combine_wait_recv_cost_stats: must be None.
            overlap: whether a kernel on another stream still computes `x`, as in forks of DeepEP. With overlap, the
                call waits for that kernel's counters, comp_signal or src_signals, before it reads rows. Until all
                counters have reached their value, the call takes num_sms multiprocessors. The hook does not read the
                counters. Without overlap, the following arguments have no effect.
            packed_recv_count: without effect, because the handle has the counts.
            comp_signal: int32 or uint32 [experts of this rank * blocks]: the counter of each `block_m` consecutive rows
                of an expert; blocks is the number of rows of an expert / block_m, rounded up. The call does not wait
                for rows that the experts did not receive.
            block_m: the number of rows that share a counter.
            threshold: the value of comp_signal from which on rows are complete.
            num_sms: maximum number of multiprocessors that send rows; None for as many as the dispatch took.
            src_signals: int32 or uint32 [experts of this rank], instead of comp_signal: a counter for all rows of an
                expert.
            src_signal_expect_value: the value of src_signals from which on rows are complete.

        Returns:
            A tuple of: `out`, or the new tensor; the event; and the hook, or None without return_recv_hook. Raises the
            errors of `dispatch`.
        """
        if others:
            refuse_unknown("low_latency_combine", others)
        if combine_wait_recv_cost_stats is not None:
            raise refuse("combine_wait_recv_cost_stats", "kernels don't measure their waits; `proxyccl trace` does")
        hooked = return_recv_hook is not False and _is_hooked(async_finish, return_recv_hook)
        routing = self._require_current(handle, "padded")
        after = None
        if overlap is not False and as_flag(overlap, "overlap"):
            signals = comp_signal, block_m, threshold, num_sms, src_signals, src_signal_expect_value
            after = low_latency.row_signals(routing, x, *signals)
        call = lambda: low_latency.combine(x, topk_weights, routing, out, after, hooked=hooked)  # noqa: E731
        used = (x, topk_weights, out, handle, comp_signal, src_signals)
        (output, half), event = self._run(call, (None,), used, LOW_LATENCY, apart=async_finish)
        return output, event, half and self._once(*half, LOW_LATENCY)

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """Returns a tensor for the experts' results, bfloat16, of the shape of the dispatch's rows. Each handle has its
        own tensor, so that two batches in progress do not overwrite each other's results.
        """
        self._require_current(handle, "padded")
        results: torch.Tensor = handle.combine_buffer
        return results

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, so that the next dispatch excludes it; or, before that dispatch, unmasks the rank. All
        remaining ranks make this call with the same arguments. An excluded rank can no longer use the buffer: its calls
        raise an error.

        Raises:
            ArgumentError: rank_to_mask is this rank or no rank of the buffer, or the buffer was made without
                enable_shrink.
            NotImplementedError: the rank was lost; see `grow`.
        """
        self._usable()
        if not self.enable_shrink:
            raise ArgumentError("enable_shrink", "must be True to mask ranks")
        rank = whole_number("rank_to_mask", rank_to_mask, 0, self.group_size - 1, "a rank")
        if rank == self.rank:
            raise ArgumentError("rank_to_mask", f"{rank} is this rank; expected another")
        self._masks.update(rank, masked=mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills in `mask_status`, int32 [ranks]: 1 for ranks that are masked or known to be lost, 0 for other ranks.
        Does not wait, and does not replace the error that a call raises after a loss.

        Raises:
            CommunicatorError: a rank has failed, and the buffer was made without enable_shrink.
        """
        self._usable()
        if not self.enable_shrink:
            self.communicator.group.failure.require_usable()
        require_tensor("mask_status", mask_status, (self.group_size,))
        masked = self._masks.of(self.communicator)
        mask_status.copy_(torch.tensor([int(rank in masked) for rank in range(self.group_size)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks the ranks that were masked since the last dispatch.

        Raises:
            NotImplementedError: ranks were lost; see `grow`.
        """
        self._usable()
        self._masks.clean()

    def grow(self, communicator: Communicator) -> None:
        """See `Connected.grow`. Call this after a dispatch that has excluded the lost ranks."""
        if not self.enable_shrink:
            raise ArgumentError("enable_shrink", "must be True to replace lost ranks")
        try:
            super().grow(communicator)
        finally:
            if self.communicator is communicator:
                self._masks.lost = ()

    def _layers_of_the_left(self) -> Layers:
        """Returns the layers. If ranks were lost or masked, all remaining ranks first make a communicator without these
        ranks, and new layers. Raises the failure of the old communicator if no call of this buffer has raised it.
        """
        layers = self._layers
        if layers is not None and not self.enable_shrink:
            return layers
        layers, before = self._usable(), self.communicator
        failure = before.group.failure
        if not (self._masks.pending or failure.aborted):
            return layers
        if failure.aborted and not layers.failure_raised:
            layers.failure_raised = True
            raise failure.exception()
        shrunk = before.shrink(exclude=self._masks.numbers_in(before))
        self._masks.lose_all_but(shrunk)
        failed = layers.failure_raised or before.closed  # `shrink` closes a communicator that has failed
        self.communicator, owned, self._owned = shrunk, self._owned, True
        self._layers = Layers(shrunk, self._masks.lost)
        try:
            # A rank that excludes masked ranks may be in `shrink` already when a call of another rank fails.
            anywhere = shrunk.group.exchange.all_gather(failed, FLAG, "whether calls have failed")
        except CommunicatorError:
            self._layers.failure_raised = True
            raise
        finally:
            if owned and not before.closed:
                before.group.close(reason="ranks were masked")
        if any(anywhere) and not layers.failure_raised:
            raise AbortedError("a call failed while masked ranks were excluded; expected to repeat the forward pass")
        return self._layers


def _is_hooked(async_finish: bool, return_recv_hook: bool) -> bool:
    hooked = as_flag(return_recv_hook, "return_recv_hook")
    if hooked and as_flag(async_finish, "async_finish"):
        raise ArgumentError("return_recv_hook", "can't be given with async_finish: the hook runs on the current stream")
    return hooked
