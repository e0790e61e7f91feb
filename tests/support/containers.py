"""Containers for tests: PID namespaces in which programs run as forks of a template process."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

from support.forked import Forks, PipedFork
from support.packages.debian import UnavailableError
from support.paths import ROOT


class Containers:
    """Containers, as a context manager. A process's id inside a container differs from its id outside, so do not
    pass an inner id to `os.kill`.

    Raises:
        UnavailableError: this process may not make containers.
    """

    def __init__(self, count: int) -> None:
        users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        prefix = ["unshare", *users, "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        try:
            subprocess.run([*prefix, "true"], capture_output=True, text=True, check=True, timeout=60)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            raise UnavailableError(f"no PID namespace can be made here: {reason.strip()}") from None
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *_python_path()])}
        self._forks = [Forks(environment, prefix) for _ in range(count)]

    def __enter__(self) -> Containers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for forks in self._forks:
            forks.close()

    def start(self, container: int, program: str, *arguments: str, env: dict[str, str] | None = None) -> PipedFork:
        """Starts a program in a container, with stdout and stderr in one pipe."""
        return PipedFork([program, *arguments], {**os.environ, **(env or {})}, self._forks[container])


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
