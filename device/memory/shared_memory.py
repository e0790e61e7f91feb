"""Anonymous shared memory, which is the host runtime's device memory and every runtime's pinned memory.

The memory is a memfd, so a killed process leaves no files, and the size limit of /dev/shm does not apply. Other
processes of the same user open the memfd as /proc/<pid>/fd/<fd>. Processes of another PID or user namespace ask the
owner for a descriptor (`descriptor_server.py`).
"""

from __future__ import annotations

import bisect
import fcntl
import operator
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ArgumentError, ClosedError, ResourceError
from proxyccl.device.memory.descriptor_server import fetch_descriptor, supply
from proxyccl.device.memory.descriptors import EXHAUSTED, out_of_descriptors
from proxyccl.device.memory.machine_memory import memory_limit
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view

_LARGE = 64 << 20
"""Allocations of at least this many bytes are checked against `memory_limit`. Linux does not refuse too large ones, but
kills the process when no page is left."""


class _Origin(NamedTuple):
    """The process that exports a file, and the file's descriptor in that process."""

    view: int  # the process's `proc_view`, in which `pid` is valid
    pid: int
    token: bytes  # the process's token (`forks.Process`)
    descriptor: int

    @classmethod
    def here(cls, descriptor: int) -> _Origin:
        """Returns the `_Origin` of a descriptor of this process."""
        process = forks.here()
        return cls(proc_view(), process.pid, process.token, descriptor)


class _Mapping:
    """A file that is mapped in this process until no `SharedMemory` uses it.

    A process maps a file only once, because race detectors identify memory by its address, and would miss races of
    ranks that are threads if each had a mapping. A pinned mapping may stay mapped without users
    (`SharedMemory.addresses`), but its descriptor is closed.
    """

    _lock = threading.RLock()  # reentrant, because garbage collection may close memory anywhere
    _by_file: ClassVar[weakref.WeakValueDictionary[tuple[int, int], _Mapping]] = weakref.WeakValueDictionary()
    # The mappings and their addresses, in ascending order. The entries of unmapped files are removed later.
    _starts: ClassVar[list[int]] = []
    _references: ClassVar[list[weakref.ref[_Mapping]]] = []

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
        self._descriptors: list[int] = []  # the descriptor of this process's own file, unless it has no users
        self._name_by(descriptor, origin)
        # The finalizer does not run at exit, because the proxies of communicators, which close later, use the memory.
        weakref.finalize(self, _Mapping._release, self.address, nbytes, self._descriptors).atexit = False

    @property
    def descriptor(self) -> int:
        """The file's descriptor; -1 if the file belongs to another process, or if the mapping has no users."""
        return self._descriptors[0] if self._descriptors else -1

    @classmethod
    def of(cls, descriptor: int, origin: _Origin | None = None) -> _Mapping:
        """Adds a user to the mapping of a descriptor's file, and returns the mapping. Takes ownership of the
        descriptor.

        The descriptor of another process's file is closed, because the owner's descriptor identifies the file.
        """
        info = os.fstat(descriptor)
        with cls._lock:
            mapping = cls._by_file.get((info.st_dev, info.st_ino))
            if mapping is None:
                mapping = cls._by_file[info.st_dev, info.st_ino] = cls(descriptor, info, origin)
                cls._insert(mapping)
                return mapping
            mapping._users += 1
            if mapping._users > 1:
                os.close(descriptor)
            else:
                mapping._name_by(descriptor, origin)
            return mapping

    @classmethod
    def _insert(cls, mapping: _Mapping) -> None:
        if len(cls._starts) > 2 * len(cls._by_file):  # `_by_file` contains the new mapping
            left = sorted(cls._by_file.values(), key=operator.attrgetter("address"))
            cls._references[:] = map(weakref.ref, left)
            cls._starts[:] = (each.address for each in left)
            return
        place = bisect.bisect(cls._starts, mapping.address)
        cls._starts.insert(place, mapping.address)
        cls._references.insert(place, weakref.ref(mapping))

    @classmethod
    def at(cls, address: int) -> _Mapping | None:
        """Returns the last mapping that starts at or before an address. The lock must be held."""
        place = bisect.bisect(cls._starts, address)
        while place:
            place -= 1
            mapping = cls._references[place]()
            if mapping is not None:
                return mapping
            del cls._starts[place], cls._references[place]
        return None

    def leave(self) -> None:
        """Removes a user. After the last user, closes the descriptor."""
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
    """A range of shared memory that is mapped in this process."""

    def __init__(self, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self._mapping: _Mapping | None = mapping
        self.descriptor = mapping.descriptor
        self.ptr = self.host_ptr = mapping.address + offset
        self.nbytes = nbytes

    @property
    def handle(self) -> bytes:
        """The handle by which other processes open this memory."""
        return self.export(self.ptr, self.nbytes)

    @property
    def mapped_range(self) -> tuple[int, int]:
        """Address and bytes of the whole mapping that contains this memory."""
        if self._mapping is None:
            raise ClosedError("the memory is closed")
        return self._mapping.address, self._mapping.nbytes

    @property
    def closed(self) -> bool:
        return self._mapping is None

    @classmethod
    def allocate(cls, nbytes: int) -> SharedMemory:
        """Allocates zeroed memory. Raises ArgumentError if the size is not positive, and ResourceError if memory runs
        out."""
        if nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes}")
        if nbytes >= 1 << 63:
            raise ResourceError(f"can't allocate {nbytes} bytes: no address space is that large")
        if nbytes >= _LARGE:
            limit = memory_limit()
            if limit is not None and nbytes > limit.nbytes:
                raise ResourceError(f"can't allocate {nbytes} bytes of shared memory: {limit}")
        descriptor = ffi.new("int *")
        status = lib.proxyccl_host_memory_create(descriptor, round_up(max(nbytes, 1), os.sysconf("SC_PAGESIZE")))
        if status in EXHAUSTED:
            raise out_of_descriptors(f"{nbytes} bytes of shared memory", status)
        if status:
            raise ResourceError(f"can't allocate {nbytes} bytes of shared memory: {os.strerror(status)}")
        return cls(_Mapping.of(descriptor[0]), 0, nbytes)

    @classmethod
    def open(cls, handle: bytes) -> SharedMemory:
        """Maps memory that a process of the same user on this machine exported. Raises ArgumentError if the handle is
        invalid."""
        descriptor, offset, nbytes = open_descriptor(handle)
        return cls(_Mapping.of(descriptor, _origin_of(handle)), offset, nbytes)

    @classmethod
    def adopt(cls, descriptor: int, nbytes: int) -> SharedMemory:
        """Maps the shared memory of a descriptor, and takes ownership of the descriptor, also on failure.

        Raises:
            ArgumentError: the descriptor is not shared memory of at least `nbytes` bytes.
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
        return _pack(origin, mapping.identity, ptr - mapping.address, nbytes)

    def contains(self, ptr: int, nbytes: int) -> bool:
        return self.ptr <= ptr and ptr + nbytes <= self.ptr + self.nbytes

    def addresses(self) -> object:
        """Returns an object that keeps this memory mapped, even after `close`, so that its addresses are not reused."""
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
    """Returns the `SharedMemory` at an address range, which the caller must not close. Returns None if the range is not
    in shared memory."""
    with _Mapping._lock:
        mapping = _Mapping.at(ptr)
        if mapping is None or not mapping._users or ptr + nbytes > mapping.address + mapping.nbytes:
            return None
        return SharedMemory(mapping, ptr - mapping.address, nbytes)


def export_descriptor(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Returns a handle, valid while `descriptor` is open, of a range of the descriptor's file."""
    info = os.fstat(descriptor)
    return _pack(_Origin.here(descriptor), (info.st_dev, info.st_ino), offset, nbytes)


_HANDLE = struct.Struct("<8sQq16sqQQQQ")  # the magic, the fields of `_Origin`, device, inode, offset, nbytes
_MAGIC = b"PXCCLhst"


def _pack(origin: _Origin, identity: tuple[int, int], offset: int, nbytes: int) -> bytes:
    return _HANDLE.pack(_MAGIC, *origin, *identity, offset, nbytes)


def _origin_of(handle: bytes) -> _Origin:
    return _Origin(*_HANDLE.unpack(handle)[1:5])


def open_descriptor(handle: bytes) -> tuple[int, int, int]:
    """Opens a handle's file. Returns the descriptor, which the caller closes, and offset and bytes of the handle's
    range.

    Raises ArgumentError like `SharedMemory.open`.
    """
    if len(handle) != _HANDLE.size:
        raise ArgumentError(
            "handle", f"expected a handle of shared memory, {_HANDLE.size} bytes, not {len(handle)} bytes"
        )
    magic, *_, device, inode, offset, nbytes = _HANDLE.unpack(handle)
    if magic != _MAGIC:
        raise ArgumentError("handle", "expected a handle of shared memory: its first bytes are wrong")
    origin = _origin_of(handle)
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
    if origin.view and origin.view == proc_view():
        return os.open(f"/proc/{origin.pid}/fd/{origin.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if origin.token == forks.here().token:  # needs no /proc
        return os.dup(origin.descriptor)
    return fetch_descriptor(origin.token, _KIND, _REQUEST.pack(origin.descriptor, *identity))


_KIND = b"m"
_REQUEST = struct.Struct("<qQQ")  # descriptor, device, inode


def _supply(request: bytes) -> Iterator[tuple[int, int]]:
    """Makes a descriptor of this process's memory for a process of another namespace."""
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
    """Raises ArgumentError unless a file has the device and inode `identity`, has at least `nbytes`, and is sealed.

    Another process could truncate an unsealed file, and accesses past its end would end this process by SIGBUS.
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
