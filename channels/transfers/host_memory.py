"""Allocates and shares host memory that other processes of the host can map."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.regions import Region
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.shared_memory import SharedMemory

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
    memory = SharedMemory.allocate(int(math.prod(sizes)) * kind.itemsize)
    interface = {"data": (memory.ptr, False), "typestr": kind.str, "shape": sizes, "version": 3}
    return np.asarray(SimpleNamespace(memory=memory, __array_interface__=interface))  # the array keeps the memory alive


def share_of(region: Region, memory: SharedMemory) -> Share:
    """Returns the share of a region in host memory that ProxyCCL allocated."""
    serve()  # lets agents in other PID namespaces map the region
    return Share(region, _PLACE, memory.handle)
