"""The tables of transports, the engine's and Python's."""

import runpy

from proxyccl.proxy.transports.table import TRANSPORTS
from support.paths import ROOT


def test_both_tables_have_the_same_transports() -> None:
    in_engine = runpy.run_path(str(ROOT / "proxy/build_engine.py"))["TRANSPORTS"]
    assert sorted(in_engine) == sorted(TRANSPORTS)
