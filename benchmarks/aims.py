"""What the peers reach, what the machine allows and what is aimed at on H200 GPUs joined by NVLink.

Measured once on 4 GPUs without multicast, before this library was; the programs measure the peers that they can again,
in the same run. A ratio to those counts, these numbers are for orientation.
"""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20

ALL_REDUCE_SIZES = tuple(KIB << shift for shift in range(0, 20, 2))
"""Bytes, 1 KiB to 256 MiB by fours."""

_ALL_REDUCE_US = {
    2: (2.93, 3.22, 4.02, 4.19, 6.07, 10.05, 20.15, 58.43, 213.5, 748.0),
    4: (3.56, 3.71, 4.34, 5.28, 6.98, 12.44, 27.99, 90.66, 321.6, 1184.0),
}
ALL_REDUCE_RATIO = 1.15
"""Aimed at: the best peer's time over ours, in the geometric mean over sizes; and no size below 1."""
PROXIED_ALL_REDUCE_US = 25.0
"""Aimed at for 1 KiB on 4 GPUs by algorithm "proxy"."""
PROXIED_ALL_REDUCE_GBS = 350.0
"""Aimed at for 256 MiB on 4 GPUs by algorithm "proxy": bus bandwidth."""

RING_ROUND_TRIP_US = 3.05
"""The limit: GPU to CPU thread to host word to GPU."""
RING_ROUND_TRIP_RATIO = 1.1
"""Aimed at: push and sync over the limit that the same run measures."""
RING_FULL_BLOCKS_M = 100.0
"""Aimed at, in millions of triggers a second: one or more full blocks."""
RING_ANY_LAYOUT_M = 20.0
"""Aimed at from any layout of many producers, such as 512 blocks of one thread."""

SIGNAL_US = {"limit": 2.7, "aim": 3.5}
"""A proxied signal alone, one way: the limit is a CPU's store to a pinned word."""
PUT_SIGNAL_US = {1 * KIB: (9.1, 9.5), 64 * KIB: (9.6, None), 1 * MIB: (12.0, None)}
"""A proxied put with signal, one way, by bytes: limit (peer copy and stream write value in one stream) and aim."""
COPY_ENGINE_GBS = {"one way": 395.0, "both ways": 390.0}
"""The limit of proxied puts to one peer, a direction."""
SM_PUT_GBS = {8: 298.0, 32: 352.0, 132: 368.0}
"""The limit of stores to one peer, by blocks."""
SM_SIGNAL_US = 2.46 / 2
"""The limit of a signal from GPU to GPU, one way: half a flag's round trip."""

RDMA_RATE_RATIO = 0.9
"""Aimed at: proxied writes of 8 bytes, over a bare loop of ibv_post_send with one request a call."""
RDMA_BANDWIDTH_RATIO = 0.95
"""Aimed at: bandwidth of proxied writes of 64 KiB, over ib_write_bw's."""

DAEMON_LATENCY_RATIO = 1.15
"""Aimed at, at most: a latency with the proxies in the node daemon, over the same with proxies in the ranks."""
DAEMON_RATE_RATIO = 0.9
"""Aimed at, at least: the same of a ring's rate."""
TRACED_RATE = 0.9
"""Aimed at, at least: triggers a second of a proxy that is traced, over the same while nobody looks."""

ISSUE_US = 5.0
"""Aimed at: CPU time to issue a prepared collective, where a torch elementwise add takes 4.9."""


_EXPERT_PARALLEL_US = {
    128: {"dispatch": 27.2, "combine": 26.8, "both": 42.4},
    4096: {"dispatch": 483.0, "combine": 494.0},
}
"""FlashInfer's one-sided calls on 4 GPUs, which take the whole GPU and leave rows by rank: aimed at with 24 SMs."""


def expert_parallel_us(ranks: int, tokens: int, call: str) -> float | None:
    """The best peer's time of "dispatch", "combine" or "both", whatever else the name says; None if not measured."""
    return _EXPERT_PARALLEL_US.get(tokens, {}).get(call.split(",", maxsplit=1)[0]) if ranks == 4 else None


def all_reduce_us(ranks: int, nbytes: int) -> float | None:
    """The best peer's time, MSCCL++ included, or None where it was not measured."""
    times = _ALL_REDUCE_US.get(ranks)
    return times[ALL_REDUCE_SIZES.index(nbytes)] if times and nbytes in ALL_REDUCE_SIZES else None
