"""The tables of transports, the engine's and Python's."""

import runpy

from proxyccl.proxy.transports.staged_fabric import default_ring
from proxyccl.proxy.transports.table import TRANSPORTS
from support.paths import ROOT


def test_both_tables_have_the_same_transports() -> None:
    in_engine = runpy.run_path(str(ROOT / "proxy/build_engine.py"))["TRANSPORTS"]
    assert sorted(in_engine) == sorted(TRANSPORTS)


def test_rings_of_many_peers_are_shorter() -> None:
    """Each has two, and 16 streams take 32 MiB of each."""
    mib = 1 << 20
    assert [default_ring(16, peers) // mib for peers in (1, 8, 16, 64, 1000)] == [32, 32, 16, 4, 4]
    assert default_ring(1, 1) == 4 * mib
