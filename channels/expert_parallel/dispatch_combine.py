"""`DispatchCombine`: MoE dispatch and combine in four steps: prepare, dispatch, the caller's experts, combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.arguments import input_view
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import input_array, whole_number
from proxyccl.channels.expert_parallel.call_form import Arguments
from proxyccl.channels.expert_parallel.config import MAX_EXPERTS, TOKEN_DTYPES
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.members import Members
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import StreamLike

_ARGUMENTS = Arguments("tokens", "expert_ids", "weights", "x", "rows", spare_rows=True)


@dataclass(frozen=True)
class _Prepared:
    tokens: Any
    desc: EPAllToAllLayoutDesc
    counts: NDArray[np.int64]  # [world_size, experts]: rows that each rank sends to each expert
    per_expert: NDArray[np.int64]  # [experts_per_rank]: rows of each of this rank's experts
    row_weights: Any  # float32 [R], if weights were given


class DispatchCombine:
    """Routes tokens to experts that are spread over ranks, and combines the experts' results.

    Rank r holds the experts r * experts_per_rank to (r + 1) * experts_per_rank - 1. All ranks construct the object
    together and make the same calls in the same order; their numbers of tokens may differ. Rows move as in
    `EPAll2AllLayer`.

    The flow is `prepare`, `dispatch`, the caller's experts, `combine`::

        moe = proxyccl.DispatchCombine(group, hidden=64, max_tokens=256, experts_per_rank=2, topk=2)
        moe.prepare(tokens, expert_ids, weights)    # [T, 64], [T, 2], [T, 2]
        rows, counts = moe.dispatch()               # [R, 64], ordered by local expert; rows of each expert
        results = np.concatenate([
            expert(part) for expert, part in zip(experts, np.split(rows, np.cumsum(counts)[:-1]))
        ])
        output = moe.combine(results)               # [T, 64]: the weighted sum of each token's results

    Dispatch and combine are adjoint, so the same routing carries the gradients back. If dy, [T, hidden], is the
    gradient of the output, ``dispatch(dy, weighted=True)`` returns the gradient of the experts' results. If dx is the
    gradient of the experts' inputs, ``combine(dx, weighted=False)`` returns the gradient of the tokens. The gradient of
    the weights is ``collect((results * moe.dispatch(dy)[0]).sum(-1))``.

    Args:
        communicator: the ranks.
        hidden: number of elements of a row.
        max_tokens: maximum number of tokens of one rank in one `prepare`.
        experts_per_rank: number of experts of each rank.
        topk: number of experts that each token chooses.
        dtype: the type of tokens and rows: "float32", "float64", "float16" or "bfloat16".
        algorithm: "proxy" to move all data through the proxy. None to use mapped memory, and the proxy only for peers
            whose memory is not mapped.
        num_sm: maximum number of blocks of a kernel.

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
        num_sm: int = 20,
    ) -> None:
        communicator.group.failure.require_usable()
        element = as_dtype(dtype)
        if element.name not in TOKEN_DTYPES:
            raise ArgumentError("dtype", f"must be one of {', '.join(TOKEN_DTYPES)}, not {element}")
        if algorithm not in (None, "proxy"):
            raise ArgumentError("algorithm", f"must be None or 'proxy', not {algorithm!r}")
        most = MAX_EXPERTS // communicator.world_size
        experts_per_rank = whole_number("experts_per_rank", experts_per_rank, 1, most)
        options = LayerOptions(
            max_tokens,
            hidden,
            topk,
            communicator.rank,
            experts_per_rank * communicator.world_size,
            communicator.local_world_size,
            communicator.world_size,
            dtype=element,
            num_sm=num_sm,
            proxied=algorithm == "proxy",
        )
        config = options.config
        others = {"experts_per_rank": experts_per_rank, "algorithm": algorithm, "num_sm": options.num_sm}
        compared = others | config.compared({"token_dtype": "dtype"})
        described = f"a DispatchCombine ({config.describe()})", compared, _ARGUMENTS
        layer = EPAll2AllLayer._on(Members(communicator), options, *described)
        self._ctx, self._forms = layer.ctx, layer.forms
        self.hidden, self.max_tokens, self.topk = config.hidden, config.max_tokens, config.topk
        self.experts_per_rank = experts_per_rank
        self.dtype = element
        self._prepared: _Prepared | None = None

    def __repr__(self) -> str:
        return (
            f"<DispatchCombine of {self.num_experts} experts on {self._ctx.ep_config.world_size} ranks, "
            f"top {self.topk}, {self.hidden} x {self.dtype}>"
        )

    @property
    def num_experts(self) -> int:
        """The number of experts of all ranks. As an expert id, this number drops the slot."""
        return self._ctx.ep_config.num_experts

    @property
    def rows_sent(self) -> NDArray[np.int64]:
        """[world_size]: entry r is the number of this rank's slots that chose an expert of rank r."""
        own = self._require_prepared().counts[self._ctx.ep_config.rank]
        rows: NDArray[np.int64] = own.reshape(-1, self.experts_per_rank).sum(axis=1)
        return rows

    def prepare(
        self, tokens: Any, expert_ids: Any, weights: Any = None, *, stream: StreamLike = None
    ) -> NDArray[np.int64]:
        """Exchanges the routing. The call returns as soon as the numbers of rows of all ranks are known.

        The tokens must not change before `dispatch`, which reads them.

        Args:
            tokens: [T, hidden] of `dtype`; T from 0 to max_tokens, and may differ between ranks.
            expert_ids: int32 [T, topk]: the experts of each token. The id `num_experts` drops the slot: nothing is
                sent for it, and it adds zero.
            weights: float32 [T, topk]: the weight of each expert's result; None for 1. Either all ranks pass weights,
                or none.
            stream: where to queue the work; None for the default stream.

        Returns:
            [experts_per_rank]: the number of rows of each of this rank's experts. The sum of these numbers is R.

        Raises:
            ArgumentError: an argument is wrong on this rank; or an expert id of any rank is out of range, in which case
                all ranks raise the error, and the communicator stays usable.
            MismatchError: another rank makes a different call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._prepared = None
        ctx, group = self._ctx, self._ctx.group
        stream = ctx.stream_for(stream, tokens)
        _, row_weights, desc = self._forms.prepares.call(tokens, expert_ids, weights, None, stream)
        counts = ctx.arrays.download(desc.counts, "counts").astype(np.int64)
        first = group.rank * self.experts_per_rank
        per_expert: NDArray[np.int64] = counts[:, first : first + self.experts_per_rank].sum(axis=0)
        self._prepared = _Prepared(tokens, desc, counts, per_expert, row_weights)
        return per_expert.copy()

    def dispatch(
        self, x: Any = None, *, weighted: bool = False, out: Any = None, stream: StreamLike = None
    ) -> tuple[Any, NDArray[np.int64]]:
        """Sends each token's row to the token's experts: one row for each slot that is not dropped.

        Args:
            x: [T, hidden] of `dtype`: the rows to send by the prepared routing; None for the prepared tokens.
            weighted: multiply each row by its slot's weight, rounded once to `dtype`.
            out: at least R rows of `hidden`, of which the first R are written; None for a new array of R rows.
            stream: where to queue the call. None is the default stream on a GPU; on the host runtime, None makes the
                call wait until it is complete.

        Returns:
            The rows, ordered by local expert, then source rank, then token and k; and the number of rows of each
            local expert, [experts_per_rank].

        Raises:
            ArgumentError: an argument is wrong on this rank, or nothing was prepared. The call had no effect.
            MismatchError: another rank makes a different call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        prepared, group, weighted = self._require_prepared(), self._ctx.group, as_flag(weighted, "weighted")
        stream = self._ctx.stream_for(stream, prepared.tokens if x is None else x)
        rows = self._forms.redispatches.call(prepared.tokens if x is None else x, prepared.desc, stream, out)
        if weighted and prepared.row_weights is not None:
            target = input_view(group, rows, "out")
            target = replace(target, shape=(prepared.desc.rows, self.hidden))
            self._ctx.weigh(target, input_view(group, prepared.row_weights, "weights"), stream)
        return rows, prepared.per_expert.copy()

    def combine(self, rows: Any, *, weighted: bool = True, out: Any = None, stream: StreamLike = None) -> Any:
        """Sends the experts' rows back, and sums the rows of each token.

        The rows of a token are added in the order of k, in float32 (float64 rows in float64), and the sum is rounded
        once. Between nodes, each node's partial sum is also rounded.

        Args:
            rows: [R, hidden] of `dtype`, in the order of `dispatch`; further rows are ignored.
            weighted: multiply each row by its slot's weight.
            out: [T, hidden]; None for a new array.
            stream: as for `dispatch`.

        Returns:
            `out`, or the new array. Raises the errors of `dispatch`.
        """
        prepared, weighted = self._require_prepared(), as_flag(weighted, "weighted")
        factors = prepared.row_weights if weighted else None
        stream = self._ctx.stream_for(stream, rows)
        return self._forms.combines.call(rows, factors, None, None, (), prepared.desc, out, stream)

    def collect(self, values: Any, *, stream: StreamLike = None) -> Any:
        """Sends each row's value back to the row's slot on the token's rank.

        Args:
            values: [R] of float32 or `dtype`: a value for each row, in the order of `dispatch`.
            stream: as for `dispatch`.

        Returns:
            [T, topk] of the type of `values`; zero for dropped slots. Raises the errors of `dispatch`.
        """
        prepared, group = self._require_prepared(), self._ctx.group
        name = input_view(group, values, "values").dtype.name
        dtype = name if name in self._ctx.combines else self._ctx.ep_config.weight.name
        view = input_array(group, values, "values", (prepared.desc.rows,), dtype)
        return self._forms.collect(view, prepared.desc, self._ctx.stream_for(stream, values))

    def _require_prepared(self) -> _Prepared:
        self._ctx.require_usable()
        if self._prepared is None:
            raise ArgumentError("prepare", "has not been called; call it first")
        return self._prepared
