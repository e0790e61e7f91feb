"""The GPUs of a rank as its process groups share them: one runtime for each device, and its kernels."""

from __future__ import annotations

import logging
import threading

import torch
from proxyccl.channels.collectives.flows import load_kernel
from proxyccl.channels.collectives.table import KERNELS_OF_STEPS
from proxyccl.device.build.ahead_of_time import compile_kernels
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_driver, open_runtime

_logger = logging.getLogger("proxyccl.torch")


def runtime_name(device: torch.device) -> str:
    """The name of the runtime for a device."""
    return "host" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


def compile_early(rank: int, world_size: int) -> None:
    """Begins to compile, beside the program, what its calls will most likely need and the cache does not have: a kernel
    takes a second. Does nothing for one rank, or if the program has not used a GPU so far.

    Args:
        rank: this rank. Ranks begin at different kernels, as those of a host wait for each other's.
        world_size: number of ranks.
    """
    if world_size == 1 or not torch.cuda.is_initialized():
        return
    first = rank * len(KERNELS_OF_STEPS) // world_size
    kernels = (*KERNELS_OF_STEPS[first:], *KERNELS_OF_STEPS[:first])
    device = torch.device("cuda", torch.cuda.current_device())

    def run() -> None:
        try:
            driver = open_driver(runtime_name(device))
            compile_kernels(driver.compiler, driver.device(device.index).architecture, kernels, threads=1)
        except ProxyCCLError as error:
            _logger.info("kernels are compiled when calls need them: %s", error)

    Thread(run, "proxyccl-torch-kernels").start()


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
