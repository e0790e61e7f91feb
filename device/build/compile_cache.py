"""A cache of compiled kernels on disk.

The key covers the source with its includes, the options, the compiler and every shipped header, so a cached file is
never stale. A file ends with its length and digest, so a damaged file is detected and compiled again. A new file is
written under a temporary name and moved into place. If several threads or processes need a source at the same time, the
first compiles it and the others wait. Cached code runs as this user, who must own the directory and the files.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from proxyccl.device.arrays.dtypes import DTYPES
from proxyccl.device.build.one_builder import one_builder
from proxyccl.device.driver import Compiler
from proxyccl.device.errors import CompileError, UntrustedPathError
from proxyccl.device.process.private_directories import open_private, read_private, write_private
from proxyccl.device.process.user_directories import user_directory

INCLUDE_DIR = Path(__file__).parents[1] / "include"
CUDA_NAMES_DIR = INCLUDE_DIR / "cuda_names"
"""Replacements for CUDA's headers, for targets that lack CUDA's headers."""
RTC_NAMES_DIR = INCLUDE_DIR / "rtc_names"
"""Replacements for headers of libc and C++, which run-time compilers lack."""
KERNEL_DIR = Path(__file__).parents[1] / "kernels"

T = TypeVar("T")

_log = logging.getLogger("proxyccl")
_MARK = b"proxyccl"
_SEAL = struct.Struct("<8sQ32s")
"""Mark, length of the content in bytes, and its SHA-256. The loader of a shared object ignores a seal at a file's end,
because it does not read past the last section.
"""


def sealed(content: bytes) -> bytes:
    """Returns the content with its seal appended."""
    return content + _SEAL.pack(_MARK, len(content), hashlib.sha256(content).digest())


def unsealed(data: bytes) -> bytes | None:
    """Returns the content of sealed data; None if the data was cut off, extended or changed."""
    content = data[: -_SEAL.size]
    return content if data == sealed(content) else None


def shipped_source(file: str, kernel: str, dtype: str | None, op: str | None) -> str:
    """Returns the source of a shipped kernel: its file, and the instance for the element type if there is one."""
    name = "_".join(filter(None, (kernel, dtype, op)))
    source = f'#include "{file}"\n'
    if dtype is None:
        return source
    element = DTYPES[dtype]
    source += element.c_check()
    if op is None:
        return source + f"PROXYCCL_TYPED_KERNEL({kernel}, {name}, {element.c_name or element.plan_name})\n"
    return source + f"PROXYCCL_REDUCTION({kernel}, {name}, {element.c_name}, {op.capitalize()})\n"


def cache_dir() -> Path:
    """Returns ``$PROXYCCL_CACHE``, else ``proxyccl`` in the user's cache directory, else a directory of ``$TMPDIR``."""
    explicit = os.environ.get("PROXYCCL_CACHE")
    return Path(explicit) if explicit else user_directory("XDG_CACHE_HOME", ".cache", "cache")


@functools.cache
def headers_digest() -> str:
    """Returns a digest of all shipped headers and kernels."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE_DIR.rglob("*.h*"), *KERNEL_DIR.rglob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _name(key_parts: tuple[str, ...], suffix: str) -> str:
    return hashlib.sha256("\0".join((*key_parts, headers_digest())).encode()).hexdigest()[:40] + suffix


_building: dict[str, threading.Lock] = {}
_unsaved: dict[str, bytes] = {}  # files that could not be saved in the cache, by name
os.register_at_fork(after_in_child=_building.clear)  # a fork's child lacks the threads that would release the locks


def loaded_object(key_parts: tuple[str, ...], build: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    """Returns `load(path)` for the shared object with this key, which `build()` makes unless the cache has it.

    If the cache can't be used, this process keeps the file in memory, and a warning is issued once. Raises
    UntrustedPathError if other users can change the directory that ``PROXYCCL_CACHE`` names, and CompileError if the
    file can't be loaded.
    """
    name = _name(key_parts, ".so")
    with _building.setdefault(name, threading.Lock()):
        build = _once(name, build)
        try:
            path, _ = _found_or_built(_open_cache(make=True), cache_dir() / name, build)
            return load(path)
        except OSError as error:
            reason = _done_without(error)
        _unsaved[name] = build()
        try:
            return load(_file_in_memory(name))
        except OSError as error:
            raise CompileError(f"{reason}, nor can a file in memory: {error}; set PROXYCCL_CACHE") from None


def _once(name: str, build: Callable[[], bytes]) -> Callable[[], bytes]:
    """Returns a function that returns an earlier result that could not be saved, or else calls `build` once."""
    return functools.cache(lambda: _unsaved[name] if name in _unsaved else build())


def _found_or_built(directory: int, path: Path, build: Callable[[], bytes]) -> tuple[Path, bytes]:
    content = _found(directory, path)
    if content is None:
        with one_builder(directory, path) as waited:
            content = _found(directory, path) if waited else None
            if content is None:
                content = build()
                write_private(directory, path, sealed(content))
    return Path(f"/proc/self/fd/{directory}/{path.name}"), content


def _found(directory: int, path: Path) -> bytes | None:
    """Returns a file's contents; None if the file is missing or, with a logged warning, damaged or untrusted."""
    try:
        content = unsealed(read_private(directory, path))
    except FileNotFoundError:
        return None
    except (UntrustedPathError, PermissionError) as error:
        _log.warning("not used from the cache of compiled kernels: %s", error)
        return None
    if content is None:
        _log.warning("the cached kernel %s is damaged; it is compiled again", path)
    return content


def _open_cache(*, make: bool) -> int:
    """Returns a descriptor of the cache's directory. Raises UntrustedPathError if ``PROXYCCL_CACHE`` names a directory
    that other users can change, and OSError if the directory can't be used.
    """
    named = bool(os.environ.get("PROXYCCL_CACHE"))
    try:
        return _keep_open(open_private(cache_dir(), "PROXYCCL_CACHE" if named else "cache", make=make))
    except UntrustedPathError as error:
        if named:  # an error, because the user chose this directory
            raise
        raise PermissionError(str(error)) from error


_open: dict[tuple[int, int], int] = {}  # descriptors of directories, by device and inode


def _keep_open(descriptor: int) -> int:
    """Returns a directory's descriptor, which stays open to keep the paths of loaded objects valid and unique."""
    info = os.fstat(descriptor)
    identity = info.st_dev, info.st_ino
    kept = _open.setdefault(identity, descriptor)
    if kept != descriptor:
        os.close(descriptor)
    return kept


_without: set[Path] = set()  # caches for which a warning was issued


def _done_without(error: OSError) -> str:
    directory = cache_dir()
    reason = f"the cache of compiled kernels in {directory} can't be used ({error})"
    if directory not in _without:
        _without.add(directory)
        warnings.warn(f"{reason}; this process compiles for itself; set PROXYCCL_CACHE", RuntimeWarning, 4)
    return reason


@functools.cache
def _file_in_memory(name: str) -> Path:
    """Returns the path of a memfd with the contents of a file that could not be saved. The descriptor stays open, so
    that no other file gets this path."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(_unsaved[name])
    return Path(f"/proc/self/fd/{descriptor}")


def shipped_options(compiler: Compiler, architecture: str) -> tuple[str, ...]:
    """Returns the compiler options of shipped kernels for an architecture."""
    return (*compiler.options(architecture), f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}")


def compiled_image(compiler: Compiler, source: str, options: tuple[str, ...]) -> bytes:
    """Returns the GPU image of a source that includes only this library's headers, from the cache or by compiling.

    If the cache can't be used, this process keeps the image in memory, and a warning is issued once. Raises
    UntrustedPathError if other users can change the directory that ``PROXYCCL_CACHE`` names, and CompileError if the
    source does not compile.
    """
    name = _image_name(compiler, source, options)
    with _building.setdefault(name, threading.Lock()):
        build = _once(name, lambda: compiler.compile(source, options))
        try:
            _, image = _found_or_built(_open_cache(make=True), cache_dir() / name, build)
        except OSError as error:
            _done_without(error)
            image = _unsaved[name] = build()
        return image


def image_is_there(compiler: Compiler, source: str, options: tuple[str, ...]) -> bool:
    """Whether `compiled_image` would find the image in the cache."""
    name = _image_name(compiler, source, options)
    try:
        return name in _unsaved or _found(_open_cache(make=False), cache_dir() / name) is not None
    except OSError:  # compiled_image will report the error
        return False


def _image_name(compiler: Compiler, source: str, options: tuple[str, ...]) -> str:
    return _name((compiler.runtime, compiler.version(), source, *options), ".image")
