"""MoE dispatch and combine: tokens travel to the ranks of their experts, and what the experts made of them comes back.

It knows routing and not models: experts are rows of an array, and whatever runs between dispatch and combine is the
caller's. Its tables are described in device/kernels/routing.h.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.collectives.operations import encode_call
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays import Array, ArrayView
from proxyccl.device.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.device.runtime import StreamLike

DTYPES = ("float32", "float64", "float16", "bfloat16")
_FILE = "dispatch_combine.h"
_MAX_ROWS = 2**31 - 1  # rows and slots are 32-bit numbers in the tables


@dataclass(frozen=True)
class _Prepared:
    """One routing: what `prepare` was given, and what it found out.

    Attributes:
        counts: int64 [world_size, experts]: rows of each rank for each expert.
        per_expert: int64 [experts_per_rank]: rows of each of this rank's experts.
    """

    tokens: ArrayView
    expert_ids: ArrayView
    weights: ArrayView | None
    counts: NDArray[np.int64]
    per_expert: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return int(self.per_expert.sum())


class DispatchCombine:
    """Routes tokens to experts that are spread over ranks, and combines what comes back.

    Rank r holds the experts r * experts_per_rank to (r + 1) * experts_per_rank - 1. All ranks construct the object
    together and make the same calls in the same order; their numbers of tokens may differ.

    The flow is `prepare`, `dispatch`, the caller's experts, `combine`::

        moe = proxyccl.DispatchCombine(comm, hidden=64, max_tokens=256, experts_per_rank=2, topk=2)
        moe.prepare(tokens, expert_ids, weights)    # [T, 64], [T, 2], [T, 2]
        rows, counts = moe.dispatch()               # [R, 64], ordered by local expert; rows of each expert
        results = np.concatenate([
            expert(part) for expert, part in zip(experts, np.split(rows, np.cumsum(counts)[:-1]))
        ])
        output = moe.combine(results)               # [T, 64]: the weighted sum of each token's results

    Dispatch and combine are adjoint, so the same routing carries the gradients back. With dy of shape [T, hidden]
    for the output, ``dispatch(dy, weighted=True)`` gives the gradient of the experts' results, and
    ``combine(dx, weighted=False)`` takes that of the experts' inputs to the tokens. The gradient of the weights is
    ``(slots * dy[:, None]).sum(-1)``, with the array `slots` of the forward `combine`.

    Args:
        communicator: the ranks.
        hidden: elements of a row.
        max_tokens: the most tokens of one rank in one `prepare`.
        experts_per_rank: experts of each rank.
        topk: experts that each token chooses.
        dtype: "float32", "float64", "float16" or "bfloat16", of tokens and rows.
        algorithm: None, or "proxy" to move all data through the proxy. Without it data takes the links of the
            topology: mapped memory, and the proxy where there is none.

    Raises:
        ArgumentError: an argument is wrong, or differs between ranks.
        ResourceError: no memory or channel ids are left.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        hidden: int,
        max_tokens: int,
        experts_per_rank: int,
        topk: int,
        dtype: Any = "float32",
        algorithm: str | None = None,
    ) -> None:
        communicator.require_usable()
        element = as_dtype(dtype)
        if element.name not in DTYPES:
            raise ArgumentError("dtype", f"{element} is none of {', '.join(DTYPES)}")
        if algorithm not in (None, "proxy"):
            raise ArgumentError("algorithm", f"{algorithm!r} is neither None nor 'proxy'")
        numbers = {"hidden": hidden, "max_tokens": max_tokens, "experts_per_rank": experts_per_rank, "topk": topk}
        for argument, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(argument, f"must be a positive integer, not {value!r}")
        ranks = communicator.world_size
        if ranks * max_tokens * topk > _MAX_ROWS:
            raise ArgumentError(
                "max_tokens", f"{max_tokens} tokens of {topk} experts on {ranks} ranks are more than {_MAX_ROWS} rows"
            )
        _agree(communicator, {**numbers, "dtype": element.name, "algorithm": algorithm})

        self._comm = communicator
        self.hidden, self.max_tokens, self.experts_per_rank, self.topk = hidden, max_tokens, experts_per_rank, topk
        self.dtype = element
        self._algorithm = algorithm
        self._prepared: _Prepared | None = None
        self._returned: Array | None = None
        self._team = communicator.collectives.team(proxied=algorithm == "proxy")
        shipped = communicator.runtime.shipped
        self._route, self._collect = shipped(_FILE, "expert_route"), shipped(_FILE, "expert_collect")
        self._dispatch = shipped(_FILE, "expert_dispatch", element.name)
        self._combine = shipped(_FILE, "expert_combine", element.name)
        self._allocate_tables()

    def _allocate_tables(self) -> None:
        comm, experts, slots = self._comm, self.num_experts, self.max_tokens * self.topk
        routing = ffi.new("ProxycclRouting *")
        routing.experts_per_rank, routing.topk = self.experts_per_rank, self.topk
        shapes: dict[str, tuple[int, ...]] = {
            "counts": (comm.world_size, experts + 1),
            "departures": (experts + 1,),
            "slots": (slots,),
            "positions": (slots,),
            "arrivals": (experts + 1,),
            "groups": (experts + 1,),
            "rows": (comm.world_size * slots,),
            "tally": (self._team.threads, experts),
        }
        # One allocation for all tables; each starts on a line of its own.
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-4 * math.prod(shape) // 128) * 128
        self._tables = comm.empty(end, "uint8")
        for name, offset in offsets.items():
            setattr(routing, name, ffi.cast("uint32_t *", self._tables.ptr + offset))
        self._counts_pointer, self._counts_shape = self._tables.ptr + offsets["counts"], shapes["counts"]
        raw = np.frombuffer(ffi.buffer(routing), np.uint8)
        self._routing = comm.empty(raw.size, "uint8").upload(raw)

    def __repr__(self) -> str:
        return (
            f"<DispatchCombine of {self.num_experts} experts on {self._comm.world_size} ranks, top {self.topk}, "
            f"{self.hidden} x {self.dtype}>"
        )

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks; as an expert id, it drops a slot."""
        return self._comm.world_size * self.experts_per_rank

    @property
    def rows_sent(self) -> NDArray[np.int64]:
        """[world_size]: rows that `dispatch` sends from this rank to each rank, itself included."""
        own = self._require_prepared().counts[self._comm.rank]
        rows: NDArray[np.int64] = own.reshape(-1, self.experts_per_rank).sum(axis=1)
        return rows

    def prepare(
        self, tokens: Any, expert_ids: Any, weights: Any = None, *, stream: StreamLike = None
    ) -> NDArray[np.int64]:
        """Exchanges the routing, and returns when it is known how many rows every rank gets.

        The arrays are read again by `dispatch` and `combine`: leave them unchanged until then.

        Args:
            tokens: [T, hidden] of `dtype`; T from 0 to max_tokens, and may differ between ranks.
            expert_ids: int32 [T, topk]: the experts of each token. The id `num_experts` drops the slot: nothing is
                sent for it, and it adds nothing.
            weights: float32 [T, topk]: the weight of each expert's result; None for 1.
            stream: where to queue the work; None for the default stream.

        Returns:
            [experts_per_rank]: rows that each of this rank's experts gets. Their sum is R.

        Raises:
            ArgumentError: an argument is wrong on this rank; or an expert id of any rank is out of range, which is
                raised on all ranks and leaves the communicator usable.
            MismatchError: another rank makes another call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._prepared = None
        comm = self._comm
        view = self._input(tokens, "tokens", (-1, self.hidden), self.dtype.name)
        count = view.shape[0]
        if count > self.max_tokens:
            raise ArgumentError("tokens", f"{count} tokens are more than max_tokens, {self.max_tokens}")
        ids = self._input(expert_ids, "expert_ids", (count, self.topk), "int32")
        scales = None if weights is None else self._input(weights, "weights", (count, self.topk), "float32")

        stream = comm.stream_for(stream, tokens)
        handle = comm.runtime.stream_handle(stream)
        self._agree("prepare")
        launch = self._route.prepare(
            1, self._team.threads, self._team.device_pointer, self._routing, ids.ptr, count * self.topk
        )
        comm.launch(launch, stream, (ids.owner,))
        event = comm.runtime.create_event()
        event.record(handle)
        event.synchronize()
        comm.check()  # a wait that was given up has left counts that are none
        table = np.empty(self._counts_shape, np.uint32)
        comm.runtime.copy(table.ctypes.data, self._counts_pointer, table.nbytes)
        for rank, slot in enumerate(table[:, -1].tolist()):
            if slot != lib.PROXYCCL_NO_SLOT:
                raise ArgumentError(
                    "expert_ids",
                    f"[{slot // self.topk}, {slot % self.topk}] on rank {rank} is none of the {self.num_experts} "
                    f"experts, nor {self.num_experts}, which drops the slot",
                )
        counts = table[:, :-1].astype(np.int64)
        first = comm.rank * self.experts_per_rank
        per_expert: NDArray[np.int64] = counts[:, first : first + self.experts_per_rank].sum(axis=0)
        self._prepared = _Prepared(view, ids, scales, counts, per_expert)
        return per_expert.copy()

    def dispatch(
        self, x: Any = None, *, weighted: bool = False, out: Any = None, stream: StreamLike = None
    ) -> tuple[Any, NDArray[np.int64]]:
        """Sends each token's row to the ranks of its experts: one row for each slot that is not dropped.

        Args:
            x: [T, hidden] of `dtype`, to send over the routing that was prepared; None for the prepared tokens.
            weighted: multiply each row by its slot's weight, rounded once to `dtype`.
            out: at least R rows of `hidden`, of which the first R are written; None for a new array of R rows.
            stream: where to queue it. With None the call waits on the host runtime, and uses the default stream on a
                GPU.

        Returns:
            The rows, ordered by local expert, then source rank, then token and k; and the number of rows of each
            local expert, [experts_per_rank].

        Raises:
            ArgumentError: an argument is wrong on this rank, or nothing was prepared. Nothing was done.
            MismatchError: another rank makes another call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        prepared, comm = self._require_prepared(), self._comm
        source = prepared.tokens
        if x is not None:
            source = self._input(x, "x", prepared.tokens.shape, self.dtype.name)
        result, target = self._output(out, source, (prepared.rows, self.hidden), spare_rows=True)
        stream = comm.stream_for(stream, source.owner)
        comm.runtime.stream_handle(stream)
        self._agree("dispatch")
        launch = self._dispatch.prepare(
            self._team.blocks,
            self._team.threads,
            self._team.device_pointer,
            self._routing,
            source.ptr,
            prepared.weights.ptr if weighted and prepared.weights is not None else None,
            target.ptr,
            self.hidden,
        )
        comm.launch(launch, stream, (self, source.owner, prepared, target.owner))
        return result, prepared.per_expert.copy()

    def combine(
        self, rows: Any, *, weighted: bool = True, out: Any = None, slots: Any = None, stream: StreamLike = None
    ) -> Any:
        """Sends the experts' rows back, and sums those of each token.

        The sum is made in the order of k, in float32 (float64 for float64), and rounded once.

        Args:
            rows: [R, hidden] of `dtype`, in the order in which `dispatch` gave them; spare rows behind them are
                ignored.
            weighted: multiply each row by its slot's weight.
            out: [T, hidden]; None for a new array.
            slots: [T, topk, hidden] that takes the rows themselves, before weights, zero where a slot was dropped;
                None if they are not wanted.
            stream: as for `dispatch`.

        Returns:
            `out`, or the new array. Raises as `dispatch`.
        """
        prepared, comm = self._require_prepared(), self._comm
        tokens = prepared.tokens.shape[0]
        source = self._input(rows, "rows", (-1, self.hidden), self.dtype.name)
        if source.shape[0] < prepared.rows:
            raise ArgumentError("rows", f"has {source.shape[0]} rows, {prepared.rows} were dispatched to this rank")
        result, target = self._output(out, source, (tokens, self.hidden))
        if slots is None:
            if self._returned is None:
                self._returned = comm.empty((self.max_tokens, self.topk, self.hidden), self.dtype)
            returned = self._returned.view()
        else:
            returned = self._output(slots, source, (tokens, self.topk, self.hidden), argument="slots")[1]
            _refuse_overlap("slots", returned, target)
        stream = comm.stream_for(stream, rows)
        comm.runtime.stream_handle(stream)
        self._agree("combine")
        grid = self._team.blocks, self._team.threads
        collect = self._collect.prepare(
            *grid,
            self._team.device_pointer,
            self._routing,
            source.ptr,
            returned.ptr,
            self.hidden * self.dtype.itemsize,
        )
        scales = prepared.weights.ptr if weighted and prepared.weights is not None else None
        combine = self._combine.prepare(*grid, self._routing, returned.ptr, scales, target.ptr, tokens, self.hidden)

        def plan(handle: StreamLike) -> None:
            if slots is not None and returned.nbytes:
                comm.runtime.fill(returned.ptr, 0, returned.nbytes, handle)
            collect(handle)
            combine(handle)

        comm.launch(plan, stream, (self, source.owner, prepared, target.owner, returned.owner))
        return result

    # -- arguments ---

    def _require_prepared(self) -> _Prepared:
        self._comm.require_usable()
        if self._prepared is None:
            raise ArgumentError("prepare", "no routing: call prepare() first")
        return self._prepared

    def _agree(self, call: str) -> None:
        self._comm.agree(encode_call(call, self.dtype.name, algorithm=self._algorithm, count=self.hidden))

    def _input(self, x: Any, argument: str, shape: tuple[int, ...], dtype: str) -> ArrayView:
        """An argument of this shape, in which -1 stands for any number."""
        view = self._comm.collectives.input(x, argument)
        if view.dtype.name != dtype:
            raise ArgumentError(argument, f"has element type {view.dtype}, {dtype} is wanted")
        if len(view.shape) != len(shape) or any(w not in (-1, n) for n, w in zip(view.shape, shape, strict=True)):
            wanted = ", ".join("any" if n == -1 else str(n) for n in shape)
            raise ArgumentError(argument, f"has shape {view.shape}, ({wanted}) is wanted")
        return view

    def _output(
        self,
        out: Any,
        source: ArrayView,
        shape: tuple[int, ...],
        *,
        argument: str = "out",
        spare_rows: bool = False,
    ) -> tuple[Any, ArrayView]:
        """What the caller gets back, and where it lies: `out`, or a new array."""
        if out is None:
            out = self._comm.collectives.new_like(source, shape)
        view = self._input(out, argument, (-1, *shape[1:]) if spare_rows else shape, self.dtype.name)
        if view.shape[0] < shape[0]:
            raise ArgumentError(argument, f"has {view.shape[0]} rows, {shape[0]} are needed")
        if not view.writable:
            raise ArgumentError(argument, "the array is read-only")
        _refuse_overlap(argument, view, source)
        return out, view


def _agree(communicator: Communicator, arguments: dict[str, Any]) -> None:
    """Refuses arguments that differ between ranks, on all of them and by name."""
    everyone = [json.loads(data) for data in communicator.all_gather_bytes(json.dumps(arguments).encode())]
    for rank, theirs in enumerate(everyone):
        for argument, value in everyone[0].items():
            if theirs[argument] != value:
                raise ArgumentError(
                    argument, f"is {value!r} on rank 0 and {theirs[argument]!r} on rank {rank}; give all ranks the same"
                )


def _refuse_overlap(argument: str, one: ArrayView, other: ArrayView) -> None:
    if one.ptr < other.ptr + other.nbytes and other.ptr < one.ptr + one.nbytes:
        raise ArgumentError(argument, "overlaps another array of the call")
