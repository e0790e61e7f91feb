"""The host's memory that other processes of the host map: what ProxyCCL has allocated."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.fabric import Keys
from proxyccl.channels.transfers.regions import DRAM, Region
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.shared_memory import SharedMemory, export_range

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
    """An array of zeros in the host's memory, which agents of other processes of the host map if it is registered:
    copies then need neither a call of the kernel nor its permission.

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


def shares_of(regions: Iterable[Region]) -> list[Share]:
    """Shares of those regions of the host's memory that other processes can map."""
    found = ((region, export_range(region.address, region.nbytes)) for region in regions if region.kind == DRAM)
    shares = [Share(region, _PLACE, handle) for region, handle in found if handle is not None]
    if shares:
        serve()  # for agents in other PID namespaces
    return shares


class Mapped:
    """The host's memory of another agent that this process maps when it is first of use. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shares: dict[Region, Share] = {}
        self._memories: dict[Share, SharedMemory] = {}
        self._places = Keys()
        self._new = False

    def add(self, shares: Iterable[Share]) -> None:
        """Adds regions; a region that was registered again has a new handle."""
        with self._lock:
            before = len(self._shares)
            self._shares.update((share.region, share) for share in shares if share.region.kind == DRAM)
            self._new = self._new or len(self._shares) > before

    def find(self, addresses: Rows, nbytes: Rows) -> tuple[Rows | None, str]:
        """The addresses of blocks here, or None if a block is in no region that can be mapped; and why one that should
        be could not, or "".
        """
        with self._lock:
            reason = self._map() if self._new else ""
            found = self._places.find(addresses, nbytes)
        return (None if found is None else found[0]), reason

    def _map(self) -> str:
        self._new = False
        reason = ""
        for region, share in self._shares.items():
            if share in self._memories:
                continue
            try:
                memory = self._memories[share] = SharedMemory.open(share.handle)
            except ProxyCCLError as error:
                reason = str(error)
                continue
            self._places.add([(region, memory.ptr, 0)])
        return reason

    def close(self) -> None:
        """Unmaps everything. No transfer may still use it."""
        with self._lock:
            for memory in self._memories.values():
                memory.close()
            self._memories = {}
            self._places = Keys()
