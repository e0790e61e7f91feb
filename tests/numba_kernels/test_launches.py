"""A launch compiles and links the kernel for the argument types that Numba infers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import PROGRAMS

pytestmark = pytest.mark.host_only(reason="needs only a compiler")


@pytest.mark.parametrize("numpy", ["installed", "newest"])
def test_kernels_compile_for_the_arguments_of_a_launch(numpy: str) -> None:
    program = [sys.executable, str(PROGRAMS / "numba_launches.py"), numpy]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "diffuse: int64, int64, array(float32, 1d, C), int64, int64: True",
        "everything: int64, int64, int64, array(int32, 1d, C): True",
        "waits: int64, array(int32, 1d, C): True",
    ]
