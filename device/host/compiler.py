"""Compiles kernels for the host runtime with the machine's C++ compiler."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from proxyccl.device.build.compile_cache import CUDA_NAMES_DIR, INCLUDE_DIR, KERNEL_DIR, cache_dir, loaded_object
from proxyccl.device.build.kernel_names import text_with_exports
from proxyccl.device.errors import CompileError
from proxyccl.device.host.cuda_source import for_the_host, missing
from proxyccl.device.host.shipped_libraries import ships_kernels

T = TypeVar("T")

_LIMIT = 600.0  # seconds that a compiler may take
_PATIENCE = 1.0  # seconds of compiling before a process prints a message
_LARGEST_FRAME = 96 << 10  # bytes of a function's stack frame; a kernel's thread has a stack of 128 KiB


def find_compiler() -> list[str]:
    """Returns the C++ compiler's command. Raises CompileError, which says what to install, if there is none."""
    explicit = os.environ.get("CXX", "").split()
    for command in [explicit] if explicit else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    needs, otherwise = "kernels of your own need", ""
    if not ships_kernels():
        needs = "kernels, which this installation compiles at their first use, need"
        otherwise = " Or install the wheel, which ships the library's own kernels compiled."
    raise CompileError(
        f"{needs} a C++ compiler on the host runtime, and none was found. "
        "Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; Alpine: apk add g++) "
        f"or name it in CXX.{otherwise}"
    )


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """Returns the first line of the compiler's version."""
    out = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return out.stdout.split("\n", 1)[0]


def load_source(
    source: str, names: list[str], options: tuple[str, ...], include_dirs: tuple[str, ...], load: Callable[[Path], T]
) -> T:
    """Returns `load(path)` of a source's shared object, which is compiled unless it is in the cache. Raises
    CompileError if there is no compiler, or the source does not compile; the error has the compiler's messages.
    """
    command = _command(options, include_dirs)
    key = text = text_with_exports(for_the_host(source), names)
    if include_dirs or _may_include(options):  # the key includes the text of other projects' headers
        key = _run([*command, "-E"], text, "preprocess")
    return _loaded(key, command, lambda: _compiled(command, text, ", ".join(names)), load)


def load_shipped(
    source: str, name: str, options: tuple[str, ...], load: Callable[[Path], T], *, compiled_only: bool = False
) -> T:
    """Returns `load(path)` of a shipped kernel's shared object, like `load_source`. With `compiled_only`, raises
    CompileError unless the kernel is in the cache."""
    command = _command((*options, f"-I{KERNEL_DIR}"), ())
    text = text_with_exports(source, ())

    def build() -> bytes:
        if compiled_only:
            how = f" with {' '.join(options)}" if options else ""
            raise CompileError(f"kernel {name} was not compiled beforehand{how}; run: proxyccl compile")
        return _compiled(command, text, name)

    # The key of `loaded_object` includes shipped headers. Shipped kernels include other headers only if options say so.
    key = _run([*command, "-E"], text, "preprocess") if _may_include(options) else text
    return _loaded(key, command, build, load)


def _may_include(options: tuple[str, ...]) -> bool:
    """Whether options may make the compiler include other headers: all options may, except -O, -g and -fsanitize."""
    return not all(re.fullmatch(r"-(O|g)\w?|-fsanitize=\w+", option) for option in options)


def _loaded(key: str, command: list[str], build: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    return loaded_object((key, *command, compiler_version(tuple(find_compiler()))), build, load)


def _compiled(command: list[str], text: str, kernels: str) -> bytes:
    # The compiler writes to a temporary directory, because its exit status does not tell a full disk from an error.
    with tempfile.TemporaryDirectory(prefix="proxyccl-") as directory:
        made = Path(directory, "kernels.so")
        _run([*command, "-o", str(made)], text, "compile", lambda: _announce(kernels))
        return made.read_bytes()


def preprocessed(source: str, options: tuple[str, ...], include_dirs: tuple[str, ...]) -> str:
    """Returns a preprocessed source, in which `kernel_names` finds all kernels."""
    command = _command(options, include_dirs)
    return _run([*command, "-E", "-DPROXYCCL_FIND_KERNELS"], text_with_exports(source, ()), "preprocess")


def _command(options: tuple[str, ...], include_dirs: tuple[str, ...]) -> list[str]:
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{INCLUDE_DIR}", f"-I{CUDA_NAMES_DIR}"]
    flags.append(f"-Werror=frame-larger-than={_LARGEST_FRAME}")
    flags += [f"-I{directory}" for directory in include_dirs]
    return [*find_compiler(), *flags, *options, "-x", "c++", "-"]


def _announce(kernels: str) -> None:
    print(
        f"proxyccl: compiling {kernels} for the CPU, at first use; kept in {cache_dir()}", file=sys.stderr, flush=True
    )


_compiling = 0.0  # seconds of compiling in this process, summed over threads


def _run(command: list[str], text: str, action: str, announce: Callable[[], None] = lambda: None) -> str:
    """Runs the compiler and returns its output. Calls `announce` if this process has compiled for a second in all."""
    global _compiling  # noqa: PLW0603
    began = time.monotonic()
    with open(os.memfd_create("kernel source"), "w+b") as source:  # `communicate` can't resume writing to a pipe
        source.write(text.encode())
        source.seek(0)
        process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            try:
                out, err = process.communicate(timeout=max(0.0, _PATIENCE - _compiling))
            except subprocess.TimeoutExpired:
                announce()
                out, err = process.communicate(timeout=_LIMIT)
        except BaseException:
            process.kill()
            raise
    _compiling += time.monotonic() - began
    if process.returncode:
        raise CompileError(f"{command[0]} could not {action} the kernel source{missing(err)}", err)
    return out
