"""Ranks under a seccomp filter like Docker's, which refuses ptrace and process_vm_readv."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import PROGRAMS, TESTS

pytestmark = pytest.mark.slow

SECONDS = 250
DONE = {
    "work": "ways:\npaths: {{'copy': [{peer}]}}\nseen: [0, 1]\ndone\n",
    "agents": "ways:\nby unix (process_vm_readv: Operation not permitted (/proc/sys/kernel/yama/ptrace_scope, "
    "CAP_SYS_PTRACE, seccomp))\nby shared_memory\nby copy engine (shared memory)\ndone\n",
    "lose": "ways:\nlost: the process of rank 1 ended (seen by this rank)\ndone\n",
}
"""The output of a rank that succeeds, for each task of contained.py."""


@pytest.mark.host_only("paths have other names on GPUs")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is of x86-64")
@pytest.mark.parametrize("task", DONE)
def test_ranks_need_no_call_that_containers_refuse(task: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "under_seccomp.py"), str(PROGRAMS / "contained.py"), str(tmp_path)]
    env = {**os.environ, "PROXYCCL_RUNTIME": "host", "PYTHONPATH": str(TESTS)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), task], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=SECONDS) for rank in ranks]
    survivors = 1 if task == "lose" else 2
    for rank, (output, errors) in enumerate(outputs[:survivors]):
        assert output == DONE[task].format(peer=1 - rank), errors
