"""Collectives by proxy across two nodes: data is written straight into arrays that all ranks registered."""

from __future__ import annotations

import pytest

from proxyccl import Communicator
from support.cases.span_calls import COLLECTIVES, Kind, SpanCalls
from support.ranks import Ranks
from support.soft_roce.nodes import LOCAL, TIMEOUT, rdma_of

SIGNALS = ("write", "fetch_add")
KINDS: tuple[Kind, ...] = ("registered", "empty")
# The two cases without --full have every value of each parameter. test_collectives_over_verbs.py has more cases.
CASES = [
    ("verbs", "write", "registered", 1),
    ("staged", "fetch_add", "empty", 1),
    *(
        pytest.param(transport, signal, kind, LOCAL, marks=pytest.mark.full)
        for transport in ("verbs", "staged")
        for signal in SIGNALS
        for kind in KINDS
    ),
]


@pytest.mark.parametrize(("transport", "signal", "kind", "local"), CASES)
def test_spans_arrive_whole(transport: str, signal: str, kind: Kind, local: int) -> None:
    share = 20_003

    def body(comm: Communicator) -> None:
        calls = SpanCalls(comm, share * comm.world_size, (kind, kind))
        for seed in range(9):
            calls.run(COLLECTIVES[seed % 3], (1, 4096, share)[seed // 3], seed, root=seed % comm.world_size)
        sent = {peer: comm.proxy.counters(channel) for peer, channel in comm.collectives.by_proxy().links.sends.items()}
        gathered = exchanged = 1 + 4096 + share
        roots = [(1, 4096, share)[seed // 3] for seed in range(2, 9, 3) if seed % comm.world_size == comm.rank]
        for counters in sent.values():
            assert counters.bytes == gathered + exchanged + sum(roots)

    with Ranks(
        2 * local,
        options_of=lambda rank: rdma_of(rank, local, signal=signal, staging_bytes=32 << 10, staging_chunk=8 << 10),
        local_world_size=local,
        timeout=TIMEOUT,
        transport={(a, b): transport for a in range(local) for b in range(local, 2 * local)},
    ) as nodes:
        nodes.run(body)
