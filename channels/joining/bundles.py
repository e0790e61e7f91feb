"""All ranks' messages of one round as one message.

Bootstraps without an all_gather of their own would have each of n ranks fetch n messages from one store or one file
system. From COLLECTED_FROM ranks on, the first rank fetches them and offers the others one bundle: 3 n requests in all.
With fewer ranks the bundle would only add a step.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from proxyccl.device.errors import ExchangeError

COLLECTED_FROM = 16


def bundle(messages: Sequence[bytes]) -> bytes:
    """The messages of all ranks as one."""
    return struct.pack(f"<{len(messages)}Q", *map(len, messages)) + b"".join(messages)


def unbundle(data: bytes, world_size: int, where: str, rank: int) -> list[bytes]:
    """The messages of that many ranks.

    Args:
        data: the bundle.
        world_size: the number of ranks.
        where: where it was found, for errors.
        rank: this rank, for errors.

    Raises:
        ExchangeError: it is not such a bundle.
    """
    begin = 8 * world_size
    lengths = struct.unpack_from(f"<{world_size}Q", data) if len(data) >= begin else ()
    ends = list(itertools.accumulate(lengths, initial=begin))
    if not lengths or ends[-1] != len(data):
        raise ExchangeError(
            f"rank 0's message in {where} can't be read: expected the messages of {world_size} ranks, not these "
            f"{len(data)} bytes",
            rank=rank,
            peer=0,
            operation="bootstrap",
        )
    return [data[start:end] for start, end in itertools.pairwise(ends)]
