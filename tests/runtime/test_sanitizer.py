"""Runs the shipped kernels, the rings, the engines and the host runtime's streams under ThreadSanitizer.

Ranks are threads of one process, and GPU threads are the sanitizer's fibers. Any report fails the test, except reports
of glibc's reuse of ended threads' memory (IN_GLIBC). The tests build instrumented extension modules and compile
instrumented kernels. Only fibers.cpp, which switches between fibers, is not instrumented; it tells the sanitizer about
threads and barriers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxyccl.device.host.compiler import find_compiler
from support.instrumented import build_instrumented, sanitizer_library
from support.once import made_once, shared_directory
from support.paths import PROGRAMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host_only(reason="the host runtime's own"),
    pytest.mark.own_proxy(reason="sees one process"),
]

PROGRAM = PROGRAMS / "under_tsan.py"
SANITIZE = ("-fsanitize=thread", "-g1")  # -g1 adds functions and lines to reports.
ENGINE, KERNELS = (*SANITIZE, "-O1"), (*SANITIZE, "-O0")  # Optimising kernels would take longer than running them.
SCRIPTS = ("device/build_native.py", "proxy/build_engine.py", "proxy/build_transfers.py")
EXIT_CODE = 66
IN_GLIBC = "race:_dl_deallocate_tls\n"
"""glibc gives the stack and the thread-local memory of an ended thread to a new thread, under a lock that the sanitizer
does not see because glibc is not instrumented.
"""
TIMEOUT = 300.0


@pytest.fixture(scope="session")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(directory: Path) -> None:
        build_instrumented(directory, SCRIPTS, ENGINE, plain=("fibers.cpp",))

    return made_once(shared_directory(tmp_path_factory) / "instrumented", build)


def run(directory: Path, *scenarios: str) -> subprocess.CompletedProcess[str]:
    command, *options = find_compiler()
    suppressions = directory / "suppressions"
    suppressions.write_text(IN_GLIBC)
    environment = {
        **os.environ,
        "CXX": " ".join([shutil.which(command) or command, *options]),  # under_tsan.py needs the compiler's full path
        "LD_PRELOAD": sanitizer_library("tsan"),
        # The sanitizer's interceptor of thread-local memory is off, because it crashes on blocks that begin 16 bytes
        # after a page's start: the interceptor mistakes such blocks for those of an old C library.
        "TSAN_OPTIONS": f"exitcode={EXIT_CODE}:intercept_tls_get_addr=0:suppressions={suppressions}",
        "PROXYCCL_RUNTIME": "host",
        "PROXYCCL_CXXFLAGS": " ".join(KERNELS),
        "PROXYCCL_REPORTS": "off",  # a report would read counters while kernels write them
    }
    program = [sys.executable, str(PROGRAM), str(directory), *scenarios]
    return subprocess.run(program, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False)


@pytest.mark.parametrize(
    "scenarios",
    [
        (
            "all_reduce",
            "lines",
            "all_reduce_on_streams",
            "moves",
            "symmetric_memory",
            "transfers",
            "schedules",
            "agents",
        ),
        ("expert_parallel", "ring", "copy_streams", "pinned_memory", "channels", "grid", "timeout"),
        # These scenarios run only with --full, because the scenarios above cover the same kernels and schedules.
        pytest.param(("expert_layouts", "dispatch_combine"), marks=pytest.mark.full),
    ],
    ids=["collectives", "experts, channels and streams", "layouts, dispatch and combine"],
)
def test_no_race_is_found_in(instrumented: Path, scenarios: tuple[str, ...]) -> None:
    result = run(instrumented, *scenarios)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{scenario} 0" for scenario in scenarios]
    assert "ThreadSanitizer" not in result.stderr


PLANTED = {
    "planted_missing_barrier": "in reverse",
    "planted_missing_grid_barrier": "in exchange",
    "planted_relaxed_signal": "in pass",
    "planted_missing_meeting": "in proxyccl_memmove",
    "planted_reused_source": "proxyccl_host_copy",
    "planted_reused_outbox": "copy_transfer",
    "planted_write_beside_a_schedule": "proxyccl_host_set",
    "planted_read_before_the_end": "copy_piece",
}


def test_every_planted_race_is_reported(instrumented: Path) -> None:
    result = run(instrumented, *PLANTED)
    assert result.stdout.splitlines() == [f"{scenario} {EXIT_CODE}" for scenario in PLANTED], result.stderr
    for scenario, where in PLANTED.items():
        (reports,) = re.findall(rf"^{scenario}\n(.*?)(?=^planted_|\Z)", result.stderr, re.DOTALL | re.MULTILINE)
        assert "WARNING: ThreadSanitizer: data race" in reports, result.stderr
        assert where in reports, result.stderr
