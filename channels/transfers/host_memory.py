"""Allocates and shares host memory that other processes of the host can map."""

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
    """Allocates an array of zeros in host memory. If the array is registered, agents in other processes of the host map
    it, so their CPUs copy without system calls.

    Args:
        shape: the array's shape, or its number of elements.
        dtype: a numpy type without Python objects.

    Raises:
        ArgumentError: the array would have no elements.
        ResourceError: the memory is exhausted.
    """
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = SharedMemory.allocate(int(np.prod(sizes)) * kind.itemsize)
    interface = {"data": (memory.ptr, False), "typestr": kind.str, "shape": sizes, "version": 3}
    return np.asarray(SimpleNamespace(memory=memory, __array_interface__=interface))  # the array keeps the memory alive


def mapped_memory(regions: Iterable[Region]) -> dict[Region, SharedMemory]:
    """Returns, for each region that lies in memory allocated by ProxyCCL, the whole allocation."""
    found = ((region, find_range(region.address, region.nbytes)) for region in regions if region.nbytes)
    return {region: memory for region, memory in found if memory is not None}


def shares_of(mapped: Mapping[Region, SharedMemory]) -> list[Share]:
    """Returns shares of the regions in host memory among those that `mapped_memory` returned."""
    shares = [Share(region, _PLACE, memory.handle) for region, memory in mapped.items() if region.kind == DRAM]
    if shares:
        serve()  # lets agents in other PID namespaces map the regions
    return shares
