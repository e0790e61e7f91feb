"""Compiles Triton kernels in a separate process, because this process may use Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.paths import PROGRAMS


def without_interpreter() -> dict[str, str]:
    """Returns this process's environment without Triton's interpreter, and with Triton's cache inside ProxyCCL's
    cache.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(Path(os.environ["PROXYCCL_CACHE"], "triton"))}


def compile_accesses(directory: Path) -> None:
    """Compiles kernels of programs/triton_accesses.py, and writes each to ``directory / kernel``. The directory's name
    selects the kernels and the architecture.
    """
    program = [sys.executable, str(PROGRAMS / "triton_accesses.py"), str(directory)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False, env=without_interpreter())
    assert done.returncode == 0, done.stderr
