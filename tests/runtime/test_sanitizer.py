"""ThreadSanitizer over the shipped kernels, the rings, the engine and the streams of the host runtime.

Ranks are threads of one process, GPU threads are the sanitizer's fibers. Nothing is suppressed: any report fails the
test. The extension modules are built once more, instrumented, and kernels are instrumented as they are compiled at run
time. Only the switching of fibers is not: it tells the sanitizer about threads and barriers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxyccl.device.host.compiler import find_compiler
from support.once import made_once, shared_directory
from support.paths import PROGRAMS, ROOT

pytestmark = [pytest.mark.host_only(reason="the host runtime's own"), pytest.mark.own_proxy(reason="sees one process")]

PROGRAM = PROGRAMS / "under_tsan.py"
SANITIZE = ("-fsanitize=thread", "-g1", "-O1")  # reports need lines and functions, and no variables
EXIT_CODE = 66
TIMEOUT = 300.0


def sanitizer_library() -> str:
    """The sanitizer's runtime, which must be in the process from its start."""
    name = subprocess.run(
        [*find_compiler(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    if not Path(name).is_absolute():
        pytest.fail("ThreadSanitizer is missing: install libtsan (Debian: libtsan2, which g++ brings with it)")
    return name


def declared_extension(script: str, directory: Path) -> Any:
    """The extension that a build script declares, its C source generated under `directory`."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ffi.distutils_extension(str(directory), verbose=False)


def build_instrumented(directory: Path) -> None:
    """Builds the extension modules of the tree under test, with everything instrumented except the fibers."""
    extensions = [
        declared_extension(script, directory) for script in ("device/build_native.py", "proxy/build_engine.py")
    ]

    def build(command: list[str]) -> None:
        subprocess.run([*find_compiler(), *command], cwd=ROOT, check=True, timeout=TIMEOUT)

    def compile_command(extension: Any, source: str) -> list[str]:
        flags = [f"-I{path}" for path in (*extension.include_dirs, sysconfig.get_path("include"))]
        flags += [f"-D{name}={value}" for name, value in extension.define_macros]
        flags += extension.extra_compile_args
        if Path(source).name != "fibers.cpp":
            flags += SANITIZE
        if Path(source).is_relative_to(directory):  # conversions of arguments: nothing to optimise
            flags.append("-O0")
        language = "c++" if source.endswith(".cpp") else "c"
        return ["-fPIC", *flags, "-x", language, "-c", source, "-o", str(object_of(source))]

    def object_of(source: str) -> Path:
        return directory / f"{Path(source).stem}.o"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, [compile_command(e, source) for e in extensions for source in e.sources]))
    for extension in extensions:
        objects = [str(object_of(source)) for source in extension.sources]
        build(["-shared", "-fsanitize=thread", *objects, "-o", str(directory / f"{extension.name}.so"), "-pthread"])


@pytest.fixture(scope="session")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(shared_directory(tmp_path_factory) / "instrumented", build_instrumented)


def run(directory: Path, *scenarios: str) -> subprocess.CompletedProcess[str]:
    command, *options = find_compiler()
    environment = {
        **os.environ,
        "CXX": " ".join([shutil.which(command) or command, *options]),  # under_tsan.py needs its path
        "LD_PRELOAD": sanitizer_library(),
        # Without its interceptor of thread-local memory, which takes a block 16 bytes after a page's start for one of
        # an old C library and crashes on the size that it reads there. The allocator reports that memory to the
        # sanitizer.
        "TSAN_OPTIONS": f"exitcode={EXIT_CODE}:intercept_tls_get_addr=0",
        "PROXYCCL_RUNTIME": "host",
        "PROXYCCL_CXXFLAGS": " ".join(SANITIZE),
        "PROXYCCL_REPORTS": "off",  # they copy counters while hanging kernels may still count: intended races
    }
    program = [sys.executable, str(PROGRAM), str(directory), *scenarios]
    return subprocess.run(program, capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False)


@pytest.mark.parametrize(
    "scenarios",
    [
        ("all_reduce", "all_reduce_on_streams", "moves", "symmetric_memory", "transfers", "schedules"),
        (
            *("expert_parallel", "expert_layouts"),
            *("ring", "copy_streams", "pinned_memory", "channels", "grid", "timeout"),
        ),
        # A layer launches its kernels, and the copy streams' proxy carries out its schedules.
        pytest.param(("dispatch_combine",), marks=pytest.mark.full),
    ],
    ids=["collectives", "experts, channels and streams", "dispatch and combine"],
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
}


def test_every_planted_race_is_reported(instrumented: Path) -> None:
    result = run(instrumented, *PLANTED)
    assert result.stdout.splitlines() == [f"{scenario} {EXIT_CODE}" for scenario in PLANTED], result.stderr
    for scenario, where in PLANTED.items():
        (reports,) = re.findall(rf"^{scenario}\n(.*?)(?=^planted_|\Z)", result.stderr, re.DOTALL | re.MULTILINE)
        assert "WARNING: ThreadSanitizer: data race" in reports, result.stderr
        assert where in reports, result.stderr
