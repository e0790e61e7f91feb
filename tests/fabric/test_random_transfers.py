"""Puts, values, gets and signals over libfabric's TCP provider, on this host's loopback: they keep their order."""

from __future__ import annotations

import pytest

from proxyccl import Communicator, FabricOptions
from support.cases.random_transfers import run_random_transfers
from support.ranks import Ranks
from support.transports import needs_fabric

pytestmark = [
    pytest.mark.host_only(reason="the provider reaches the CPU's memory"),
    pytest.mark.own_proxy(reason="chooses the library for this process"),
    needs_fabric,
]


@pytest.mark.parametrize(
    ("transport", "signal", "streams"),
    [
        ("fabric", "auto", None),
        ("fabric", "ordered", None),
        ("staged_fabric", "auto", (1, 1)),
        ("staged_fabric", "delivered", (1, 1)),
        ("staged_fabric", "auto", (3, 2)),
    ],
)
def test_they_keep_their_order(
    transport: str, signal: str, streams: tuple[int, int] | None, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)

    def body(comm: Communicator) -> None:
        assert run_random_transfers(comm, 3).transport == transport

    def options_of(rank: int) -> dict[str, FabricOptions]:
        # if ranks set different numbers of streams, their connection has the smaller number
        own = None if streams is None else streams[rank]
        return {"fabric": FabricOptions(provider="tcp", interface="=lo", signal=signal, streams=own)}

    with Ranks(2, options_of=options_of, local_world_size=1, transport=transport) as pair:
        pair.run(body)
