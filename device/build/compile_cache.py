"""A cache of compiled kernels on disk, keyed by everything that goes into them.

The key covers the source with its includes, the options, the compiler and every shipped header, so a cached file
is never stale. A file ends with its length and digest: one that is damaged is compiled again. It is written under
another name and moved into place. Threads and processes that need the same source at once wait for the first of them,
which compiles it. Loaded code runs as this user, so neither directory nor file may be another user's.
"""

from __future__ import annotations

import atexit
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
"""Headers with the names of CUDA's own, for targets that lack those."""
RTC_NAMES_DIR = INCLUDE_DIR / "rtc_names"
"""Headers with the names of libc's and C++'s, for run-time compilers, which have none."""
KERNEL_DIR = Path(__file__).parents[1] / "kernels"

T = TypeVar("T")

_log = logging.getLogger("proxyccl")
_MARK = b"proxyccl"
_SEAL = struct.Struct("<8sQ32s")
"""Mark, length of the content in bytes, and its SHA-256. A seal at a file's end does no harm: the loader
of a shared object reads no further than its last section.
"""


def sealed(content: bytes) -> bytes:
    """A content with its seal."""
    return content + _SEAL.pack(_MARK, len(content), hashlib.sha256(content).digest())


def unsealed(data: bytes) -> bytes | None:
    """The inverse of `sealed`; None if anything was cut off, added or changed."""
    content = data[: -_SEAL.size]
    return content if data == sealed(content) else None


def shipped_source(file: str, kernel: str, dtype: str | None, op: str | None) -> str:
    """The source of a shipped kernel: its file, and an instance for an element type if it has them."""
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
    """``$PROXYCCL_CACHE``, else ``proxyccl`` in the user's cache directory, else a directory of ``$TMPDIR``."""
    explicit = os.environ.get("PROXYCCL_CACHE")
    return Path(explicit) if explicit else user_directory("XDG_CACHE_HOME", ".cache", "cache")


@functools.cache
def headers_digest() -> str:
    """A digest of all shipped headers and kernels."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE_DIR.rglob("*.h*"), *KERNEL_DIR.rglob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _name(key_parts: tuple[str, ...], suffix: str) -> str:
    return hashlib.sha256("\0".join((*key_parts, headers_digest())).encode()).hexdigest()[:40] + suffix


_building: dict[str, threading.Lock] = {}
_unsaved: dict[str, bytes] = {}  # files that the cache could not take, by their name there
os.register_at_fork(after_in_child=_building.clear)  # the threads that held them do not exist


def loaded_object(key_parts: tuple[str, ...], build: Callable[[], bytes], load: Callable[[Path], T]) -> T:
    """The result of `load(path)` for the shared object of this key, which `build()` makes unless it is cached.

    If the cache can't be used, the file is this process's own, and the first time a warning says so.

    Raises:
        UntrustedPathError: other users can change the directory that ``PROXYCCL_CACHE`` names.
        CompileError: no file can be written anywhere, or none can be loaded.
    """
    name = _name(key_parts, ".so")
    with _building.setdefault(name, threading.Lock()):
        build = _once(name, build)
        try:
            path, _ = _found_or_built(_open_cache(make=True), cache_dir() / name, build)
            return load(path)
        except OSError as error:
            reason = _done_without(error)
        try:
            _unsaved[name] = build()
            own = _own_directory()
            path, _ = _found_or_built(_keep_open(open_private(own, make=True)), own / name, build)
            return load(path)
        except OSError as error:
            raise CompileError(f"{reason}, nor can a temporary file: {error}; set PROXYCCL_CACHE") from None


def _once(name: str, build: Callable[[], bytes]) -> Callable[[], bytes]:
    """A function that builds when it is first called, and does not rebuild a file that could not be saved before."""
    return functools.cache(lambda: _unsaved[name] if name in _unsaved else build())


def _found_or_built(directory: int, path: Path, build: Callable[[], bytes]) -> tuple[Path, bytes]:
    """A whole file's contents, and a path that stays in the directory that was checked, even if names change."""
    content = _found(directory, path)
    if content is None:
        with one_builder(directory, path) as waited:
            content = _found(directory, path) if waited else None
            if content is None:
                content = build()
                write_private(directory, path, sealed(content))
    return Path(f"/proc/self/fd/{directory}/{path.name}"), content


def _found(directory: int, path: Path) -> bytes | None:
    """A file's contents. None if it does not exist, or is damaged or untrusted, which is logged."""
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
    """A descriptor of the cache's directory.

    Raises:
        UntrustedPathError: other users can change the directory, which ``PROXYCCL_CACHE`` names.
        OSError: it can't be used.
    """
    named = bool(os.environ.get("PROXYCCL_CACHE"))
    try:
        return _keep_open(open_private(cache_dir(), "PROXYCCL_CACHE" if named else "cache", make=make))
    except UntrustedPathError as error:
        if named:  # the user's own choice
            raise
        raise PermissionError(str(error)) from error


_open: dict[tuple[int, int], int] = {}  # by device and inode


def _keep_open(descriptor: int) -> int:
    """A descriptor of the same directory that stays open, so that paths of loaded objects through it stay unique."""
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
def _own_directory() -> Path:
    """A directory of this process, removed at its end."""
    import shutil
    import tempfile

    directory, owner = tempfile.mkdtemp(prefix="proxyccl-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork ends too
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return Path(directory)


def shipped_options(compiler: Compiler, architecture: str) -> tuple[str, ...]:
    """The compiler options of shipped kernels for an architecture."""
    return (*compiler.options(architecture), f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}")


def compiled_image(compiler: Compiler, source: str, options: tuple[str, ...]) -> bytes:
    """A GPU's image of a source that includes only headers of this library, compiled unless it is cached.

    If the cache can't be used, this process keeps it in memory, and the first time a warning says so.

    Raises:
        UntrustedPathError: other users can change the directory that ``PROXYCCL_CACHE`` names.
        CompileError: it does not compile.
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
    """Whether `compiled_image` would find it compiled. Raises UntrustedPathError as that does."""
    name = _image_name(compiler, source, options)
    try:
        return name in _unsaved or _found(_open_cache(make=False), cache_dir() / name) is not None
    except OSError:  # compiled_image reports it
        return False


def _image_name(compiler: Compiler, source: str, options: tuple[str, ...]) -> str:
    return _name((compiler.runtime, compiler.version(), source, *options), ".image")
