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
# Each value is in one of the two that always run. tests/rdma/test_collectives_over_verbs.py has more, on this machine.
ALWAYS = {("verbs", "write", "registered"), ("staged", "fetch_add", "empty")}
CASES = [
    pytest.param(
        TRANSPORTS[transport],
        signal,
        (kind, kind),
        id=f"{transport}-{signal}-{kind}",
        marks=[] if (transport, signal, kind) in ALWAYS else pytest.mark.full,
    )
    for transport in TRANSPORTS
    for signal in SIGNALS
    for kind in KINDS
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
