"""Process groups of the ranks that remain after a loss. The tests use torch's `shrink_group` if torch has it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from proxyccl.torch import StoreBootstrap  # noqa: E402
from proxyccl.torch.issuing import IS_BACKEND  # noqa: E402
from support.cases.boards import check_boards  # noqa: E402
from support.processes import run_processes  # noqa: E402

PROGRAM = Path(__file__).parent / "programs" / "shrink.py"


def test_a_board_in_a_store() -> None:
    store = torch.distributed.HashStore()
    check_boards([StoreBootstrap(store, rank, 3).board() for rank in range(3)])


@pytest.mark.skipif(not IS_BACKEND, reason="this torch shrinks its own backends' groups alone")
def test_torch_shrinks_a_group_that_lost_a_rank() -> None:
    *left, lost = run_processes(4, PROGRAM)
    assert lost.returncode == -9
    for ended in left:
        assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr
