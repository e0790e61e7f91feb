"""Memory that the backend allocates for torch's programs: it counts as registered, so calls use it in place."""

from __future__ import annotations

from typing import Any

import torch
from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.torch.endpoints import Endpoints
from proxyccl.torch_tensors.pools import allocator, require_torch


def allocates(endpoints: Endpoints, device: torch.device) -> bool:
    """Whether `allocate` may be called: there is a communicator for the device, and torch has pools there."""
    made = endpoints.made_of_all(device)
    if device.type == "cpu" or made is None:
        return False
    try:
        require_torch(made.runtime.name)
    except RuntimeUnavailableError:
        return False
    return True


def allocate(endpoints: Endpoints, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one dimension, uninitialised."""
    with _communicator(endpoints, device).memory_pool():
        return torch.empty(size, dtype=dtype, device=device)


def pool_allocator() -> Any:
    """torch's allocator for the program's own `torch.cuda.MemPool`."""
    return allocator(torch).allocator()


def use_pool(endpoints: Endpoints, device: torch.device) -> None:
    """Has the memory of pools of `pool_allocator` on a device count as registered from now on."""
    with _communicator(endpoints, device).memory_pool():
        pass


def _communicator(endpoints: Endpoints, device: torch.device) -> Communicator:
    made = endpoints.made_of_all(device)
    if made is None:
        raise RuntimeError(
            f"proxyccl: the group has no communicator for {device} yet; call a collective on it first, or "
            "init_process_group(device_id=…)"
        )
    return made
