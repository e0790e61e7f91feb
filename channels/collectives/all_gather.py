"""all_gather: every rank's rows on every rank."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import (
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


def all_gather(collectives: Collectives, x: Any, out: Any, request: Request, stream: StreamLike) -> Any:
    """See `Communicator.all_gather`."""
    options = ("all_gather", request.name)
    if stream is None and collectives.repeat_prepared(x, out, options):
        return out
    key = call_key(options, x, out)
    if collectives.repeat(key, x, out, stream):
        return out
    group = collectives.group
    source, ranks = input_view(group, x, "x"), group.world_size
    shape = (ranks * source.shape[0], *source.shape[1:]) if source.shape else (ranks,)
    result, target = output_view(group, out, None, source, shape)
    refuse_partial_overlap(target, source, in_place=group.rank * source.nbytes)
    stream = group.launches.stream_for(stream, x)
    share = source.nbytes

    def part(begin: int, nbytes: int) -> Exchange:
        return Exchange(
            sends=tuple(Transfer(peer, begin, nbytes) for peer in others(group)),
            receives=tuple(Transfer(peer, peer * share + begin, nbytes) for peer in others(group)),
            kept=Transfer(group.rank, group.rank * share + begin, nbytes),
            kept_from=begin,
        )

    run_move(collectives, "all_gather", source, target, share, part=part, request=request, stream=stream, key=key)
    return result
