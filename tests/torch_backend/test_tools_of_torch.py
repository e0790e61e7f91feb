"""torch's own tools on process groups of this backend: debug level DETAIL and CommDebugMode."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
from support.processes import run_processes  # noqa: E402

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 3


def test_debug_level_detail_and_comm_debug_mode() -> None:
    for ended in run_processes(RANKS, PROGRAMS / "debugged.py", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr
