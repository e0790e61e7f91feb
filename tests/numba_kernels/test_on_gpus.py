"""Kernels in Numba on GPUs. Ranks are processes, because loading a module may wait for the process's other kernels."""

from __future__ import annotations

import pytest

from support.devices import require_devices
from support.paths import EXAMPLES, PROGRAMS
from support.running import run_mpi

pytestmark = pytest.mark.gpu_only


def test_the_example_checks_its_result() -> None:
    require_devices(2)
    done = run_mpi(2, EXAMPLES / "numba_diffusion.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK: ")


def test_channels_do_what_they_do_in_cpp_and_waits_are_bounded() -> None:
    require_devices(2)
    done = run_mpi(2, PROGRAMS / "numba_channels.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank}: " in done.stdout
    assert done.stdout.count("a signal (ProxyChannel) from rank") == 2
