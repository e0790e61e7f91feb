"""Collectives by proxy across two nodes: data is written straight into arrays that all ranks registered."""

from __future__ import annotations

import pytest

from proxyccl import Communicator
from support.cases.span_calls import COLLECTIVES, Kind, SpanCalls
from support.ranks import Ranks
from support.soft_roce.nodes import LOCAL, RANKS, TIMEOUT, rdma_of

STAGED = {(a, b): "staged" for a in range(LOCAL) for b in range(LOCAL, RANKS)}


TRANSPORTS: dict[str, object] = {"verbs": None, "staged": STAGED}
SIGNALS = ("write", "fetch_add")
KINDS: tuple[Kind, ...] = ("registered", "empty")
# Any two values of two parameters meet in the half that always runs.
CASES = [
    pytest.param(
        TRANSPORTS[transport],
        signal,
        (kind, kind),
        id=f"{transport}-{signal}-{kind}",
        marks=pytest.mark.full if (i + j + k) % 2 else [],
    )
    for i, transport in enumerate(TRANSPORTS)
    for j, signal in enumerate(SIGNALS)
    for k, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("transport", "signal", "kinds"), CASES)
def test_spans_arrive_whole(transport: object, signal: str, kinds: tuple[Kind, Kind]) -> None:
    share = 20_003

    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, share * comm.world_size, kinds)
        for seed in range(9):
            calls.run(COLLECTIVES[seed % 3], (1, 4096, share)[seed // 3], seed, root=seed % comm.world_size)
        sent = {peer: comm.proxy.counters(channel) for peer, channel in comm.collectives.by_proxy().links.sends.items()}
        gathered = exchanged = 1 + 4096 + share
        roots = [(1, 4096, share)[seed // 3] for seed in range(2, 9, 3) if seed % comm.world_size == comm.rank]
        for counters in sent.values():
            assert counters.bytes == gathered + exchanged + sum(roots)

    with Ranks(
        RANKS,
        options_of=lambda rank: rdma_of(rank, LOCAL, signal=signal, staging_bytes=32 << 10, staging_chunk=8 << 10),
        local_world_size=LOCAL,
        timeout=TIMEOUT,
        transport=transport,
    ) as nodes:
        nodes.run(body)
