"""The common part of a layer's calls: its launches and options, the arrays that its calls take, and the errors that are
known only when rows were counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyccl.channels.calls.launches import CurrentStream
from proxyccl.channels.expert_parallel.arguments import input_array
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8, LayerOptions
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError
from proxyccl.device.runtime import StreamLike


@dataclass(frozen=True)
class Arguments:
    """The names of a flow's arguments in its errors.

    Attributes:
        tokens, ids, weight: of a dispatch.
        values: of other values of the same tokens.
        rows: of a combine.
        spare_rows: whether a combine ignores further rows.
    """

    tokens: str = "input"
    ids: str = "exp_indices"
    weight: str = "weight"
    values: str = "input"
    rows: str = "input"
    spare_rows: bool = False


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer.

    Attributes:
        ctx: the buffers and launches.
        options: of the layer.
        arguments: of its calls.
    """

    ctx: DispatchCombineContext
    options: LayerOptions
    arguments: Arguments = Arguments()

    def leading(self, rows: int) -> tuple[int, ...]:
        """The shape of that many rows without their elements."""
        padded = self.options.padded_rows
        return (self.options.config.num_experts_per_rank, padded) if padded else (rows,)

    def given_rows(self, input: Any, count: int, argument: str) -> tuple[ArrayView, ArrayView | None]:
        """Views of a caller's tokens and, of a pair, of their scales. -1 for any number of tokens."""
        options, group = self.options, self.ctx.group
        config = options.config
        if not isinstance(input, tuple):
            return input_array(group, input, argument, (count, config.hidden), config.token.name), None
        if not options.quantized or len(input) != 2:
            raise ArgumentError(argument, "a pair of rows and scales needs a layer with dispatch_dtype")
        rows = input_array(group, input[0], argument, (count, config.hidden), FLOAT8)
        shape = (rows.shape[0], options.scales)
        return rows, input_array(group, input[1], argument, shape, "float32")

    def own_desc(self, desc: Any) -> EPAllToAllLayoutDesc:
        """A caller's descriptor. Raises ArgumentError unless it is of a dispatch of this layer that was received."""
        self.ctx.require_usable()
        if not isinstance(desc, EPAllToAllLayoutDesc):
            raise ArgumentError(
                "ep_a2a_layout_desc", f"must be the descriptor that a dispatch gave, not {type(desc).__name__}"
            )
        desc.require_received(self.ctx, "ep_a2a_layout_desc")
        if self.options.padded_rows and desc.rows != self.options.fixed_rows:
            raise ArgumentError(
                "ep_a2a_layout_desc",
                f"has {desc.rows} padded rows, and this layer {self.options.fixed_rows}; see narrowed",
            )
        return desc

    def is_capturing(self, stream: StreamLike) -> bool:
        """Whether a stream is being captured in a graph."""
        runtime = self.ctx.group.runtime
        if runtime.name == "host":
            return False
        return runtime.is_capturing(stream if type(stream) is CurrentStream else runtime.stream_handle(stream))

    def outlives_no_graph(self, stream: StreamLike) -> bool:
        """Whether what a call makes on a stream is needed no longer than its arrays: a graph needs it longer."""
        return not self.options.keeps_outputs or not self.is_capturing(stream)

    def refuse_capture(self, stream: StreamLike) -> None:
        """Raises ArgumentError if a call would wait for its number of rows on a stream that is being captured."""
        if self.options.fixed_rows is None and self.is_capturing(stream):
            raise ArgumentError(
                "max_recv_tokens",
                "is needed to capture a dispatch in a graph, which can't wait for its size",
            )

    def learn_counts(self, desc: EPAllToAllLayoutDesc) -> ProxyCCLError | None:
        """Reads how many rows chose each expert, when `await_rows` has returned. Returns the error with which all ranks
        refuse the call, if there is one.
        """
        ctx, options = self.ctx, self.options
        if options.by_rank or options.expert_alignment:
            desc.chosen_rows = ctx.workspace.chosen_rows
        wanted, bad = ctx.wanted_tokens, ctx.bad_expert(self.arguments.ids, options.all_experts)
        if wanted:
            return CapacityError(f"a rank dispatches {wanted} tokens; max_tokens is {options.most_of_call}", wanted)
        return bad

    def refuse_bad(self, desc: EPAllToAllLayoutDesc) -> None:
        """Raises the error of `learn_counts`, if there is one, for a call that all ranks give up although its rows are
        on their way.
        """
        bad = self.learn_counts(desc)
        if bad is not None:
            desc.rows = 0
            desc.mark_received(refused=True)
            raise bad

    def check_ended(self) -> None:
        """See `EPAll2AllLayer.check`."""
        ctx, options = self.ctx, self.options
        most, bad = ctx.most_rows(), ctx.bad_expert(self.arguments.ids, options.all_experts)
        if ctx.bad_indices():
            raise ArgumentError(
                "full_scatter_indices", "must be a permutation of this rank's rows, for the tokens of all ranks"
            )
        if options.fixed_rows is None:
            return
        if bad is not None:
            raise bad
        if options.padded_rows and most > options.padded_rows:
            raise CapacityError(
                f"an expert received {most} rows, as tokens chose it more than once; those beyond its room of "
                f"{options.padded_rows} rows were left out",
                most,
            )
        if not options.padded_rows and most > options.fixed_rows:
            raise CapacityError(
                f"a rank received {most} rows; those beyond max_recv_tokens, {options.fixed_rows}, were left out", most
            )

    def check_waited(self, stream: StreamLike) -> None:
        """Makes `check_ended` if a call with this stream has waited for its end, as those without a stream do on the
        host runtime.
        """
        if stream is None and self.ctx.runtime_name == "host":
            self.check_ended()

    @property
    def sums_on_own_node(self) -> bool:
        """Whether a token's rows are all summed by its own rank."""
        experts = self.ctx.workspace.experts
        return experts.nodes == 1 and not experts.local_combine

    @property
    def sums_ranks_in_turn(self) -> bool:
        """Whether a token's rank sums one row, or one sum, of each rank, and knows ranks by the caller's ids."""
        experts = self.ctx.workspace.experts
        by_rank = experts.local_combine or self.options.by_rank
        return bool(experts.nodes == 1 and by_rank and self.ctx.surviving is None)
