"""Memory that a program mapped itself by CUDA's virtual memory management, shared as POSIX file descriptors.

Such memory, for example torch's expandable segments, consists of blocks that lie side by side in a range of addresses,
each an allocation of its own, and CUDA IPC refuses it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

from proxyccl.device.errors import DriverError
from proxyccl.device.gpu.cuda_bindings import cu, freed, ok
from proxyccl.device.memory.descriptor_server import fetch_descriptors, serve, supply
from proxyccl.device.memory.handle_kinds import MAPPED_BLOCKS
from proxyccl.device.memory.sockets import TOKEN_BYTES
from proxyccl.device.process import forks

_HANDLE = struct.Struct(f"<8s{TOKEN_BYTES}s32s")
_KIND = b"b"
_REQUEST = struct.Struct("<QQQQ")  # context, base, size, the first block's allocation id
_FILE_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class VirtualMemory:
    """Exports and imports ranges of mapped blocks. One object a process.

    Args:
        allocation_id: returns a number of the allocation that contains an address.
    """

    def __init__(self, allocation_id: Callable[[int], int]) -> None:
        self._allocation_id = allocation_id
        supply(_KIND, self._supply, (DriverError, struct.error))
        self._imported: dict[int, int] = {}
        self._allocated: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        """A block of its own on the current context's device, which the device reaches. Its base.

        Raises:
            DriverError: the device is full, or the driver does not share blocks by file descriptors.
        """
        device = ok("cuCtxGetDevice", cu.cuCtxGetDevice())
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _FILE_DESCRIPTOR
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(device)
        supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        properties.allocFlags.gpuDirectRDMACapable = int(
            ok("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(supported, device))
        )
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(ok("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(properties, recommended)))
        size = -(-nbytes // step) * step
        block = ok("cuMemCreate", cu.cuMemCreate(size, properties, 0))
        try:
            base = int(ok("cuMemAddressReserve", cu.cuMemAddressReserve(size, 0, 0, 0)))
            mapped = 0
            try:
                ok("cuMemMap", cu.cuMemMap(base, size, 0, block, 0))
                mapped = size
                self.grant(base, size, int(device))
            except DriverError:
                self._unmap(base, mapped, size)
                raise
        finally:
            freed("cuMemRelease", cu.cuMemRelease(block))  # the mapping holds it
        self._allocated[base] = size
        return base

    def free(self, base: int) -> bool:
        """Frees memory of `allocate`. Waits for the current context's work. False if it is none."""
        size = self._allocated.pop(base, None)
        if size is None:
            return False
        freed("cuCtxSynchronize", cu.cuCtxSynchronize())  # cuMemFree waits, and cuMemUnmap does not promise to
        self._unmap(base, size, size)
        return True

    def is_mapped(self, ptr: int) -> bool:
        """Whether an address lies in such a block."""
        status, handle = cu.cuMemRetainAllocationHandle(ptr)
        if status:
            return False
        freed("cuMemRelease", cu.cuMemRelease(handle))
        return True

    def _blocks(self, base: int, size: int) -> Iterator[tuple[int, int]]:
        """(bytes, descriptor) of each block of a range."""
        ptr = base
        while ptr < base + size:
            _, nbytes = ok("cuMemGetAddressRange", cu.cuMemGetAddressRange(ptr))
            handle = ok("cuMemRetainAllocationHandle", cu.cuMemRetainAllocationHandle(ptr))
            try:
                descriptor = ok(
                    "cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(handle, _FILE_DESCRIPTOR, 0)
                )
            finally:
                freed("cuMemRelease", cu.cuMemRelease(handle))
            yield int(nbytes), int(descriptor)
            ptr += int(nbytes)

    def export(self, base: int, size: int) -> bytes:
        """A handle of a whole range of blocks, valid while they are mapped here.

        Raises:
            DriverError: the blocks were not made for sharing by file descriptors.
        """
        context = int(ok("cuCtxGetCurrent", cu.cuCtxGetCurrent()))
        _, descriptor = next(self._blocks(base, size))  # so that a failure shows before a peer asks
        os.close(descriptor)
        serve()
        request = _REQUEST.pack(context, base, size, self._allocation_id(base))
        return _HANDLE.pack(MAPPED_BLOCKS, forks.here().token, request)

    def _supply(self, request: bytes) -> Iterator[tuple[int, int]]:
        context, base, size, allocation = _REQUEST.unpack(request)
        ok("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
        if self._allocation_id(base) != allocation:
            raise DriverError("cuMemRetainAllocationHandle", 0, "its owner has freed the memory")
        yield from self._blocks(base, size)

    @staticmethod
    def is_handle(handle: bytes) -> bool:
        """Whether `export` made it."""
        return handle.startswith(MAPPED_BLOCKS)

    def open(self, handle: bytes) -> int:
        """Maps another process's blocks side by side, for the current context's device. Their base.

        Raises:
            DriverError: a block can't be mapped.
            OSError: the process that exported it does not hand it over.
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
        base = int(ok("cuMemAddressReserve", cu.cuMemAddressReserve(size, 0, 0, 0)))
        mapped = 0
        try:
            for nbytes, descriptor in blocks:
                block = ok(
                    "cuMemImportFromShareableHandle", cu.cuMemImportFromShareableHandle(descriptor, _FILE_DESCRIPTOR)
                )
                try:
                    ok("cuMemMap", cu.cuMemMap(base + mapped, nbytes, 0, block, 0))
                finally:
                    freed("cuMemRelease", cu.cuMemRelease(block))  # the mapping holds it
                mapped += nbytes
            device = ok("cuCtxGetDevice", cu.cuCtxGetDevice())
            self.grant(base, size, int(device))
        except DriverError:
            self._unmap(base, mapped, size)
            raise
        self._imported[base] = size
        return base

    def grant(self, base: int, size: int, device: int) -> None:
        """Lets a device reach a range of blocks."""
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok("cuMemSetAccess", cu.cuMemSetAccess(base, size, [access], 1))

    def _unmap(self, base: int, mapped: int, size: int) -> None:
        if mapped:
            freed("cuMemUnmap", cu.cuMemUnmap(base, mapped))
        freed("cuMemAddressFree", cu.cuMemAddressFree(base, size))

    def release(self, base: int) -> bool:
        """Unmaps memory of `open`. False if it mapped nothing there."""
        size = self._imported.pop(base, None)
        if size is None:
            return False
        self._unmap(base, size, size)
        return True
