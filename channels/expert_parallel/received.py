"""The numbers that a rank learns when the rows of a dispatch are counted, and the errors that follow from them."""

from __future__ import annotations

from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError
from proxyccl.device.runtime import StreamLike


def refuse_capture(parts: LayerParts, stream: StreamLike) -> None:
    """Raises ArgumentError if a call would wait for its number of rows on a stream that is being captured."""
    if parts.options.fixed_rows is None and parts.is_capturing(stream):
        raise ArgumentError(
            "max_recv_tokens",
            "is needed to capture a dispatch in a graph, which can't wait for its size",
        )


def learn_counts(parts: LayerParts, desc: EPAllToAllLayoutDesc) -> ProxyCCLError | None:
    """Reads how many rows chose each expert, when `await_rows` has returned. Returns the error with which all ranks
    refuse the call, if there is one.
    """
    ctx, options = parts.ctx, parts.options
    if options.by_rank or options.expert_alignment:
        desc.chosen_rows = ctx.workspace.chosen_rows
    wanted, bad = ctx.wanted_tokens, ctx.bad_expert(parts.arguments.ids, options.all_experts)
    if wanted:
        return CapacityError(f"a rank dispatches {wanted} tokens; max_tokens is {options.most_of_call}", wanted)
    return bad


def refuse_bad(parts: LayerParts, desc: EPAllToAllLayoutDesc) -> None:
    """Raises that error for a call whose rows are on their way already, and which all ranks forget."""
    bad = learn_counts(parts, desc)
    if bad is not None:
        desc.rows = 0
        desc.mark_received(refused=True)
        raise bad


def check_ended(parts: LayerParts) -> None:
    """See `EPAll2AllLayer.check`."""
    ctx, options = parts.ctx, parts.options
    most, bad = ctx.most_rows(), ctx.bad_expert(parts.arguments.ids, options.all_experts)
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


def check_waited(parts: LayerParts, stream: StreamLike) -> None:
    """`check_ended`, if a call on this stream has waited for its end, as on the host runtime those without one do."""
    if stream is None and parts.ctx.runtime_name == "host":
        check_ended(parts)
