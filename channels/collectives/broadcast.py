"""broadcast: one rank's values on all ranks."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import (
    as_rank,
    input_view,
    output_view,
    refuse_partial_overlap,
)
from proxyccl.channels.collectives.by_proxy import others
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_plans import Exchange, Transfer
from proxyccl.channels.collectives.moves import run_move
from proxyccl.channels.collectives.plans import call_key
from proxyccl.channels.collectives.request import Request
from proxyccl.device.runtime import StreamLike


def broadcast(collectives: Collectives, x: Any, root: int, out: Any, request: Request, stream: StreamLike) -> Any:
    """See `Communicator.broadcast`."""
    group = collectives.group
    root = as_rank(group.world_size, root, "root")
    given = x if out is None else out
    options = ("broadcast", request.name, root)
    if stream is None and collectives.repeat_prepared(x, given, options):
        return given
    key = call_key(options, x, given)
    if collectives.plans.repeat(key, x, given, stream):
        return given
    source = input_view(group, x, "x")
    result, target = output_view(group, given, x, source, source.shape)
    refuse_partial_overlap(source, target)

    def part(begin: int, nbytes: int) -> Exchange:
        if group.rank != root:
            return Exchange(receives=(Transfer(root, begin, nbytes),))
        sends = tuple(Transfer(peer, begin, nbytes) for peer in others(group))
        return Exchange(sends=sends, kept=Transfer(root, begin, nbytes), kept_from=begin)

    run_move(
        collectives,
        "broadcast",
        source,
        target,
        source.nbytes,
        request=request,
        stream=group.launches.stream_for(stream, x),
        key=key,
        part=part,
        root=root,
    )
    return result
