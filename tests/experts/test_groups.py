"""EPAll2AllLayer on an MPI communicator, on a torch process group, and on invalid objects."""

from __future__ import annotations

from typing import Any

import pytest

from proxyccl import ArgumentError, EPAll2AllLayer
from support.devices import processes
from support.paths import PROGRAMS
from support.processes import run_processes
from support.running import run_mpi

PROGRAM = PROGRAMS / "expert_group.py"


@pytest.mark.slow
def test_an_mpi_communicator_is_a_group() -> None:
    done = run_mpi(processes(3), PROGRAM, "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("correct") == processes(3)


def test_a_torch_process_group_is_a_group() -> None:
    pytest.importorskip("torch")
    for rank, ended in enumerate(run_processes(processes(3), PROGRAM, "torch", timeout=120)):
        assert ended.returncode == 0, ended.stderr
        assert f"rank {rank}: correct" in ended.stdout


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^ep_group: must be a Communicator, an MPI communicator or a torch"):
        EPAll2AllLayer(group, 4, 8, 2, 0, 2, 1, 1)
