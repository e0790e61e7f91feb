"""Builds and imports benchmarks/bare_loops, the loops that benchmarks compare the engine with."""

import sys

from support.once import run_make
from support.paths import ROOT

run_make("bare-loops")
sys.path.append(str(ROOT / "benchmarks"))
from bare_loops import fabric_serve, fabric_write, produce, verbs_write  # noqa: E402

__all__ = ["fabric_serve", "fabric_write", "produce", "verbs_write"]
