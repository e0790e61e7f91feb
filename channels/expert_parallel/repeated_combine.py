"""A combine like one that was made before, whole or in two halves."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arguments import output_array
from proxyccl.channels.expert_parallel.combine_call import NO_SUMS, Sums
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.context import RECEIVE, SEND
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.repeated_call import COPY_LATER, Launchable, RepeatedCall, kind_of, name_of
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


class RepeatedCombine(RepeatedCall):
    """A combine, which one kernel makes, after a copy of rows that peers are to load but can't reach where they lie.

    Args:
        parts: of the layer.
        x, weights, topk_weights, sums: of the earlier call.
        halves: whether it is made in two halves.
    """

    def __init__(self, parts: LayerParts, x: Any, weights: Any, topk_weights: Any, sums: Sums, *, halves: bool) -> None:
        config = parts.options.config
        super().__init__(parts, x, name_of("combine", weights, halves=halves), config.token.name)
        ctx = parts.ctx
        # Peers load rows only in a call that is made at once and without weights of rows.
        loads = not halves and weights is None and not ctx.workspace.experts.local_combine
        self._buffers = ctx.workspace.outputs if loads else None
        self._launch = ctx.combine_launch(config.token.name).copy()
        call = self._call = ffi.cast("ProxycclCombine *", self._launch.packed(1))
        call.hidden = config.hidden
        self._halves, self._layout = halves, ffi.addressof(call, "layout")
        self._after_copy: StreamOperations | None = None
        self._row_bytes, self._hidden, self._topk = config.hidden * config.token.itemsize, config.hidden, config.topk
        self._new, self._token, self._address = ctx.arrays.maker(x, config.token), config.token, ctx.arrays.address
        self._kind = kind_of(x)
        self._weighted, self._slots_weighted = weights is not None, topk_weights is not None
        self._id_bytes = 0
        if sums.order_ids is not None:
            self._id_bytes = input_view(self._group, sums.order_ids, "order_ids").dtype.itemsize

    def start(
        self,
        x: Any,
        desc: EPAllToAllLayoutDesc,
        weights: Any,
        topk_weights: Any,
        out: Any,
        given: StreamLike,
        sums: Sums,
    ) -> SentCombine | None:
        """Makes the call or, of a call in halves, the first half. None, and nothing done, if it does not fit."""
        tokens, rows = desc.num_dispatch_token_cur_rank, desc.rows
        leading = self._parts.leading(rows)
        if not tokens or not rows:
            return None
        nbytes, weights_at, slots_at = rows * self._row_bytes, 0, 0
        at = self._at(x, (*leading, self._hidden), nbytes)
        if self._weighted:
            weights_at = self._at(weights, leading, 4 * rows)
        if self._slots_weighted:
            slots_at = self._at(topk_weights, (tokens, self._topk), 4 * tokens * self._topk)
        if not at or (self._weighted and not weights_at) or (self._slots_weighted and not slots_at):
            return None
        if sums is not NO_SUMS and not self._place_sums(tokens, sums):
            return None
        stream = self._stream(x, given)
        sent = SentCombine(self, desc, stream, x, at, (x, weights, topk_weights, *sums), slots_at)
        target_at = 0
        if not self._halves:
            sent.out, target_at = self.target(sent, out)
            if not target_at:
                return None
        rows_at, buffer, buffers = at, 0, self._buffers
        launchable: Launchable = self._launch
        if desc.output_buffer and buffers is not None:
            buffer = buffers.number_at(at)
            if not buffer and buffers.passing:
                buffer, rows_at = buffers.passing, buffers.address(buffers.passing)
                launchable = self._copying(CopyBytes(rows_at, at, nbytes))
        phases = SEND | RECEIVE
        if self._halves:
            phases, slots_at = SEND, 0  # they belong to the second half
        lib.proxyccl_expert_combine_fill(self._call, phases, tokens, rows_at, buffer, weights_at, slots_at, target_at)
        desc.fill(self._layout)
        self._issue(desc, launchable, stream, (*sent.owners, sent.out))
        return sent

    def _place_sums(self, tokens: int, sums: Sums) -> bool:
        """Fills in how sums begin, and the ids that order them. False if an array does not fit."""
        shape, nbytes, ids_at = (tokens, self._hidden), tokens * self._row_bytes, 0
        begun = [self._at(each, shape, nbytes) for each in sums.added]
        if self._id_bytes:
            ids_at = self._at(sums.order_ids, (tokens, self._topk), tokens * self._topk * self._id_bytes)
        if not all(begun) or bool(ids_at) != bool(self._id_bytes):
            return False
        first, second = [*begun, 0, 0][:MOST_ADDED]
        lib.proxyccl_expert_combine_order(self._call, first, second, ids_at, self._id_bytes)
        return True

    def target(self, sent: SentCombine, out: Any) -> tuple[Any, int]:
        """`out`, or a new array, and its address; 0 if only another check can tell whether it fits."""
        tokens = sent.desc.num_dispatch_token_cur_rank
        shape, nbytes = (tokens, self._hidden), tokens * self._row_bytes
        if out is None:
            out = self._new(shape)
            return out, self._address(out)
        at = self._at(out, shape, nbytes)
        overlaps = at < sent.at + sent.desc.rows * self._row_bytes and sent.at < at + nbytes
        return out, 0 if overlaps else at

    def output(self, sent: SentCombine, out: Any) -> tuple[Any, int]:
        """The same for the second half. Raises ArgumentError if `out` does not fit."""
        if out is None or (kind_of(out) == self._kind and libraries[type(out)].is_torch):
            target, at = self.target(sent, out)
            if at:
                return target, at
        shape = (sent.desc.num_dispatch_token_cur_rank, self._hidden)
        target, view = output_array(self._group, out, input_view(self._group, sent.x, "input"), shape, self._token)
        return target, view.ptr

    def receive(self, sent: SentCombine, output: Any, at: int, stream: StreamLike) -> None:
        """Makes the second half on a stream."""
        call = self._call
        call.phases, call.slot_weights, call.output = (
            RECEIVE,
            ffi.cast("float *", sent.slots_at),
            ffi.cast("char *", at),
        )
        self._issue(sent.desc, self._launch, stream, (*sent.owners, output), compared=False)

    def _copying(self, copied: CopyBytes) -> StreamOperations:
        if self._after_copy is None:
            self._after_copy = StreamOperations(self._group.runtime, [COPY_LATER, self._launch])
        self._after_copy.set_copy(0, copied)
        return self._after_copy


class SentCombine:
    """A repeated combine whose first launch is queued.

    Attributes:
        desc, stream, recorded: as of a `CombineCall`.
        out: the result of a call that is made at once.
        x, at: the caller's rows and their address.
        owners: the arrays that kernels read.
        slots_at: the address of the weights of slots; 0 if there are none.
    """

    __slots__ = ("_call", "at", "desc", "out", "owners", "recorded", "slots_at", "stream", "x")

    def __init__(
        self,
        call: RepeatedCombine,
        desc: EPAllToAllLayoutDesc,
        stream: StreamLike,
        x: Any,
        at: int,
        owners: tuple[object, ...],
        slots_at: int,
    ) -> None:
        self._call, self.desc, self.stream = call, desc, stream
        self.x, self.at, self.owners, self.slots_at = x, at, owners, slots_at
        self.out: Any = None
        self.recorded: tuple[Any, ...] = ()

    def output(self, out: Any) -> tuple[Any, int]:
        """`out`, or a new array, and its address. Raises ArgumentError if it does not fit."""
        return self._call.output(self, out)

    def receive(self, output: Any, target: int, stream: StreamLike) -> Any:
        """Makes the second half on a stream. Returns the output."""
        self._call.receive(self, output, target, stream)
        return output
