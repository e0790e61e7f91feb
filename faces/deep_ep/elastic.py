"""ElasticBuffer, with the calls of DeepEP 2.1.0. This module has the calls for mixtures of experts; ElasticBuffer's
base classes have its other calls.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.deep_ep import elastic_calls
from proxyccl.deep_ep.arguments import ELASTIC, refuse, refuse_unknown, require_ids, require_seconds, require_stats
from proxyccl.deep_ep.config import ELASTIC_ALIGNMENT, MOST_BYTES, elastic_size_hint
from proxyccl.deep_ep.connected import LEAST_TIMEOUT_SECONDS
from proxyccl.deep_ep.elastic_handle import EPHandle, Options
from proxyccl.deep_ep.engram import EngramCalls
from proxyccl.deep_ep.handles import Routing, Rows
from proxyccl.deep_ep.pipeline import PipelineCalls
from proxyccl.deep_ep.sessions import SessionCalls, size_of
from proxyccl.deep_ep.utils import EventHandle, EventOverlap
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import ArgumentError
from proxyccl.torch_tensors.untraced import untraced

_SMS_BESIDE_OTHERS, _SMS_ALONE = 24, 64


@untraced
class ElasticBuffer(PipelineCalls, SessionCalls, EngramCalls):
    """Dispatch, combine and other calls for the ranks of a group. All ranks construct the buffer together, and make the
    same calls, unless a call's documentation says otherwise.

    Args:
        group: a process group of torch, of any backend, an MPI communicator, or a `Communicator`.
        num_bytes: the limit for the sizes of pipelines, sessions and storage; None for the result of
            `get_buffer_size_hint`. Memory is allocated when a call needs it.
        num_cpu_bytes: the part of num_bytes for the rows of `engram_write`, in the host's memory; a multiple of 2 MiB.
        num_max_tokens_per_rank: the default of a dispatch's argument of the same name; the same on all ranks.
        hidden, num_topk, use_fp8_dispatch: the arguments of `get_buffer_size_hint` if num_bytes is None.
        deterministic: without effect: the order of rows is always deterministic.
        allow_hybrid_mode: if True, each node is one scaleout rank; if False, all ranks are scaleup ranks.
            allow_hybrid_mode changes only attributes, not how rows are sent.
        allow_multiple_reduction: whether, in a combine with do_expand on one node, each rank first sums its rows of the
            same token, which sends less data but rounds twice. Across nodes, this argument must be True.
        prefer_overlap_with_compute: whether calls without num_sms use 24 multiprocessors instead of 64.
        sl_idx, num_allocated_qps: without effect.
        num_cpu_timeout_secs, num_gpu_timeout_secs: the time-out of every wait is the largest of the two arguments, 100
            s and PROXYCCL_TIMEOUT. If the group is a `Communicator`, its time-out is used instead.
        explicitly_destroy: whether the caller calls `destroy`; if False, the memory lives until the process ends.

    Attributes:
        rank_idx, num_ranks: this rank's number, and the number of ranks.
        num_rdma_ranks, num_nvlink_ranks: the number of nodes, and the number of ranks on each node.
        num_scaleout_ranks, num_scaleup_ranks: the number of scaleout ranks, and the number of scaleup ranks; see
            allow_hybrid_mode.
        scaleout_rank_idx, scaleup_rank_idx: this rank's number among the scaleout and among the scaleup ranks.
        communicator: the communicator of the ranks, for calls that DeepEP lacks.

    The other attributes are the arguments of the same names.

    Raises:
        ArgumentError: the group is None, or a number is out of range.
        NotImplementedError: allow_multiple_reduction is False, and the ranks are on several nodes.
        CommunicatorError: a peer failed or did not arrive; see its subclasses.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **others: Any,
    ) -> None:
        refuse_unknown("ElasticBuffer", others)
        if group is None:
            raise ArgumentError("group", "must be a process group, not None")
        if num_bytes is not None:
            num_bytes = whole_number("num_bytes", num_bytes, 0, MOST_BYTES)
        num_cpu_bytes = whole_number("num_cpu_bytes", num_cpu_bytes, 0, MOST_BYTES)
        if num_cpu_bytes % ELASTIC_ALIGNMENT or num_cpu_bytes > (num_bytes or 0):
            raise ArgumentError(
                "num_cpu_bytes", f"is {num_cpu_bytes}; expected a multiple of {ELASTIC_ALIGNMENT} up to num_bytes"
            )
        num_max_tokens_per_rank = whole_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        hidden, num_topk = whole_number("hidden", hidden, 0), whole_number("num_topk", num_topk, 0)
        whole_number("sl_idx", sl_idx, 0)
        num_allocated_qps = whole_number("num_allocated_qps", num_allocated_qps, 0)
        use_fp8_dispatch = as_flag(use_fp8_dispatch, "use_fp8_dispatch")
        allow_hybrid_mode = as_flag(allow_hybrid_mode, "allow_hybrid_mode")
        allow_multiple_reduction = as_flag(allow_multiple_reduction, "allow_multiple_reduction")
        timeout = max(
            LEAST_TIMEOUT_SECONDS,
            require_seconds("num_cpu_timeout_secs", num_cpu_timeout_secs),
            require_seconds("num_gpu_timeout_secs", num_gpu_timeout_secs),
        )
        super().__init__(group, explicitly_destroy=explicitly_destroy, timeout=timeout)
        self.rank_idx, self.num_ranks = self._rank_and_ranks
        self.num_nvlink_ranks = self.communicator.local_world_size
        self.num_rdma_ranks = self.num_ranks // self.num_nvlink_ranks
        if self.num_rdma_ranks > 1 and not allow_multiple_reduction:
            raise refuse("allow_multiple_reduction=False across nodes", "each node rounds the sum that it sends")
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.deterministic, self.prefer_overlap_with_compute = deterministic, prefer_overlap_with_compute
        self.num_allocated_qps, self.num_max_tokens_per_rank = num_allocated_qps, num_max_tokens_per_rank
        self.num_scaleout_ranks = self.num_rdma_ranks if allow_hybrid_mode else 1
        self.num_scaleup_ranks = self.num_ranks // self.num_scaleout_ranks
        self.scaleout_rank_idx = self.rank_idx // self.num_scaleup_ranks
        self.scaleup_rank_idx = self.rank_idx % self.num_scaleup_ranks
        if num_bytes is None:
            num_bytes = elastic_size_hint(
                self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, float8=use_fp8_dispatch
            )
        self.num_bytes, self.num_cpu_bytes = num_bytes, num_cpu_bytes

    # -- queries ---

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the size of a buffer for these arguments, in bytes: a multiple of 2 MiB, which callers compare with
        `num_bytes`.
        """
        float8 = as_flag(use_fp8_dispatch, "use_fp8_dispatch")
        return elastic_size_hint(size_of(group), num_max_tokens_per_rank, hidden, num_topk, float8=float8)

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event that follows all work queued on the current stream so far."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns (number of nodes, number of ranks on each node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns (number of scaleout ranks, number of scaleup ranks)."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns the largest number of multiprocessors that a kernel takes in calls without num_sms. The arguments are
        ignored.
        """
        return _SMS_BESIDE_OTHERS if self.prefer_overlap_with_compute else _SMS_ALONE

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0, because the buffer's proxies have their own queue pairs."""
        return 0

    def destroy(self) -> None:
        """See `Connected.destroy`."""
        failure = self.communicator.group.failure
        usable = failure.usable and not failure.suspended  # otherwise a barrier would raise an error
        if self.explicitly_destroy and self._layers is not None and usable:
            self.barrier(with_cpu_sync=True)
        super().destroy()

    def _close_parts(self) -> None:
        with contextlib.ExitStack() as parts:  # each part is released, even if another raises an error
            parts.callback(super()._close_parts)
            parts.callback(self._close_engram)
            parts.callback(self._close_sessions)
            parts.callback(self._close_pipeline)

    # -- mixtures of experts ---

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        **others: Any,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        Args:
            x: [T, hidden] of bfloat16 (or float16, float32, float64); or a pair of float8_e4m3fn rows and their scales,
                [T, n] of float32, or of int32 for packed exponents, with any strides.
            topk_idx: int64 or int32 [T, topk]: the experts of each token; -1 in a slot without an expert; None if
                `handle` is given.
            topk_weights: float32 [T, topk], or None. Either all ranks pass weights, or no rank does.
            cumulative_local_expert_recv_stats: int32 [experts of this rank], to which the number of each expert's rows
                is added; or None.
            num_experts: the number of experts of all ranks together.
            num_max_tokens_per_rank: the largest number of tokens of one rank; None for the buffer's number. All ranks
                pass the same number.
            expert_alignment: the handle's number of rows of each expert is rounded up to a multiple of this number;
                with do_expand, each expert's rows also begin at a multiple of this number. None means 1.
            num_sms: the largest number of multiprocessors of a kernel; 0 for `get_theoretical_num_sms`.
            num_qps: ignored.
            previous_event, async_with_compute_stream, allocate_on_comm_stream: like previous_event, async_finish and
                allocate_on_comm_stream of `Buffer.get_dispatch_layout`.
            previous_event_before_epilogue: a second event that the call waits for when it starts.
            handle: the handle of an earlier dispatch, whose routing is reused. If `handle` is given, num_experts,
                num_max_tokens_per_rank and expert_alignment may be omitted.
            do_handle_copy: whether the handle keeps a copy of topk_idx.
            do_cpu_sync: whether the CPU waits for the number of received rows, so that outputs have the exact size;
                None means True. If do_cpu_sync is False, outputs have room for the largest possible number of rows.
                With a handle, outputs have the sizes of the handle's dispatch.
            do_expand: whether the output has a row for each pair of a token and one of its experts on this rank,
                ordered by expert.
            do_zero_padding: with do_expand, whether the rows without a token are set to zero.
            use_tma_aligned_col_major_sf: whether scales are returned in columns: the scales of consecutive rows are
                adjacent in memory, and each column begins at a multiple of 16 bytes.

        Returns:
            A tuple of five. recv_x: the received rows, of the type of x, ordered by source rank and token; with
            do_expand ordered by expert, then source rank and token, with gaps up to the alignment. recv_topk_idx: the
            experts' numbers on this rank, or -1 for experts of other ranks; None with do_expand. recv_topk_weights:
            [rows, topk], in which received rows have 0 where recv_topk_idx is -1; with do_expand [rows]; None without
            topk_weights. The handle, which is the argument `handle` if that was given. The event, which is empty
            without async_with_compute_stream.

        Raises:
            ArgumentError: an argument is wrong; an expert id is out of range on any rank.
            CapacityError: a rank has more than num_max_tokens_per_rank tokens. With do_cpu_sync=False, that rank alone
                raises an error, an ArgumentError.
            MismatchError: another rank makes a different call.
            NotImplementedError: do_expand differs from the do_expand of the handle's dispatch.
            CommunicatorError: a peer failed; see its subclasses.
        """
        refuse_unknown("dispatch", others)
        layers = self._usable()
        do_expand, do_zero_padding = as_flag(do_expand, "do_expand"), as_flag(do_zero_padding, "do_zero_padding")
        do_handle_copy = as_flag(do_handle_copy, "do_handle_copy")
        by_columns = as_flag(use_tma_aligned_col_major_sf, "use_tma_aligned_col_major_sf")
        if do_cpu_sync is not None:
            do_cpu_sync = as_flag(do_cpu_sync, "do_cpu_sync")
        if do_zero_padding and not do_expand:
            raise ArgumentError("do_zero_padding", "needs do_expand=True")
        if handle is not None:
            self._require_current(handle)
            experts = handle.num_experts
            if topk_idx is not None:
                raise ArgumentError("topk_idx", "can't be given with a handle, which has the routing")
            if do_cpu_sync:
                raise ArgumentError("do_cpu_sync", "can't be True with a handle, which has the sizes")
            sizes = {"num_experts": num_experts, "num_max_tokens_per_rank": num_max_tokens_per_rank}
            elastic_calls.require_like(handle, **sizes, expert_alignment=expert_alignment, do_expand=do_expand)
            receive = functools.partial(elastic_calls.repeat, x, topk_weights, handle)
        elif topk_idx is None:
            raise ArgumentError("topk_idx", "must be given without a handle")
        else:
            experts = whole_number("num_experts", num_experts, 1)
            require_ids(topk_idx)
            if num_max_tokens_per_rank is None:
                num_max_tokens_per_rank = self.num_max_tokens_per_rank
            alignment = 1 if expert_alignment is None else expert_alignment
            options = Options(
                experts,
                whole_number("expert_alignment", alignment, 1),
                whole_number("num_sms", num_sms, 0) or self.get_theoretical_num_sms(experts, topk_idx.shape[-1]),
                whole_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
                self.num_ranks,
                self.num_scaleup_ranks,
                waits=do_cpu_sync is not False,
                do_expand=do_expand,
                sums_rows=self.allow_multiple_reduction,
                copies_ids=do_handle_copy,
            )
            receive = functools.partial(elastic_calls.dispatch, layers, x, topk_idx, topk_weights, options)

        require_stats(cumulative_local_expert_recv_stats, experts // self.num_ranks)

        def call() -> elastic_calls.Received:
            received = receive(clears_gaps=do_zero_padding, scales_by_columns=by_columns)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(received[3].num_unaligned_recv_tokens_per_expert)
            return received

        events = previous_event, previous_event_before_epilogue
        used = x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, handle
        received, event = self._run(call, events, used, ELASTIC, apart=async_with_compute_stream)
        return *received, event

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends rows back and sums each token's rows, in float32.

        Args:
            x: bfloat16 [rows, hidden], in the order of the dispatch's output and with the same number of rows.
            handle: the handle of that dispatch.
            topk_weights: float32 [rows, topk], or [rows] with do_expand; or None. Either all ranks pass weights, or no
                rank does. The rows are not multiplied by the weights.
            bias: one or two tensors [T, hidden], which are added to the sums before rounding; or None.
            num_sms, num_qps: ignored: a combine uses as many multiprocessors as its dispatch.
            previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream: as for
                `dispatch`.

        Returns:
            A tuple of: the sums, [T, hidden]; for each slot the weight that its expert's rank passed, float32 [T,
            topk], with 0 in slots without an expert, or None without topk_weights; and the event. Raises the errors of
            `dispatch`.
        """
        refuse_unknown("combine", others)
        self._require_current(handle)
        events, used = (previous_event, previous_event_before_epilogue), (x, topk_weights, bias, handle)
        call = lambda: elastic_calls.combine(x, handle, topk_weights, bias)  # noqa: E731
        combined, event = self._run(call, events, used, ELASTIC, apart=async_with_compute_stream)
        return *combined, event

    def _require_current(self, handle: Any, *layouts: str) -> Routing:
        if not isinstance(handle, EPHandle):
            raise ArgumentError("handle", f"must be a handle that dispatch returned, not {type(handle).__name__}")
        return super()._require_current(handle, *layouts)
