"""Builds the extension modules with a sanitizer."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxyccl.device.host.compiler import find_compiler
from support.paths import ROOT

_TIMEOUT = 300.0


def sanitizer_library(name: str) -> str:
    """Returns the path of a sanitizer's runtime library ("tsan" or "asan"), which a process must load at its start."""
    library = subprocess.run(
        [*find_compiler(), f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.fail(f"lib{name} is missing: install it (Debian: g++ brings it with it)")
    return library


def _declared_extension(script: str, directory: Path) -> Any:
    """Returns the extension that a build script declares, after generating its C source under `directory`."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ffi.distutils_extension(str(directory), verbose=False)


def build_instrumented(
    directory: Path, scripts: Sequence[str], sanitize: Sequence[str], plain: Sequence[str] = ()
) -> None:
    """Builds extension modules of the tree under test with a sanitizer.

    Args:
        directory: directory for the built files, each named after its module.
        scripts: the build scripts that declare the modules.
        sanitize: compiler options that select the sanitizer.
        plain: source files that are compiled without these options.
    """
    extensions = [_declared_extension(script, directory) for script in scripts]

    def build(command: list[str]) -> None:
        subprocess.run([*find_compiler(), *command], cwd=ROOT, check=True, timeout=_TIMEOUT)

    def object_of(extension: Any, source: str) -> Path:
        return directory / f"{extension.name}-{Path(source).stem}.o"

    def compile_command(extension: Any, source: str) -> list[str]:
        flags = [f"-I{path}" for path in (*extension.include_dirs, sysconfig.get_path("include"))]
        flags += [f"-D{name}={value}" if value is not None else f"-D{name}" for name, value in extension.define_macros]
        flags += extension.extra_compile_args
        if Path(source).name not in plain:
            flags += sanitize
        if Path(source).is_relative_to(directory):  # generated argument conversions
            flags.append("-O0")
        language = "c++" if source.endswith(".cpp") else "c"
        return ["-fPIC", *flags, "-x", language, "-c", source, "-o", str(object_of(extension, source))]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, [compile_command(e, source) for e in extensions for source in e.sources]))
    for extension in extensions:
        objects = [str(object_of(extension, source)) for source in extension.sources]
        linked = ["-shared", sanitize[0], *objects, "-o", str(directory / f"{extension.name}.so"), "-pthread"]
        build(linked)
