"""Runs the transfer engine's tests with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.instrumented import build_instrumented, sanitizer_library
from support.paths import PROGRAMS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.host_only("agents move the host's memory, whatever the runtime")]

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1")
LINKS = ("test_agents.py", "test_freed_memory.py", "test_strangers.py", "test_lost_peers.py")
PATHS = ("test_fabric.py", "test_fabric_on_devices.py", "test_staged.py")


@pytest.mark.parametrize(
    "files", [LINKS, pytest.param((*LINKS, *PATHS), marks=pytest.mark.full)], ids=["links", "links and paths"]
)
def test_agents_without_errors_of_memory(tmp_path: Path, files: tuple[str, ...]) -> None:
    build_instrumented(tmp_path, ["proxy/build_transfers.py"], SANITIZE)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "LD_PRELOAD": sanitizer_library("asan"),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    options += ["-k", "not test_an_inbox_that_never_becomes_empty"]  # AddressSanitizer keeps freed memory
    program = [sys.executable, str(PROGRAMS / "under_asan.py"), str(tmp_path / "proxyccl.proxy._transfers.so")]
    result = subprocess.run(
        [*program, *options, *(f"tests/transfers/{name}" for name in files)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Sanitizer" not in result.stderr
