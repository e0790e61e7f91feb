"""Times of other libraries, limits of the machine, and our targets, on H200 GPUs joined by NVLink.

These numbers were measured once, on 4 GPUs without multicast. A target that is a ratio is relative to another library's
time, which the program measures in the same run.
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
"""Target: the geometric mean over sizes of the best peer's time over ours, with at least 1 at each size."""
REGISTERED_ALL_REDUCE_RATIO = 1.55
"""Target for registered arrays on 2 GPUs: the geometric mean over sizes of the best peer's time over ours."""
PROXIED_ALL_REDUCE_US = 25.0
"""Target for the time of 1 KiB on 4 GPUs with algorithm "proxy", in µs."""
PROXIED_ALL_REDUCE_GBS = 350.0
"""Target for the bus bandwidth of 256 MiB on 4 GPUs with algorithm "proxy", in GB/s."""

PROXIED_PAIR_US = 16.0
"""Target for the time of an all_reduce of 1 KiB on 2 GPUs with algorithm "proxy" and registered arrays, in µs."""
PLAN_OVER_TWO_SHOT = 1.2
"""Target for the time of an all_reduce by an execution plan on 2 GPUs, as a multiple of the time of `two_shot`."""
NORM_US, NORM_OVER_ALONE = 1.0, 1.05
"""Targets for an all_reduce with the residual and RMSNorm in one call: the µs by which the call exceeds an all_reduce
alone up to 128 rows of 7168 values, and its time as a multiple of the all_reduce's with more rows.
"""
MOVED_BY_KERNELS_RATIO = 1.25
"""Target for an all_to_all by kernels with registered arrays: the geometric mean over sizes of NCCL's time over ours,
with at least 1 at each size.
"""
COPY_ENGINES_RATIO = 1.0
"""Target, at least: the time of NCCL's copy engines over ours by proxy with registered arrays, from COPY_ENGINES_BYTES
on.
"""
COPY_ENGINES_BYTES = 64 * KIB
BESIDE_RATIO = 1.1
"""Target, at most: the time of a collective by proxy beside a matrix product, over its time alone."""
PRODUCT_RATIO = 1.0
"""Target, at most: the time of a product beside a collective by proxy, over that beside NCCL's copy engines."""

HOST_ALL_REDUCE_RATIO = 1.0
"""Target, at least: MPI's time over the host runtime's time with registered arrays, from HOST_ALL_REDUCE_BYTES on."""
HOST_ALL_REDUCE_BYTES = 64 * KIB

RING_ROUND_TRIP_US = 3.05
"""The limit of a round trip, in µs: GPU to CPU thread to host word to GPU."""
RING_ROUND_TRIP_RATIO = 1.1
"""Target: push and sync over the limit that the same run measures."""
RING_FULL_BLOCKS_M = 100.0
"""Target for one or more full blocks, in millions of triggers a second."""
RING_ANY_LAYOUT_M = 20.0
"""Target for any layout of many producers, such as 512 blocks of one thread, in millions of triggers a second."""

SIGNAL_US = {"limit": 2.7, "aim": 3.5}
"""A proxied signal alone, one way, in µs. The limit is a CPU's store to a pinned word."""
PUT_SIGNAL_US = {1 * KIB: (9.1, 9.5), 64 * KIB: (9.6, None), 1 * MIB: (12.0, None)}
"""A proxied put with its signal, one way, by bytes: limit and aim, in µs. The limit is a peer copy and a
`cuStreamWriteValue64` in one stream.
"""
COPY_ENGINE_GBS = {"one way": 395.0, "both ways": 390.0}
"""The limit of proxied puts to one peer, in each direction."""
SM_PUT_GBS = {8: 298.0, 32: 352.0, 132: 368.0}
"""The limit of stores to one peer, by blocks."""
SM_SIGNAL_US = 2.46 / 2
"""The limit of a signal from GPU to GPU, one way, in µs: half of a flag's round trip."""

RDMA_RATE_RATIO = 0.9
"""Target: the rate of proxied writes of 8 bytes, over the rate of a bare loop of ibv_post_send with one request per
call.
"""
RDMA_BANDWIDTH_RATIO = 0.95
"""Target: the bandwidth of proxied writes of 64 KiB, over the bandwidth of ib_write_bw."""

FABRIC_RATE_RATIO = 0.9
"""Target: the rate of proxied writes of 8 bytes through libfabric, over the rate of a bare loop of fi_writemsg."""
FABRIC_BANDWIDTH_RATIO = 0.95
"""Target: the rate of proxied writes of 1 MiB through libfabric, over the rate of a bare loop of fi_writemsg."""

BETWEEN_HOSTS_RATIO = 1.0
"""Target, at least: a peer's time of an all_reduce between hosts over ours."""

DAEMON_LATENCY_RATIO = 1.15
"""Target, at most: a latency with the proxies in the node daemon, over the same with the proxies in the ranks."""
DAEMON_RATE_RATIO = 0.9
"""Target, at least: a ring's rate with the proxies in the node daemon, over the same with the proxies in the ranks."""
TRACED_RATE = 0.9
"""Target, at least: triggers a second of a traced proxy, over the same without an observer."""

ISSUE_US = 5.0
"""Target: CPU time to issue a prepared collective, in µs, on a machine where torch's elementwise add takes 4.9."""


_EXPERT_PARALLEL_US = {
    128: {"dispatch": 27.2, "combine": 26.8, "both": 42.4},
    4096: {"dispatch": 483.0, "combine": 494.0},
}
"""Target with 24 SMs, in µs: the time of FlashInfer's one-sided calls on 4 GPUs, which use the whole GPU and leave rows
ordered by rank.
"""


_WRITTEN_ONCE_US: dict[int, dict[str, float]] = {
    128: {"dispatch": 18.0, "combine": 18.0, "both": 36.0},
    4096: {"dispatch": 200.0, "combine": 215.0},
}
"""Target with 24 SMs on 2 H200, in µs, if each row is written once for each destination rank: for 4096 tokens 1.27 and
1.36 times the link's own time.
"""


def expert_parallel_us(ranks: int, tokens: int, call: str) -> float | None:
    """Returns the target in µs for the call of this name ("dispatch…", "combine…" or "both…"), or None."""
    name = call.split(",", maxsplit=1)[0]
    if ranks == 2 and call.endswith("written once"):
        return _WRITTEN_ONCE_US.get(tokens, {}).get(name)
    return _EXPERT_PARALLEL_US.get(tokens, {}).get(name) if ranks == 4 else None


def all_reduce_us(ranks: int, nbytes: int) -> float | None:
    """Returns the time in µs of the fastest other library, or None if no other library was measured at this size."""
    times = _ALL_REDUCE_US.get(ranks)
    return times[ALL_REDUCE_SIZES.index(nbytes)] if times and nbytes in ALL_REDUCE_SIZES else None


FIRST_RESULT_OVER_NCCL = 0.5
"""Target, at most: the time from the start of a rank's process to its first all_reduce on GPUs, over that by torch and
NCCL.
"""
FIRST_PROXIED_CALL_SECONDS = 0.1
"""Target, at most, for the first proxied call on GPUs when the communicator is 2 s old."""
