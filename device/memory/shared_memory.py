"""Shared memory without a name, as the host runtime's device memory and as every runtime's pinned memory.

The memory is a memfd. Another process of the same user opens it as /proc/<pid>/fd/<fd>, so a killed process leaves no
files, and the size limit of /dev/shm does not apply. A process of another PID or user namespace asks the owner for a
descriptor (`descriptor_server.py`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import ClassVar

from msgspec import Struct

from proxyccl.device._native import ffi, lib
from proxyccl.device.errors import ArgumentError, ClosedError, ResourceError
from proxyccl.device.memory.descriptor_server import fetch_descriptor, supply
from proxyccl.device.memory.descriptors import EXHAUSTED, out_of_descriptors
from proxyccl.device.memory.machine_memory import memory_limit
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view

_LARGE = 64 << 20
"""The least bytes of an allocation that is checked against the machine's memory. Linux would not refuse it: pages are
taken when first touched, and Linux kills the process if there are none."""


class _Origin(Struct, frozen=True):
    """A process that offers a file, and the file's descriptor in that process.

    Attributes:
        view: the process's `proc_view`, in which `pid` is valid.
        token: the process's token (`forks.Process`).
    """

    view: int
    pid: int
    token: bytes
    descriptor: int

    @classmethod
    def here(cls, descriptor: int) -> _Origin:
        """Returns the `_Origin` of a file of which this process has a descriptor."""
        process = forks.here()
        return cls(proc_view(), process.pid, process.token, descriptor)


def _page_round(nbytes: int) -> int:
    page = os.sysconf("SC_PAGESIZE")
    return max(page, (nbytes + page - 1) // page * page)


class _Mapping:
    """A file mapped into this process, unmapped with the last `SharedMemory` that uses it.

    A file is mapped once in a process, so ranks that are threads see one address. A race detector knows memory by its
    address, so it would miss races between two mappings of the same memory. Pinned addresses may stay mapped when they
    have no more users (`SharedMemory.addresses`); the descriptor is then closed.
    """

    _lock = threading.RLock()  # an RLock, because garbage collection may close memory anywhere
    _by_file: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _Mapping]] = weakref.WeakValueDictionary()

    def __init__(self, descriptor: int, info: os.stat_result, origin: _Origin | None) -> None:
        nbytes = info.st_size
        address = ffi.new("void **")
        status = lib.proxyccl_host_memory_map(address, descriptor, nbytes)
        if status:
            os.close(descriptor)
            raise ResourceError(f"can't map {nbytes} bytes of shared memory: {os.strerror(status)}")
        self.identity = info.st_dev, info.st_ino
        self.address = int(ffi.cast("uintptr_t", address[0]))
        self.nbytes = nbytes
        self._users = 1
        self._descriptors: list[int] = []  # a descriptor if the file is this process's own and has users, else empty
        self._name_by(descriptor, origin)
        # The finalizer does not run at exit: communicators close later, and their proxies still use the memory.
        weakref.finalize(self, _Mapping._release, self.address, nbytes, self._descriptors).atexit = False

    @property
    def descriptor(self) -> int:
        """The descriptor of the file; -1 if the file is another process's, or if the mapping has no users."""
        return self._descriptors[0] if self._descriptors else -1

    @classmethod
    def of(cls, descriptor: int, origin: _Origin | None = None) -> _Mapping:
        """Returns the mapping of a descriptor's file, for one more user. Takes ownership of the descriptor.

        For a file of another process, this process keeps no descriptor open: the owner's process and descriptor are
        enough to name it.
        """
        info = os.fstat(descriptor)
        with cls._lock:
            mapping = cls._by_file.get((info.st_dev, info.st_ino))
            if mapping is None:
                mapping = cls._by_file[info.st_dev, info.st_ino] = cls(descriptor, info, origin)
                return mapping
            mapping._users += 1
            if mapping._users > 1:
                os.close(descriptor)
            else:
                mapping._name_by(descriptor, origin)
            return mapping

    def leave(self) -> None:
        """Removes a user. When no user is left, the descriptor is closed."""
        self._users -= 1
        if self._users == 0 and self._descriptors:
            os.close(self._descriptors.pop())

    def _name_by(self, descriptor: int, origin: _Origin | None) -> None:
        self.origin = origin
        if origin is None:
            self._descriptors.append(descriptor)
        else:
            os.close(descriptor)

    @staticmethod
    def _release(address: int, nbytes: int, descriptors: list[int]) -> None:
        lib.proxyccl_host_memory_unmap(ffi.cast("void *", address), nbytes)
        for descriptor in descriptors:
            os.close(descriptor)


forks.hold_while_forking(_Mapping._lock)


class SharedMemory:
    """Shared memory, or a range of it, that is mapped in this process."""

    def __init__(self, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self._mapping: _Mapping | None = mapping
        self.descriptor = mapping.descriptor
        self.ptr = mapping.address + offset
        self.nbytes = nbytes

    @property
    def host_ptr(self) -> int:
        return self.ptr

    @property
    def handle(self) -> bytes:
        """The handle by which other processes open this memory."""
        return self.export(self.ptr, self.nbytes)

    @property
    def mapped_range(self) -> tuple[int, int]:
        """Address and size of the whole mapping that contains this memory."""
        if self._mapping is None:
            raise ClosedError("the memory is closed")
        return self._mapping.address, self._mapping.nbytes

    @property
    def closed(self) -> bool:
        return self._mapping is None

    @classmethod
    def allocate(cls, nbytes: int) -> SharedMemory:
        """Allocates zeroed memory. Raises ArgumentError unless the size is positive, ResourceError if there is no
        room."""
        if nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes}")
        if nbytes >= 1 << 63:
            raise ResourceError(f"can't allocate {nbytes} bytes: no address space is that large")
        if nbytes >= _LARGE:
            limit = memory_limit()
            if limit is not None and nbytes > limit.nbytes:
                raise ResourceError(f"can't allocate {nbytes} bytes of shared memory: {limit}")
        descriptor = ffi.new("int *")
        status = lib.proxyccl_host_memory_create(descriptor, _page_round(nbytes))
        if status in EXHAUSTED:
            raise out_of_descriptors(f"{nbytes} bytes of shared memory", status)
        if status:
            raise ResourceError(f"can't allocate {nbytes} bytes of shared memory: {os.strerror(status)}")
        return cls(_Mapping.of(descriptor[0]), 0, nbytes)

    @classmethod
    def open(cls, handle: bytes) -> SharedMemory:
        """Maps memory that a process of this machine and user exported. Raises ArgumentError if the handle is
        invalid."""
        descriptor, offset, nbytes = open_descriptor(handle)
        return cls(_Mapping.of(descriptor, _Handle.origin(handle)), offset, nbytes)

    @classmethod
    def adopt(cls, descriptor: int, nbytes: int) -> SharedMemory:
        """Maps a file that another process handed over. The memory owns the descriptor, which is also closed on
        failure.

        Raises:
            ArgumentError: the file is not shared memory of at least `nbytes`.
        """
        try:
            _require_memory(descriptor, nbytes)
        except ArgumentError:
            os.close(descriptor)
            raise
        return cls(_Mapping.of(descriptor), 0, nbytes)

    def export(self, ptr: int, nbytes: int) -> bytes:
        if self._mapping is None:
            raise ClosedError("the memory is closed")
        mapping = self._mapping
        origin = mapping.origin or _Origin.here(mapping.descriptor)
        return _Handle.pack(origin, mapping.identity, ptr - mapping.address, nbytes)

    def contains(self, ptr: int, nbytes: int) -> bool:
        return self.ptr <= ptr and ptr + nbytes <= self.ptr + self.nbytes

    def addresses(self) -> object:
        """Returns an object that keeps this memory's addresses from reuse, even after `close`."""
        if self._mapping is None:
            raise ClosedError("the memory is closed")
        return self._mapping

    def close(self) -> None:
        """Releases the mapping. The memory is freed with its last mapping in any process."""
        with _Mapping._lock:
            mapping, self._mapping = self._mapping, None
            if mapping is not None:
                mapping.leave()


def find_range(ptr: int, nbytes: int) -> SharedMemory | None:
    """Returns a `SharedMemory` for a range of memory that this process has mapped; the caller must not close the
    result. Returns None if this process has not mapped such memory."""
    with _Mapping._lock:
        for mapping in list(_Mapping._by_file.values()):
            if mapping._users and mapping.address <= ptr and ptr + nbytes <= mapping.address + mapping.nbytes:
                return SharedMemory(mapping, ptr - mapping.address, nbytes)
    return None


def open_descriptor(handle: bytes) -> tuple[int, int, int]:
    """Opens the file that a handle names. Returns the descriptor, for the caller to close, and the range's offset and
    size.

    Raises ArgumentError like `SharedMemory.open`.
    """
    return _Handle.open(handle)


def export_descriptor(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Returns a handle of a range of a descriptor's file in this process, valid while the descriptor is open."""
    info = os.fstat(descriptor)
    return _Handle.pack(_Origin.here(descriptor), (info.st_dev, info.st_ino), offset, nbytes)


class _Handle:
    """The handle by which another process opens a `SharedMemory`: the owner, its descriptor, and the identity of the
    file.
    """

    _LAYOUT = struct.Struct("<8sQq16sqQQQQ")
    _MAGIC = b"PXCCLhst"
    SIZE = _LAYOUT.size

    @classmethod
    def pack(cls, origin: _Origin, identity: tuple[int, int], offset: int, nbytes: int) -> bytes:
        owner = origin.view, origin.pid, origin.token, origin.descriptor
        return cls._LAYOUT.pack(cls._MAGIC, *owner, *identity, offset, nbytes)

    @classmethod
    def origin(cls, handle: bytes) -> _Origin:
        """Returns the process and the descriptor that a handle names."""
        _, *owner = cls._LAYOUT.unpack(handle)[:5]
        return _Origin(*owner)

    @classmethod
    def open(cls, handle: bytes) -> tuple[int, int, int]:
        """Opens a handle's file. Returns (a descriptor of this process, offset, nbytes)."""
        if len(handle) != cls.SIZE:
            raise ArgumentError(
                "handle", f"expected a handle of shared memory, {cls.SIZE} bytes, not {len(handle)} bytes"
            )
        magic, *_, device, inode, offset, nbytes = cls._LAYOUT.unpack(handle)
        if magic != cls._MAGIC:
            raise ArgumentError("handle", "expected a handle of shared memory: its first bytes are wrong")
        origin = cls.origin(handle)
        try:
            own = _descriptor_of(origin, (device, inode))
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise out_of_descriptors(f"the memory of process {origin.pid}", error.errno) from None
            raise ArgumentError(
                "handle", f"the memory of process {origin.pid} can't be opened: {error.strerror or error}"
            ) from None
        try:
            _require_memory(own, offset + nbytes, (device, inode))
        except ArgumentError:
            os.close(own)
            raise
        return own, offset, nbytes


def _descriptor_of(origin: _Origin, identity: tuple[int, int]) -> int:
    """Returns a descriptor of the file that a process offers, for the caller to close. Raises OSError."""
    if origin.view and origin.view == proc_view():
        return os.open(f"/proc/{origin.pid}/fd/{origin.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if origin.token == forks.here().token:  # needs no /proc
        return os.dup(origin.descriptor)
    return fetch_descriptor(origin.token, _KIND, _REQUEST.pack(origin.descriptor, *identity))


_KIND = b"m"
_REQUEST = struct.Struct("<qQQ")  # descriptor, device, inode


def _supply(request: bytes) -> Iterator[tuple[int, int]]:
    """Supplies a descriptor of this process's memory to a process of another PID namespace."""
    if len(request) != _REQUEST.size:
        raise ArgumentError("request", f"expected {_REQUEST.size} bytes, not {len(request)}")
    named, device, inode = _REQUEST.unpack(request)
    if not 0 <= named < 1 << 31:
        raise ArgumentError("request", f"{named} is not a descriptor")
    try:
        copy = os.dup(named)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        raise ArgumentError("handle", "the owner has closed the memory") from None
    try:
        _require_memory(copy, 0, (device, inode))
    except ArgumentError:
        os.close(copy)
        raise
    yield 0, copy


supply(_KIND, _supply, (ArgumentError,))


def _require_memory(descriptor: int, nbytes: int, identity: tuple[int, int] | None = None) -> None:
    """Raises ArgumentError unless a file is the one with this device and inode, large enough, and sealed.

    If another process cut an unsealed file short, reading past the cut would end this process.
    """
    info = os.fstat(descriptor)
    if identity is not None and (info.st_dev, info.st_ino) != identity:
        raise ArgumentError("handle", "the owner has closed the memory")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ArgumentError("handle", "names a file that is not ProxyCCL's shared memory")
    if info.st_size < nbytes:
        raise ArgumentError("handle", f"names {nbytes} bytes of a memory of {info.st_size} bytes")
