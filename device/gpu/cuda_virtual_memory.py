"""Shares memory of CUDA's virtual memory management by POSIX file descriptors.

CUDA IPC refuses such memory, for example torch's expandable segments: it consists of separately allocated blocks at
adjacent addresses.

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
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

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


class _Export(Struct):
    """An exported range.

    Attributes:
        blocks: the size and the retained handle of each block.
        users: the number of exports that have not ended, plus that of descriptor requests in progress.
    """

    blocks: list[tuple[int, Any]]
    users: int = 1


class VirtualMemory:
    """Exports and imports ranges of mapped blocks, for all devices of a process.

    Args:
        driver: CUDA's driver.
        pointer_attribute: the driver's cuPointerGetAttribute.
    """

    def __init__(self, driver: Driver, pointer_attribute: Callable[..., int]) -> None:
        self._driver, self._pointer_attribute = driver, pointer_attribute
        supply(_KIND, self._supply, (DriverError, struct.error))
        self._imported: dict[int, int] = {}
        self._allocated: dict[int, int] = {}
        self._exported: dict[bytes, _Export] = {}  # by request
        self._lock = threading.RLock()  # guards `_exported`; reentrant, because garbage collection may end an export

    def allocate(self, nbytes: int) -> int:
        """Allocates a block on the current context's device, maps it for that device and returns its address.

        Raises:
            DriverError: the device is full, or the driver does not support sharing by file descriptors.
        """
        device = self._driver.call("CtxGetDevice")
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _FILE_DESCRIPTOR
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(device)
        supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(self._driver.call("DeviceGetAttribute", supported, device))
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(self._driver.call("MemGetAllocationGranularity", properties, recommended))
        size = round_up(nbytes, step)
        block = self._driver.call("MemCreate", size, properties, 0)
        try:
            base = int(self._driver.call("MemAddressReserve", size, 0, 0, 0))
            mapped = 0
            try:
                self._driver.call("MemMap", base, size, 0, block, 0)
                mapped = size
                self._grant(base, size, int(device))
            except DriverError:
                self._unmap(base, mapped, size)
                raise
        finally:
            self._driver.release("MemRelease", block)  # a block lives while it is mapped
        self._allocated[base] = size
        return base

    def free(self, base: int) -> bool:
        """Waits for the current context's work, and frees memory from `allocate`. Returns False if `allocate` did not
        return the memory."""
        size = self._allocated.pop(base, None)
        if size is None:
            return False
        self._driver.release("CtxSynchronize")  # cuMemUnmap need not wait for the context's work
        self._unmap(base, size, size)
        return True

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
            if request in self._exported:  # makes no call first: garbage collection may end the export
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
        for _, block in export.blocks:
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
        _, process, request = _HANDLE.unpack_from(handle)
        blocks = fetch_descriptors(process, _KIND, request)
        try:
            return self._map(blocks)
        finally:
            for _, descriptor in blocks:
                os.close(descriptor)

    def _map(self, blocks: list[tuple[int, int]]) -> int:
        size = sum(nbytes for nbytes, _ in blocks)
        base = int(self._driver.call("MemAddressReserve", size, 0, 0, 0))
        mapped = 0
        try:
            for nbytes, descriptor in blocks:
                block = self._driver.call("MemImportFromShareableHandle", descriptor, _FILE_DESCRIPTOR)
                try:
                    self._driver.call("MemMap", base + mapped, nbytes, 0, block, 0)
                finally:
                    self._driver.release("MemRelease", block)  # a block lives while it is mapped
                mapped += nbytes
            device = self._driver.call("CtxGetDevice")
            self._grant(base, size, int(device))
        except DriverError:
            self._unmap(base, mapped, size)
            raise
        self._imported[base] = size
        return base

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
        size = self._imported.pop(base, None)
        if size is None:
            return False
        self._unmap(base, size, size)
        return True
