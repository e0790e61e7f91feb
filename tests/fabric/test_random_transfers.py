"""Puts, values, gets and signals over libfabric's TCP provider, on this host's loopback: they keep their order."""

from __future__ import annotations

import pytest

from proxyccl import Communicator, FabricOptions
from proxyccl.proxy import _engine
from support.cases.random_transfers import run_random_transfers
from support.ranks import Ranks

pytestmark = [
    pytest.mark.host_only(reason="the provider reaches the CPU's memory"),
    pytest.mark.own_proxy(reason="chooses the library for this process"),
    pytest.mark.skipif(not _engine.lib.proxyccl_fabric_built(), reason="this build has no fabric transport"),
]


@pytest.mark.parametrize(
    ("transport", "signal"),
    [("fabric", "auto"), ("fabric", "ordered"), ("staged_fabric", "auto"), ("staged_fabric", "delivered")],
)
def test_they_keep_their_order(transport: str, signal: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)

    def body(comm: Communicator) -> None:
        assert run_random_transfers(comm, 3).transport == transport

    options = {"fabric": FabricOptions(provider="tcp", interface="=lo", signal=signal)}
    with Ranks(2, options_of=lambda _: options, local_world_size=1, transport=transport) as pair:
        pair.run(body)
