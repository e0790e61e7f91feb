"""Hides the differences between pyverbs' versions from all other modules.

Version 44 (Debian 12) has the enumerators in `pyverbs.enums`; later versions have the enumerators in
`pyverbs.libibverbs_enums`. If a newer Cython built pyverbs, enumerators exist only as members of the enums' classes.
From version 61 on, a queue pair exposes its address; for older versions the engine finds the address. The attributes
`PD.pd`, `Context.context` and `CQ.cq` are never read, because before version 61 reading them crashes the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from proxyccl.device.errors import ProxyCCLError, ResourceError, RuntimeUnavailableError
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

INSTALL = "apt install python3-pyverbs ibverbs-providers (Debian, Ubuntu), dnf install python3-pyverbs (Fedora)"
"""How to install pyverbs. The package on PyPI is not suggested, because it has only source, which needs rdma-core of
the same version on the machine.
"""

DEVICES = "class/infiniband"
"""The directory in sysfs where Linux lists RDMA devices."""

_CLASSES = {
    "addr": ("AHAttr", "GID", "GlobalRoute"),
    "cq": ("CQ",),
    "device": ("Context",),
    "mr": ("DmaBufMR", "MR"),
    "pd": ("PD",),
    "pyverbs_error": ("PyverbsError",),
    "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
}
"""The used classes of each module of pyverbs."""
_MAPS = Path("/proc/self/maps")
_EXHAUSTED = (errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE)
_NO_ACCESS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV)
_NO_ERRNO = -1  # the error code of a pyverbs exception that has no errno


class Pyverbs(SimpleNamespace):
    """The classes of pyverbs that this package uses, under pyverbs' names, and pyverbs' enumerators. The constructor
    raises RuntimeUnavailableError if a module lacks one of the classes.
    """

    def __init__(self, modules: Mapping[str, ModuleType], enums: ModuleType, version: str) -> None:
        self.version = version
        self._enumerators = _enumerators(enums)
        try:
            super().__init__(**{name: getattr(modules[each], name) for each in _CLASSES for name in _CLASSES[each]})
        except AttributeError as error:
            raise RuntimeUnavailableError(f"pyverbs {version} is too old or too new: {error}") from None

    def enumerator(self, name: str) -> int:
        """Returns the value of an enumerator. Raises RuntimeUnavailableError if this version of pyverbs lacks the
        enumerator.
        """
        if name not in self._enumerators:
            raise RuntimeUnavailableError(f"pyverbs {self.version} is too old or too new: it has no {name}")
        return self._enumerators[name]

    def queue_pair(self, qp: Any) -> int:
        """Returns the address of the `ibv_qp` in a pyverbs QP, after checking the object at that address. Raises
        RuntimeUnavailableError if the address can't be found; the message says why.
        """
        found = ffi.new("ProxycclVerbsQp *")
        if hasattr(self.QP, "qp"):
            finding = lib.proxyccl_verbs_check_qp(qp.qp, qp.qp_num, found)
        else:
            finding = lib.proxyccl_verbs_find_qp(id(qp), lib.PROXYCCL_VERBS_QP_OFFSET, qp.qp_num, found)
        if finding != lib.PROXYCCL_VERBS_FOUND:
            raise RuntimeUnavailableError(
                f"the queue pair of a QP of pyverbs {self.version} can't be found: {_FINDINGS[finding]}"
            )
        return int(found.qp)

    def error(self, call: str, subject: str, cause: Exception) -> ProxyCCLError:
        """Returns the exception to raise instead of the exception `cause` of a pyverbs call: ResourceError if memory or
        descriptors ran out, otherwise RuntimeUnavailableError.
        """
        number = error_number(cause)
        words = str(cause) if number is None else f"{os.strerror(number)} (errno {number})"
        kind = ResourceError if number in _EXHAUSTED else RuntimeUnavailableError
        return kind(f"{call} of {subject}: {words}")

    def open(self, device: str) -> Any:
        """Opens the device with this name. Returns a pyverbs Context. Raises RuntimeUnavailableError if the device
        can't be opened; the message says why.
        """
        try:
            return self.Context(name=device)
        except self.PyverbsError as cause:
            why = str(self.error("ibv_open_device", device, cause))
            number = error_number(cause)
            if number is None:
                why += f"; either its file in /dev/infiniband is missing, or libibverbs' driver for it: {INSTALL}"
            elif number in _NO_ACCESS:
                why += "; this process needs to read and write /dev/infiniband/uverbs*"
            raise RuntimeUnavailableError(why) from cause

    @contextlib.contextmanager
    def calling(self, call: str, subject: str) -> Iterator[None]:
        """A context manager that replaces pyverbs' exceptions with the exceptions that `error` returns."""
        try:
            yield
        except self.PyverbsError as cause:
            raise self.error(call, subject, cause) from cause


_FINDINGS = {
    lib.PROXYCCL_VERBS_NO_OBJECT: "its memory can't be read",
    lib.PROXYCCL_VERBS_NO_POINTER: "this version has no pointer at the offset that the known versions use",
    lib.PROXYCCL_VERBS_OTHER_QP: "this version's pointer at that offset leads to no queue pair with its number",
    lib.PROXYCCL_VERBS_OTHER_PARTS: "its protection domain and its completion queues belong to different contexts",
    lib.PROXYCCL_VERBS_FORBIDDEN: "this process may not call process_vm_readv; some containers forbid it",
    lib.PROXYCCL_VERBS_NOT_BUILT: "the engine was built without libibverbs' headers",
}


def error_number(error: Exception) -> int | None:
    """Returns the errno of a pyverbs exception, or None if the exception has no errno."""
    code = getattr(error, "error_code", _NO_ERRNO)
    return None if code == _NO_ERRNO else abs(code)  # some providers return a negated errno


@functools.cache
def load() -> Pyverbs:
    """Imports pyverbs at the first call, and returns it. Raises RuntimeUnavailableError if the import fails; the
    message says what to install.
    """
    try:
        with _root_logger_as_it_is():
            modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _CLASSES}
            enums = _import_enums()
    except ModuleNotFoundError as error:
        if error.name == "pyverbs":
            raise RuntimeUnavailableError(
                f"pyverbs is not installed: {INSTALL}. A virtual environment of the same Python sees the system's "
                "package if it was made with --system-site-packages, or if the package is linked into it: "
                f"ln -s /usr/lib/python3/dist-packages/pyverbs {sysconfig.get_path('purelib')} (Debian's directory)"
            ) from None
        raise RuntimeUnavailableError(f"pyverbs was built for another version of Python ({error}); {INSTALL}") from None
    except ImportError as error:
        raise RuntimeUnavailableError(f"pyverbs does not fit this machine's libibverbs ({error}): {INSTALL}") from None
    return Pyverbs(modules, enums, _version())


def _import_enums() -> ModuleType:
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ModuleNotFoundError:
        return importlib.import_module("pyverbs.enums")


def _enumerators(module: ModuleType) -> dict[str, int]:
    found = {name: int(value) for name, value in vars(module).items() if name.startswith("IBV_")}
    for kind in vars(module).values():
        for name, value in getattr(kind, "__members__", {}).items():
            found.setdefault(name, int(value))
    return found


def _version() -> str:
    from importlib import metadata  # slow to import

    try:
        return metadata.version("pyverbs")
    except metadata.PackageNotFoundError:
        # Distributions package pyverbs without metadata. The loaded libibverbs has the same version as pyverbs, and its
        # file name ends with the version.
        match = re.search(r"libibverbs\.so\.\d+\.\d+\.([\d.]+)$", _MAPS.read_text(), re.MULTILINE)
        return match[1] if match else "of unknown version"


@contextlib.contextmanager
def _root_logger_as_it_is() -> Iterator[None]:
    # pyverbs configures the root logger when it is imported, but the root logger belongs to the program.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
        root.setLevel(level)
