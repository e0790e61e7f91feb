"""Host memory that other processes of the host can map, because ProxyCCL has allocated it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.regions import DRAM, Region
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.shared_memory import SharedMemory, find_range

_PLACE = "host"


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
    interface = {"data": (memory.ptr, False), "typestr": kind.str, "shape": sizes, "version": 3}
    return np.asarray(SimpleNamespace(memory=memory, __array_interface__=interface))  # the array keeps the memory


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
