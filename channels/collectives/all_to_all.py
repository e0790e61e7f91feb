"""all_to_all: the i-th share of each rank goes to rank i."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import (
    input_view,
    output_view,
    refuse_partial_overlap,
    share_shape,
)
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_plans import Exchange, Transfer
from proxyccl.channels.collectives.moves import run_move
from proxyccl.channels.collectives.plans import call_key
from proxyccl.channels.collectives.request import Request
from proxyccl.device.runtime import StreamLike


def all_to_all(collectives: Collectives, x: Any, out: Any, request: Request, stream: StreamLike) -> Any:
    """See `Communicator.all_to_all`."""
    options = ("all_to_all", request.name)
    if stream is None and collectives.repeat_prepared(x, out, options):
        return out
    key = call_key(options, x, out)
    if collectives.repeat(key, x, out, stream):
        return out
    group = collectives.group
    source = input_view(group, x, "x")
    share_shape(group, source)
    result, target = output_view(group, out, None, source, source.shape)
    refuse_partial_overlap(source, target)
    share = source.nbytes // group.world_size
    stream = group.launches.stream_for(stream, x)

    def part(begin: int, nbytes: int) -> Exchange:
        shares = tuple(Transfer(peer, peer * share + begin, nbytes) for peer in others(group))
        kept = Transfer(group.rank, group.rank * share + begin, nbytes)
        return Exchange(sends=shares, receives=shares, kept=kept, kept_from=kept.offset)

    run_move(
        collectives,
        "all_to_all",
        source,
        target,
        share,
        request=request,
        stream=stream,
        key=key,
        part=part,
        reads_output=source.ptr == target.ptr,
    )
    return result
