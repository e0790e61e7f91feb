"""Host memory that other processes of the host can map, because ProxyCCL has allocated it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.fabric import Keys
from proxyccl.channels.transfers.regions import DRAM, Region
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.shared_memory import SharedMemory, find_range

_PLACE = "host"


class _Holder:
    """Keeps an array's memory mapped."""

    def __init__(self, memory: SharedMemory, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "data": (memory.ptr, False),
            "typestr": dtype.str,
            "shape": shape,
            "version": 3,
        }


def shared_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """Allocates an array of zeros in host memory. Once it is registered, agents of other processes of the host can map
    it, so that copies need neither a system call nor the kernel's permission.

    Args:
        shape: its shape, or the number of its elements.
        dtype: numpy's, without objects.

    Raises:
        ArgumentError: it has no elements.
        ResourceError: the memory is exhausted.
    """
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = SharedMemory.allocate(int(np.prod(sizes)) * kind.itemsize)
    return np.asarray(_Holder(memory, kind, sizes))


def mapped_memory(regions: Iterable[Region]) -> dict[Region, SharedMemory]:
    """Returns the memory allocated by ProxyCCL that holds regions, for each region in such memory."""
    found = ((region, find_range(region.address, region.nbytes)) for region in regions if region.nbytes)
    return {region: memory for region, memory in found if memory is not None}


def shares_of(mapped: Mapping[Region, SharedMemory]) -> list[Share]:
    """Returns shares of those regions of `mapped_memory` that are host memory, which other processes can map."""
    shares = [Share(region, _PLACE, memory.handle) for region, memory in mapped.items() if region.kind == DRAM]
    if shares:
        serve()  # for agents in other PID namespaces
    return shares


class Mapped:
    """The host memory of another agent, which this process maps on first use. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: dict[Region, Share] = {}
        self._mapped: dict[Share, SharedMemory] = {}
        self._memories: list[SharedMemory] = []  # the same, in order
        self._places = Keys()  # maps to indices of the memory instead of keys
        self._new = False

    def add(self, shares: Iterable[Share], replaced: Iterable[Region] = ()) -> None:
        """Adds regions, after those that they replace are forgotten. A region that was registered again has a new
        handle."""
        with self._lock:
            for region in replaced:
                self._shares.pop(region, None)
            self._shares.update((share.region, share) for share in shares if share.region.kind == DRAM)
            self._new = True

    def find(
        self, addresses: Rows, nbytes: Rows, holders: Iterable[Region]
    ) -> tuple[Rows | None, list[SharedMemory], str]:
        """Returns where blocks are mapped in this process.

        Args:
            addresses, nbytes: of the blocks.
            holders: the regions that hold them, whose registrations the transfer depends on.

        Returns:
            Their addresses, or None if one of the regions can't be mapped; the mapped memory that they lie in; and why
            a region that should be mapped could not, or "".
        """
        with self._lock:
            reason = self._map() if self._new else ""
            if not all(region in self._shares for region in holders):
                return None, [], reason
            found = self._places.find(addresses, nbytes)
            if found is None:
                return None, [], reason
            used = np.flatnonzero(np.bincount(found[1].astype(np.intp)))
            return found[0], [self._memories[index] for index in used], reason

    def _map(self) -> str:
        """Maps regions that are not mapped yet. Mappings of replaced regions remain while transfers hold them."""
        reason = ""
        mapped: dict[Share, SharedMemory] = {}
        places: list[tuple[Region, int, int]] = []
        for region, share in self._shares.items():
            try:
                memory = self._mapped.get(share) or SharedMemory.open(share.handle)
            except ProxyCCLError as error:
                reason = str(error)
                continue
            places.append((region, memory.ptr, len(mapped)))
            mapped[share] = memory
        self._mapped, self._memories, self._places, self._new = mapped, list(mapped.values()), Keys(), False
        self._places.add(places)
        return reason

    def close(self) -> None:
        """Unmaps everything permanently. No transfer may still use the memory."""
        with self._lock:
            for memory in self._memories:
                memory.close()
            self._shares, self._mapped, self._memories, self._places = {}, {}, [], Keys()
