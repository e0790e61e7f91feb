"""What only a GPU shows of the torch backend: streams, graphs, futures on a device. Started by torchrun on 2 GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs 2 GPUs", allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "on_gpus.py"


@pytest.mark.parametrize("case", ["streams", "capture", "transfers", "memory", "mixed"])
def test_on_two_gpus(case: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAM), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK" in done.stdout
