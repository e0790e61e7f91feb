"""Chooses all-reduce algorithms by what they take on this machine, now."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxyccl.channels.collectives.selection import Selector

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator

SIZES = tuple(1 << shift for shift in range(10, 24, 2))
"""Bytes measured: 1 KiB to 4 MiB, by fours."""


def measure(
    communicator: Communicator, sizes: Sequence[int] = SIZES, iterations: int = 5
) -> dict[int, dict[str, float]]:
    """Seconds that a float32 sum takes, by size in bytes and algorithm: the median of the slowest rank's times.

    All ranks call this together, and all get the same numbers.
    """
    candidates = [name for name in communicator.collectives.algorithms() if name != "proxy"]
    times: dict[int, dict[str, float]] = {}
    for size in sizes:
        x = communicator.empty(max(1, size // 4), "float32").fill(0)
        mine: dict[str, list[float]] = {name: [] for name in candidates}
        for iteration in range(iterations + 1):
            for name in candidates:
                communicator.barrier()
                communicator.synchronize()
                start = time.perf_counter()
                communicator.all_reduce(x, algorithm=name)
                communicator.synchronize()
                if iteration > 0:  # the first makes plans and touches memory
                    mine[name].append(time.perf_counter() - start)
        everyone = [json.loads(data) for data in communicator.all_gather_bytes(json.dumps(mine).encode())]
        times[size] = {
            name: statistics.median(max(ranks) for ranks in zip(*(other[name] for other in everyone), strict=True))
            for name in candidates
        }
    return times


def selector_from(times: dict[int, dict[str, float]]) -> Selector:
    """The table that takes the fastest algorithm for each size measured; halfway between two sizes it changes over."""
    sizes = sorted(times)
    best = [min(times[size], key=lambda name: times[size][name]) for size in sizes]
    limits = [
        (int((smaller * larger) ** 0.5), name)
        for smaller, larger, name, following in zip(sizes, sizes[1:], best, best[1:], strict=False)
        if name != following
    ]
    return Selector(tuple(limits), best[-1])
