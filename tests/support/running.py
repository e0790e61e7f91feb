"""Runs ranks for tests, as threads of this process or as MPI processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from proxyccl import Communicator, Runtime, ThreadBootstrap
from support.devices import require_devices

T = TypeVar("T")
TIMEOUT = 60.0
"""Time limit of waits in tests that do not test time-outs; long, because the machine may be busy."""
SHORT = 2.0
"""A time-out that expires in a test; set by `impatient` after the set-up."""


def impatient(comm: Communicator, seconds: float = SHORT) -> None:
    """Shortens the communicator's time-out. All ranks call this after the set-up, which may be slow on a busy
    machine.
    """
    comm.all_gather_bytes(b"")
    comm.timeout = seconds


class Stop:
    """Makes all other ranks wait in `until_told` until rank 0 calls `tell`."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def until_told(self, comm: Communicator) -> None:
        if comm.rank and not self._told.wait(TIMEOUT):
            raise TimeoutError

    def tell(self, comm: Communicator) -> None:
        comm.runtime.synchronize()  # waits until all sent data has arrived
        if not comm.rank:
            self._told.set()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds, for at most four times TIMEOUT."""
    deadline = time.monotonic() + 4 * TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.001)


def run_ranks(
    world_size: int,
    body: Callable[[Communicator], T],
    *,
    timeout: float = TIMEOUT,
    make_runtime: Callable[[int], Runtime] | None = None,
    **options: Any,
) -> list[T]:
    """Runs body(communicator) in one thread per rank. `make_runtime(rank)` makes the rank's runtime.

    Returns the results by rank, or raises the first rank's exception.
    """
    require_devices(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    bootstraps = ThreadBootstrap.create(world_size)

    def rank_main(rank: int) -> None:
        try:
            own = {} if make_runtime is None else {"runtime": make_runtime(rank)}
            with Communicator(bootstraps[rank], timeout=timeout, **own, **options) as communicator:
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


def find_mpiexec() -> str:
    """Returns the path of mpiexec, which is beside this interpreter or on PATH."""
    directories = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=directories)
    assert mpiexec is not None, "mpiexec is missing: pip install mpich"
    return mpiexec


def run_mpi(
    world_size: int, program: Path | str, *arguments: str, timeout: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in `world_size` local MPI processes, with this process's environment and `env`."""
    launcher = [find_mpiexec(), "-n", str(world_size), sys.executable, "-m", "mpi4py"]
    return _run([*launcher, str(program), *arguments], timeout, env)


def run_alone(
    program: Path | str, *arguments: str, timeout: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in one process, with this process's environment and `env`."""
    return _run([sys.executable, str(program), *arguments], timeout, env)


def _run(command: list[str], timeout: float, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **(env or {})}
    )
