"""SGLang's group in which a trainer broadcasts weights. A request names the backend that a plugin registers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from concurrent.futures import ThreadPoolExecutor

from support.running import run_alone

PROGRAM = Path(__file__).parent / "programs" / "weight_group.py"


@pytest.mark.host_only(reason="the program's tensors are the host's")
def test_a_trainer_broadcasts_weights_to_a_server(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        done = run_alone(PROGRAM, str(tmp_path / "store"), str(rank), env={"PROXYCCL_RUNTIME": "host"})
        return done.stdout + done.stderr * bool(done.returncode)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == ["received\n"] * 2
