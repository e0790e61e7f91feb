"""The loops with which benchmarks compare proxied writes (benchmarks/bare_writes), built by make."""

import sys

from support.once import run_make
from support.paths import ROOT

run_make("bare-writes")
sys.path.append(str(ROOT / "benchmarks"))
from bare_writes import fabric_serve, fabric_write, verbs_write  # noqa: E402

__all__ = ["fabric_serve", "fabric_write", "verbs_write"]
