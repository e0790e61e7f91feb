"""Joins the ranks of a torch.distributed process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from proxyccl.device.errors import ArgumentError, WaitTimeoutError
from proxyccl.device.process.interrupts import wait_elsewhere


class TorchBootstrap:
    """A `Bootstrap` over a torch.distributed process group, by default the default group.

    torch's calls can't be cancelled. If an `all_gather` times out, torch's call continues in a thread until all ranks
    have made the call or the group's own time-out has passed. Until the call ends, the group can't be used.
    """

    def __init__(self, group: Any = None) -> None:
        import torch  # imported here, so that `proxyccl` can import this module without torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ArgumentError("group", "torch.distributed is not initialised; call init_process_group first")
        self._cuda, self._dist = torch.cuda, dist
        self._group = group if group is not None else dist.group.WORLD
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)
        if self.rank < 0:
            raise ArgumentError("group", "this process is not a member of the group")

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`."""
        give_up()
        out: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + timeout
        # NCCL uses the calling thread's current device, so `call`, in another thread, first sets the caller's device.
        device = self._cuda.current_device() if self._cuda.is_initialized() else None

        def call() -> None:
            with nullcontext() if device is None else self._cuda.device(device):
                self._dist.all_gather_object(out, data, group=self._group)

        def look() -> None:
            give_up()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    "the bootstrap's all_gather over torch.distributed: not all ranks came in time",
                    rank=self.rank,
                    operation="bootstrap",
                )

        try:
            wait_elsewhere(call, look)
        except RuntimeError as error:  # torch raises this type for time-outs and for lost peers
            raise WaitTimeoutError(
                f"the bootstrap's all_gather over torch.distributed: {error}", rank=self.rank, operation="bootstrap"
            ) from error
        return out

    def close(self) -> None:
        """Does nothing: the group belongs to the caller."""
