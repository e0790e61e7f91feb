"""vLLM's NixlConnector with grants, by vLLM's own schedulers' and workers' parts of the connector."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import PROGRAMS

PROGRAM = PROGRAMS / "vllm_kv_connector.py"
SECONDS = 100
BLOCKS = [4, 5, 6]


def move(connector: str, lease: int, folder: Path) -> Any:
    """Runs the program. Returns whether the blocks arrived, the requests whose blocks the prefiller freed, and the
    decoder's blocks with load errors.
    """
    command = [sys.executable, str(PROGRAM), connector, str(lease), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_blocks_arrive_by_the_key_that_the_scheduler_chose(tmp_path: Path) -> None:
    assert move("GrantingNixlConnector", 60, tmp_path) == [True, ["prefilled"], []]


@pytest.mark.parametrize(
    ("connector", "errors"),
    [("GrantingNixlConnector", BLOCKS), ("NixlPullConnector", [])],
    ids=["with grants", "without"],
)
def test_blocks_that_were_freed_before_the_read_are_load_errors_with_grants(
    connector: str, errors: list[int], tmp_path: Path
) -> None:
    assert move(connector, 0, tmp_path) == [False, ["prefilled"], errors]
