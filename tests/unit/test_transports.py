"""The engine's and Python's tables of transports agree."""

import runpy

import pytest

from proxyccl.device.process import cores as cores_of
from proxyccl.proxy.fabric.endpoint import default_streams
from proxyccl.proxy.remote_options import MOST_WIRES
from proxyccl.proxy.transports.fabric import default_ring, first_wire
from proxyccl.proxy.transports.table import TRANSPORTS
from support.paths import ROOT


def test_both_tables_have_the_same_transports() -> None:
    in_engine = runpy.run_path(str(ROOT / "proxy/build_engine.py"))["TRANSPORTS"]
    assert sorted(in_engine) == sorted([*TRANSPORTS, "rails"])  # rails are made of connections by verbs


def test_the_streams_of_a_hosts_ranks_have_half_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream needs a thread, and more threads than half of the cores would wait for cores."""
    monkeypatch.setattr(cores_of, "cores_allowed", lambda: None)
    for cores in (1, 2, 3, 16, 64, 256):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        for ranks in (1, 2, 3, 8):
            streams = default_streams(cores_of.core_share(ranks, ranks))
            assert 1 <= streams <= MOST_WIRES
            assert streams == 1 or streams * ranks <= cores / 2
    assert [default_streams(cores) for cores in (64, 32, 16, 8, 1)] == [16, 16, 8, 4, 1]


def test_rings_of_many_peers_are_shorter() -> None:
    """Each peer needs two rings, so rings are shorter with more peers. 16 streams use up to 32 MiB of each ring."""
    mib = 1 << 20
    assert [default_ring(16, peers) // mib for peers in (1, 8, 16, 64, 1000)] == [32, 32, 16, 4, 4]
    assert default_ring(1, 1) == 4 * mib


def test_short_puts_to_several_peers_take_different_wires() -> None:
    assert [first_wire(8, peers) for peers in range(1, 10)] == [0, 4, 2, 6, 1, 5, 3, 7, 0]
    assert {first_wire(3, peers) for peers in range(1, 20)} == {0, 1, 2}
    assert {first_wire(1, peers) for peers in range(1, 20)} == {0}
