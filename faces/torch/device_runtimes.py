"""The GPUs of a rank as its process groups share them: one runtime for each device."""

from __future__ import annotations

import threading

import torch
from proxyccl.channels.collectives.flows import load_kernel
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime


def runtime_name(device: torch.device) -> str:
    """The name of the runtime for a device."""
    return "host" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


class DeviceRuntimes:
    """The runtimes of a rank, which its communicators share, so that each kernel is loaded once.

    A driver loads a kernel when nothing runs on the device. The kernel of transfers is loaded with the runtime: later,
    the load could wait for a kernel that waits for a peer, which in turn waits for the transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, Runtime] = {}

    def of(self, device: torch.device) -> Runtime | str:
        """The runtime of a GPU. For a CPU its name: each communicator opens its own, because its end waits for all work
        of that runtime.

        Raises as `open_runtime`.
        """
        if device.type == "cpu":
            return runtime_name(device)
        with self._lock:
            if device not in self._made:
                runtime = open_runtime(runtime_name(device), device.index)
                load_kernel(runtime)
                self._made[device] = runtime
            return self._made[device]
