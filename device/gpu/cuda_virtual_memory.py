"""Memory of CUDA's virtual memory management: shares it by POSIX file descriptors, and gives it back temporarily.

CUDA IPC refuses such memory, for example torch's expandable segments: it consists of separately allocated blocks at
adjacent addresses.

A block of this process can be suspended: its physical memory is freed, and its addresses stay reserved. All processes
that map the block first suspend their mappings. When the block is resumed, it gets new physical memory, which the other
processes map at the addresses of their former mappings. Handles of the block stay valid.

The program may unmap a block whenever no call uses the block. If the program unmaps a block while
`cuMemRetainAllocationHandle` looks up the block, the driver's memory is corrupted. So `export` retains the blocks'
handles during the call that uses the memory, and the server makes descriptors from the retained handles.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from proxyccl.device._native import ffi
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.driver import Driver
from proxyccl.device.errors import DriverError
from proxyccl.device.gpu.cuda_bindings import cu
from proxyccl.device.memory.descriptor_server import fetch_descriptors, serve, supply
from proxyccl.device.memory.handle_kinds import MAPPED_BLOCKS
from proxyccl.device.memory.sockets import TOKEN_BYTES
from proxyccl.device.process import forks

_HANDLE = struct.Struct(f"<8s{TOKEN_BYTES}s32s")
_KIND = b"b"
_REQUEST = struct.Struct("<QQQQ")  # context, base, size, a digest of the blocks' allocation ids
_FILE_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Block(Struct):
    """A block that `allocate` returned."""

    size: int  # bytes, a multiple of the driver's granularity
    device: int  # the number of the device
    # Holds the driver's number of the block's first physical memory, which identifies the block even after the block
    # was suspended and resumed; 0 once the block is freed.
    word: Any
    mapped: bool = True  # False while the block is suspended


class _Import(Struct):
    """A mapping of another process's blocks, or of this process's blocks for another device."""

    size: int  # bytes of the blocks
    device: int  # the number of the device that accesses the blocks
    handle: bytes  # the handle from `export`
    mapped: bool = True  # False while the mapping is suspended

    def is_of(self, process: bytes, bases: Collection[int]) -> bool:
        """Whether the blocks belong to a process and begin at one of its addresses `bases`."""
        _, owner, request = _HANDLE.unpack_from(self.handle)
        return owner == process and _REQUEST.unpack(request)[1] in bases


class _Export(Struct):
    """An exported range."""

    # The size and the retained handle of each block; empty while the blocks are suspended.
    blocks: list[tuple[int, Any]]
    users: int = 1  # the number of open exports, plus the number of descriptor requests in progress


def _require_bytes(blocks: list[tuple[int, int]], size: int) -> None:
    sent = sum(nbytes for nbytes, _ in blocks)
    if sent != size:
        raise DriverError("cuMemMap", 0, f"the owner sent blocks of {sent} bytes; expected {size} bytes")


class VirtualMemory:
    """Exports and imports ranges of mapped blocks, for all devices of a process.

    Args:
        driver: CUDA's driver.
        pointer_attribute: the driver's cuPointerGetAttribute.
    """

    def __init__(self, driver: Driver, pointer_attribute: Callable[..., int]) -> None:
        self._driver, self._pointer_attribute = driver, pointer_attribute
        supply(_KIND, self._supply, (DriverError, struct.error))
        self._imported: dict[int, _Import] = {}  # by address
        self._allocated: dict[int, _Block] = {}  # by address
        self._exported: dict[bytes, _Export] = {}  # by request
        self._suspending = threading.Lock()  # guards the attributes `mapped`; held while descriptors are fetched
        self._lock = threading.RLock()  # guards `_exported`; reentrant, because garbage collection may end an export

    def allocate(self, nbytes: int) -> int:
        """Allocates a block on the current context's device, maps it for that device and returns its address.

        Raises:
            DriverError: the device is full, or the driver does not support sharing by file descriptors.
        """
        device = int(self._driver.call("CtxGetDevice"))
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(self._driver.call("MemGetAllocationGranularity", self._properties(device), recommended))
        block = _Block(round_up(nbytes, step), device, ffi.new("uint64_t *"))
        base = int(self._driver.call("MemAddressReserve", block.size, 0, 0, 0))
        try:
            self._create(base, block)
        except DriverError:
            self._driver.release("MemAddressFree", base, block.size)
            raise
        block.word[0] = self._driver.allocation_id(base)
        self._allocated[base] = block
        return base

    def _properties(self, device: int) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _FILE_DESCRIPTOR
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(self._driver.call("DeviceGetAttribute", supported, device))
        return properties

    def _create(self, base: int, block: _Block) -> None:
        """Allocates physical memory, and maps it at reserved addresses."""
        memory = self._driver.call("MemCreate", block.size, self._properties(block.device), 0)
        try:
            self._driver.call("MemMap", base, block.size, 0, memory, 0)
        finally:
            self._driver.release("MemRelease", memory)  # physical memory lives while it is mapped
        try:
            self._grant(base, block.size, block.device)
        except DriverError:
            self._driver.release("MemUnmap", base, block.size)
            raise

    def free(self, base: int) -> bool:
        """Waits for the current context's work, and frees memory from `allocate`. Returns False if `allocate` did not
        return the memory."""
        with self._suspending:
            block = self._allocated.pop(base, None)
            if block is None:
                return False
            block.word[0] = 0
            if block.mapped:
                self._driver.release("CtxSynchronize")  # cuMemUnmap need not wait for the context's work
            self._unmap(base, block.size if block.mapped else 0, block.size)
            return True

    def word(self, ptr: int) -> Any:
        """Implements `Blocks.word`. A block keeps its number while it is suspended and afterwards."""
        for base, block in list(self._allocated.items()):
            if base <= ptr < base + block.size:
                return block.word
        return None

    def suspend(self, bases: Iterable[int]) -> None:
        """Frees the physical memory of blocks, whose addresses stay reserved. No work may still use the blocks, and no
        process may map them, because physical memory lives while it is mapped.
        """
        self._driver.release("CtxSynchronize")
        with self._suspending:
            for base in bases:
                block = self._allocated[base]
                for _, export in self._exports_in(base, block):
                    self._release_blocks(export)
                self._driver.release("MemUnmap", base, block.size)
                block.mapped = False

    def resume(self, bases: Sequence[int]) -> None:
        """Allocates physical memory for suspended blocks. Raises DriverError if the device has too little memory; the
        blocks then stay suspended.
        """
        resumed: list[int] = []
        try:
            for base in bases:
                with self._suspending:
                    block = self._allocated[base]
                    self._create(base, block)
                    block.mapped = True
                    resumed.append(base)
                    for request, export in self._exports_in(base, block):
                        retained = self._retain([(base, block.size)])
                        with self._lock:
                            if self._exported.get(request) is export:
                                export.blocks, retained.blocks = retained.blocks, []
                        self._release_blocks(retained)  # does nothing unless the export ended during the calls above
        except DriverError:
            self.suspend(resumed)
            raise

    def _exports_in(self, base: int, block: _Block) -> list[tuple[bytes, _Export]]:
        with self._lock:
            every = list(self._exported.items())
        return [found for found in every if base <= _REQUEST.unpack(found[0])[1] < base + block.size]

    def set_mapped(self, process: bytes, bases: Collection[int], mapped: bool) -> None:
        """Implements `Blocks.set_mapped`."""
        with self._suspending:
            for base, imported in list(self._imported.items()):
                if imported.mapped != mapped and imported.is_of(process, bases):
                    if mapped:
                        self._fetch(base, imported)
                    else:
                        self._driver.release("MemUnmap", base, imported.size)
                    imported.mapped = mapped

    def is_mapped(self, ptr: int) -> bool:
        """Whether an address lies in device memory that CUDA IPC refuses, such as mapped blocks."""
        capable = ctypes.c_uint64()  # large enough for the boolean that the driver writes
        which = int(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
        return not self._pointer_attribute(ctypes.byref(capable), which, ptr) and not capable.value

    def export(self, base: int, size: int) -> bytes:
        """Returns a handle of a range of whole blocks, which must stay mapped during the call.

        Until `end_export`, peers can map the blocks, and the blocks' memory is not freed.

        Raises:
            DriverError: the blocks were allocated without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
        """
        context = int(self._driver.call("CtxGetCurrent"))
        blocks = list(self._blocks(base, size))
        numbers = struct.pack(f"<{len(blocks)}Q", *(self._driver.allocation_id(ptr) for ptr, _ in blocks))
        digest = int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little")
        request = _REQUEST.pack(context, base, size, digest)
        with self._lock:
            # No call may precede the increment, because garbage collection during a call may end the export.
            if request in self._exported:
                self._exported[request].users += 1
            else:
                self._exported[request] = self._retain(blocks)
        serve()
        return _HANDLE.pack(MAPPED_BLOCKS, forks.here().token, request)

    def _blocks(self, base: int, size: int) -> Iterator[tuple[int, int]]:
        ptr = base
        while ptr < base + size:
            _, nbytes = self._driver.call("MemGetAddressRange", ptr)
            yield ptr, int(nbytes)
            ptr += int(nbytes)

    def _retain(self, blocks: list[tuple[int, int]]) -> _Export:
        export = _Export([])
        try:
            for ptr, nbytes in blocks:
                handle = self._driver.call("MemRetainAllocationHandle", ptr)
                export.blocks.append((nbytes, handle))
            os.close(self._descriptor_of(export.blocks[0][1]))  # raises if descriptors can't be made
        except DriverError:
            self._release_blocks(export)
            raise
        return export

    def _descriptor_of(self, block: Any) -> int:
        return int(self._driver.call("MemExportToShareableHandle", block, _FILE_DESCRIPTOR, 0))

    def _release_blocks(self, export: _Export) -> None:
        blocks, export.blocks = export.blocks, []  # garbage collection may end the export during the calls below
        for _, block in blocks:
            self._driver.release("MemRelease", block)

    def end_export(self, handle: bytes) -> None:
        """Ends an `export`. When all exports of a range have ended, its blocks' handles are released."""
        self._end(_HANDLE.unpack_from(handle)[2])

    def _end(self, request: bytes) -> None:
        with self._lock:
            export = self._exported[request]
            export.users -= 1
            if not export.users:
                self._release_blocks(self._exported.pop(request))

    def _supply(self, request: bytes) -> Iterator[tuple[int, int]]:
        with self._lock:
            if request not in self._exported:
                raise DriverError("cuMemExportToShareableHandle", 0, "the owner no longer exports the memory")
            export = self._exported[request]
            if not export.blocks:
                raise DriverError("cuMemExportToShareableHandle", 0, "the owner has suspended the memory")
            export.users += 1
        try:
            self._driver.call("CtxSetCurrent", _REQUEST.unpack(request)[0])
            for nbytes, handle in export.blocks:
                yield nbytes, self._descriptor_of(handle)
        finally:
            self._end(request)

    @staticmethod
    def is_handle(handle: bytes) -> bool:
        """Whether `export` made this handle."""
        return handle.startswith(MAPPED_BLOCKS)

    def open(self, handle: bytes) -> int:
        """Maps another process's blocks at adjacent addresses for the current context's device. Returns the first
        address.

        Raises:
            DriverError: a block can't be mapped.
            OSError: the exporting process does not send the blocks' descriptors.
        """
        imported = _Import(_REQUEST.unpack(_HANDLE.unpack_from(handle)[2])[2], 0, handle)
        imported.device = int(self._driver.call("CtxGetDevice"))
        base = int(self._driver.call("MemAddressReserve", imported.size, 0, 0, 0))
        try:
            self._fetch(base, imported)
        except (DriverError, OSError):
            self._driver.release("MemAddressFree", base, imported.size)
            raise
        self._imported[base] = imported
        return base

    def _fetch(self, base: int, imported: _Import) -> None:
        """Fetches the blocks' descriptors, and maps the blocks at reserved addresses."""
        _, process, request = _HANDLE.unpack_from(imported.handle)
        blocks = fetch_descriptors(process, _KIND, request)
        mapped = 0
        try:
            _require_bytes(blocks, imported.size)
            for nbytes, descriptor in blocks:
                block = self._driver.call("MemImportFromShareableHandle", descriptor, _FILE_DESCRIPTOR)
                try:
                    self._driver.call("MemMap", base + mapped, nbytes, 0, block, 0)
                finally:
                    self._driver.release("MemRelease", block)  # a block lives while it is mapped
                mapped += nbytes
            self._grant(base, imported.size, imported.device)
        except DriverError:
            if mapped:
                self._driver.release("MemUnmap", base, mapped)
            raise
        finally:
            for _, descriptor in blocks:
                os.close(descriptor)

    def _grant(self, base: int, size: int, device: int) -> None:
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._driver.call("MemSetAccess", base, size, [access], 1)

    def _unmap(self, base: int, mapped: int, size: int) -> None:
        if mapped:
            self._driver.release("MemUnmap", base, mapped)
        self._driver.release("MemAddressFree", base, size)

    def release(self, base: int) -> bool:
        """Unmaps memory from `open`. Returns False if `open` did not return the memory."""
        with self._suspending:
            imported = self._imported.pop(base, None)
            if imported is None:
                return False
            self._unmap(base, imported.size if imported.mapped else 0, imported.size)
            return True
