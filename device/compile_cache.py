"""A cache of compiled kernels on disk, keyed by everything that goes into them.

The key covers the source with what it includes, the options, the compiler and every shipped header, so a cached file
is never stale. A file is written under another name and moved into place: processes that compile the same source at
once do no harm. Threads that do so wait for the first of them.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from proxyccl.device.driver import Compiler
from proxyccl.device.dtypes import DTYPES
from proxyccl.device.errors import CompileError

INCLUDE_DIR = Path(__file__).parent / "include"
KERNEL_DIR = Path(__file__).parent / "kernels"


def shipped_source(file: str, kernel: str, dtype: str | None, op: str | None) -> str:
    """What is compiled for a shipped kernel: its file, and an instance for an element type where it has them."""
    name = "_".join(filter(None, (kernel, dtype, op)))
    source = f'#include "{file}"\n'
    if dtype is None:
        return source
    element = DTYPES[dtype]
    source += element.c_check()
    if op is None:
        return source + f"PROXYCCL_TYPED_KERNEL({kernel}, {name}, {element.c_name})\n"
    return source + f"PROXYCCL_REDUCTION({kernel}, {name}, {element.c_name}, {op.capitalize()})\n"


def cache_dir() -> Path:
    """``$PROXYCCL_CACHE``, else ``proxyccl`` in the user's cache directory."""
    explicit = os.environ.get("PROXYCCL_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxyccl"


@functools.cache
def headers_digest() -> str:
    """A digest of all shipped headers and kernels."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE_DIR.rglob("*.h*"), *KERNEL_DIR.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _entry(key_parts: tuple[str, ...], suffix: str) -> Path:
    digest = hashlib.sha256("\0".join((*key_parts, headers_digest())).encode()).hexdigest()[:40]
    return cache_dir() / f"{digest}{suffix}"


_building: dict[str, threading.Lock] = {}


def cached(key_parts: tuple[str, ...], suffix: str, build: Callable[[Path], None]) -> Path:
    """The file that `build(path)` makes for this key, built if it is not there yet.

    Where the cache can't be written, the file is this process's own, which a warning tells once.

    Raises:
        CompileError: no file can be written anywhere.
    """
    target = _entry(key_parts, suffix)
    with _building.setdefault(target.stem, threading.Lock()):
        try:
            if not target.exists():
                write_whole(target, build)
        except OSError as error:
            reason = f"the cache of compiled kernels in {target.parent} can't be used ({error})"
            return _own_file(target.name, build, reason)
    return target


def _own_file(name: str, build: Callable[[Path], None], reason: str) -> Path:
    if not _own_directory.cache_info().currsize:
        warnings.warn(f"{reason}; this process compiles for itself; set PROXYCCL_CACHE", RuntimeWarning, 3)
    try:
        own = _own_directory() / name
        if not own.exists():
            write_whole(own, build)
    except OSError as error:
        raise CompileError(f"{reason}, nor can a temporary file: {error}; set PROXYCCL_CACHE") from None
    return own


@functools.cache
def _own_directory() -> Path:
    """A directory of this process that goes with it."""
    directory, owner = tempfile.mkdtemp(prefix="proxyccl-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork ends too
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return Path(directory)


def write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Has `write(path)` write a file under another name, which begins with a dot, and moves it into place behind that.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def shipped_options(compiler: Compiler, architecture: str) -> tuple[str, ...]:
    """What shipped kernels are compiled with for an architecture."""
    return (*compiler.options(architecture), f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}")


def compiled_image(compiler: Compiler, source: str, options: tuple[str, ...]) -> Path:
    """A GPU's image of a source that includes headers of this library alone, compiled unless it is there."""

    def build(target: Path) -> None:
        target.write_bytes(compiler.compile(source, options))

    return cached(_image_key(compiler, source, options), _IMAGE, build)


def image_is_there(compiler: Compiler, source: str, options: tuple[str, ...]) -> bool:
    """Whether `compiled_image` would find it compiled."""
    return _entry(_image_key(compiler, source, options), _IMAGE).exists()


_IMAGE = ".image"


def _image_key(compiler: Compiler, source: str, options: tuple[str, ...]) -> tuple[str, ...]:
    return (compiler.runtime, compiler.version(), source, *options)
