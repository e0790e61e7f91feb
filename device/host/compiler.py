"""The machine's C++ compiler, which makes kernels for the host runtime."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from proxyccl.device.build.compile_cache import INCLUDE_DIR, loaded_object
from proxyccl.device.build.kernel_names import text_with_exports
from proxyccl.device.errors import CompileError

T = TypeVar("T")


def find_compiler() -> list[str]:
    """The C++ compiler's command.

    Raises:
        CompileError: there is no compiler; the message says what to install.
    """
    explicit = os.environ.get("CXX", "").split()
    for command in [explicit] if explicit else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CompileError(
        "kernels of your own need a C++ compiler on the host runtime, and none was found. "
        "Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; Alpine: apk add g++) "
        "or name it in CXX."
    )


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """The first line of the compiler's version."""
    out = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return out.stdout.split("\n", 1)[0]


def load_source(
    source: str, names: list[str], options: tuple[str, ...], include_dirs: tuple[str, ...], load: Callable[[Path], T]
) -> T:
    """Compiles a source into a shared object, unless it is in the cache, and returns the result of `load(path)`.

    Raises:
        CompileError: no compiler, or the source does not compile; carries the compiler's messages.
    """
    compiler, flags = _command(options, include_dirs)
    text = text_with_exports(source, names)

    def build() -> bytes:
        # A compiler's failure does not say that the disk is full. So it writes to its own temporary directory, and an
        # error of our own write shows that the cache can't be used.
        with tempfile.TemporaryDirectory(prefix="proxyccl-") as directory:
            made = Path(directory, "kernels.so")
            _run([*compiler, *flags, "-o", str(made)], text, "compile")
            return made.read_bytes()

    key = text
    if include_dirs or options:  # foreign headers may be included, and may change
        key = _run([*compiler, *flags, "-E"], text, "preprocess")
    return loaded_object((key, *flags, *compiler, compiler_version(tuple(compiler))), build, load)


def preprocessed(source: str, options: tuple[str, ...], include_dirs: tuple[str, ...]) -> str:
    """A source in which `kernel_names` finds kernels that macros make."""
    compiler, flags = _command(options, include_dirs)
    return _run([*compiler, *flags, "-E", "-DPROXYCCL_FIND_KERNELS"], text_with_exports(source, ()), "preprocess")


def _command(options: tuple[str, ...], include_dirs: tuple[str, ...]) -> tuple[list[str], list[str]]:
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{INCLUDE_DIR}"]
    flags += [f"-I{directory}" for directory in include_dirs]
    return find_compiler(), [*flags, *options, "-x", "c++", "-"]


def _run(command: list[str], text: str, action: str) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode:
        raise CompileError(f"{command[0]} could not {action} the kernel source", result.stderr)
    return result.stdout
