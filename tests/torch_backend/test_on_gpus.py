"""Parts of the torch backend that need a GPU: streams, graphs, futures on a device. Started by torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "on_gpus.py"


@pytest.mark.parametrize(
    "case",
    [
        "streams",
        "again",
        "capture",
        "priority",
        "transfers",
        "ring",
        "memory",
        "lent",
        "mixed",
    ],
)
def test_some_ranks(case: str) -> None:
    ranks = max(2, min(4, torch.cuda.device_count())) if case == "ring" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, str(PROGRAM), case], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK" in done.stdout
