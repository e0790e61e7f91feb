"""Makes, shrinks and aborts communicators by NCCL's C API, for `regroup.py`. Needs no torch.

Signatures and constants are those of nccl.h. ncclCommShrink needs NCCL 2.27.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

# Disables NVLink multicast. NCCL reads this variable when it makes its first communicator.
os.environ["NCCL_NVLS_ENABLE"] = "0"

from mpi4py import MPI

_FIRST_VERSION = 22700  # NCCL 2.27
_FLOAT32, _SUM = 7, 0
_SHRINK_DEFAULT, _SHRINK_ABORT = 0, 1
_UNIQUE_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


_int, _pointer = ctypes.c_int, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_pointer), _int, _UniqueId, _int),
    "ncclCommShrink": (_pointer, ctypes.POINTER(_int), _int, ctypes.POINTER(_pointer), _pointer, _int),
    "ncclCommDestroy": (_pointer,),
    "ncclCommAbort": (_pointer,),
    "ncclAllReduce": (_pointer, _pointer, ctypes.c_size_t, _int, _int, _pointer, _pointer),
}


class NcclError(Exception):
    """A call of NCCL failed; the message names the call."""


class Nccl:
    """NCCL's library.

    Attributes:
        version: the version of NCCL, such as "2.28.9".

    Raises:
        OSError: NCCL is not installed.
        NcclError: this version of NCCL has no ncclCommShrink.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_path())
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        number = _int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
        if number.value < _FIRST_VERSION:
            raise NcclError(f"NCCL {self.version} has no ncclCommShrink, which came with 2.27")

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.argtypes = _SIGNATURES[name]
        if status := function(*arguments):
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(status).decode()}")

    def communicator(self, ranks: MPI.Intracomm) -> NcclCommunicator:
        """Makes a communicator on the current device of the calling thread."""
        unique = _UniqueId()
        if ranks.Get_rank() == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
        unique = _UniqueId.from_buffer_copy(ranks.bcast(bytes(unique)))
        made = _pointer()
        self.call("ncclCommInitRank", ctypes.byref(made), ranks.Get_size(), unique, ranks.Get_rank())
        return NcclCommunicator(self, made)


class NcclCommunicator:
    """A communicator of NCCL. The communicator's calls wait for the other ranks without a time-out.

    Args:
        nccl: the library.
        handle: the communicator's ncclComm_t.
    """

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p) -> None:
        self._nccl, self._handle = nccl, handle

    def all_reduce(self, pointer: int, count: int, stream: int) -> None:
        """Queues an in-place all_reduce that sums float32 elements."""
        self._nccl.call("ncclAllReduce", pointer, pointer, count, _FLOAT32, _SUM, self._handle, stream)

    def shrink(self, exclude: Sequence[int], *, abort: bool) -> Self:
        """Returns a communicator without the excluded ranks. Only the remaining ranks call this method. `abort` first
        aborts running calls.
        """
        made = _pointer()
        ranks = (_int * len(exclude))(*exclude)
        flags = _SHRINK_ABORT if abort else _SHRINK_DEFAULT
        self._nccl.call("ncclCommShrink", self._handle, ranks, len(exclude), ctypes.byref(made), None, flags)
        return type(self)(self._nccl, made)

    def close(self) -> None:
        """Waits for the communicator's calls, then frees the communicator."""
        self._nccl.call("ncclCommDestroy", self._handle)

    def abort(self) -> None:
        """Aborts the communicator's calls, and frees the communicator."""
        self._nccl.call("ncclCommAbort", self._handle)


def _path() -> str:
    package = importlib.util.find_spec("nvidia")
    for place in package.submodule_search_locations or () if package else ():
        for library in Path(place).glob("nccl/lib/libnccl.so.2"):
            return str(library)
    return "libnccl.so.2"
