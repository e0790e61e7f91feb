"""What tests share: ranks as threads of this process, ranks as MPI processes, and tests for one kind of runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from devices import ON_HOST, RUNTIME, require_devices

from proxyccl import Communicator, ThreadBootstrap

T = TypeVar("T")
TESTS = Path(__file__).parent
TIMEOUT = 20.0
"""Bound of waits inside tests that are not about time-outs: long, since the machine may be busy."""

HOST_ONLY_FILES = {
    "test_emulator.py": "the host runtime's own",
    "test_nvrtc.py": "a compiler alone",
    "test_packet_epochs.py": "writes the kernels' counters, which only the host runtime's CPU can",
    "test_sanitizer.py": "the host runtime's own",
}
# Open MPI wants to be told what MPICH does unasked: run as root, on more ranks than cores, bound to no core. Versions 4
# and 5 have different names for it.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def run_ranks(
    world_size: int, body: Callable[[Communicator], T], *, timeout: float = TIMEOUT, **options: Any
) -> list[T]:
    """Runs body(communicator) in one thread a rank.

    Returns the results by rank, or raises the first rank's exception.
    """
    require_devices(world_size)
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


def find_mpiexec() -> str:
    """The launcher beside this interpreter, else the one on PATH."""
    directories = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=directories)
    assert mpiexec is not None, "mpiexec is missing: pip install mpich"
    return mpiexec


def run_mpi(
    world_size: int, program: Path | str, *arguments: str, timeout: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program on `world_size` MPI processes of this machine, which have this process's environment."""
    launcher = [find_mpiexec(), "-n", str(world_size), sys.executable, "-m", "mpi4py"]
    return _run([*launcher, str(program), *arguments], timeout, env)


def run_alone(
    program: Path | str, *arguments: str, timeout: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program on one process, which has this one's environment."""
    return _run([sys.executable, str(program), *arguments], timeout, env)


def _run(command: list[str], timeout: float, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **(env or {})}
    )


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of the test run stay out of the user's cache; a directory that is named is kept for the next."""
    os.environ.setdefault("PROXYCCL_CACHE", str(tmp_path_factory.mktemp("cache")))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update({name: value for name, value in OPEN_MPI.items() if name not in os.environ})
    config.addinivalue_line("markers", "host_only(reason): makes sense on the host runtime alone")
    config.addinivalue_line("markers", "gpu_only: needs a GPU, or what stands in for one")


def pytest_report_header() -> str:
    return f"runtime: {RUNTIME}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, and so counts, what does not make sense on this runtime."""

    def belongs(item: pytest.Item) -> bool:
        if ON_HOST:
            return item.get_closest_marker("gpu_only") is None
        return item.get_closest_marker("host_only") is None and item.path.name not in HOST_ONLY_FILES

    deselected = [item for item in items if not belongs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if belongs(item)]
