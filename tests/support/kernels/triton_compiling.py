"""Compiles kernels in a separate process, because this one may have chosen Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.paths import PROGRAMS


def without_interpreter() -> dict[str, str]:
    """Returns this process's environment, changed so that Triton compiles, and caches its kernels inside ProxyCCL's
    cache.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(Path(os.environ["PROXYCCL_CACHE"], "triton"))}


def compile_accesses(directory: Path) -> None:
    """Compiles kernels of programs/triton_accesses.py, and writes each to ``directory / kernel``. The directory's name
    says which kernels and for which architecture.
    """
    program = [sys.executable, str(PROGRAMS / "triton_accesses.py"), str(directory)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False, env=without_interpreter())
    assert done.returncode == 0, done.stderr
