"""What tests share: ranks as threads of this process, and ranks as MPI processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from proxyccl import Communicator, ThreadBootstrap

T = TypeVar("T")
TESTS = Path(__file__).parent
TIMEOUT = 20.0
"""Bound of waits inside tests that are not about time-outs: long, since the machine may be busy."""


def run_ranks(
    world_size: int, body: Callable[[Communicator], T], *, timeout: float = TIMEOUT, **options: Any
) -> list[T]:
    """Runs body(communicator) in one thread a rank.

    Returns the results by rank, or raises the first rank's exception.
    """
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    bootstraps = ThreadBootstrap.create(world_size)

    def rank_main(rank: int) -> None:
        try:
            with Communicator(bootstraps[rank], timeout=timeout, **options) as communicator:
                results[rank] = body(communicator)
        except BaseException as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * timeout + 60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for error in errors:
        if error is not None:
            raise error
    return results


def run_mpi(
    world_size: int,
    program: Path | str,
    *arguments: str,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    survive: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program on `world_size` MPI processes.

    With `survive` a rank that dies leaves the others running.
    """
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), *(["-disable-auto-cleanup"] if survive else []), "-n", str(world_size)]
    command += [sys.executable, "-m", "mpi4py", str(program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **(env or {})}
    )


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of the test run stay out of the user's cache."""
    os.environ["PROXYCCL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
