"""The tests' runtime, named by PROXYCCL_RUNTIME (by default the host runtime), and the runtime's devices.

On the host every rank has its own device. Ranks that are threads of one process need a GPU each. Ranks that are
processes may share a GPU, but exchanges are slow because the GPU runs their kernels alternately.

Programs of ranks import this module too, so it does not import pytest, which would double their import time.
"""

from __future__ import annotations

import os
from typing import Any

from msgspec.structs import replace

from proxyccl import Communicator, Runtime, open_runtime
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtimes import open_driver

RUNTIME = os.environ.setdefault("PROXYCCL_RUNTIME", "host") or "host"
ON_HOST = RUNTIME == "host"


ONCE_MORE = not ON_HOST or os.environ.get("PROXYCCL_PROXY") == "daemon"
"""Whether this test run repeats a part of the suite on another runtime, or through a node daemon."""


def device_count() -> int:
    """Returns the number of devices that the runtime offers; 1 on the host."""
    return 1 if ON_HOST else open_driver(RUNTIME).device_count()


def rank_runtime(rank: int) -> Runtime:
    """Returns a new runtime on the rank's device."""
    return open_runtime(RUNTIME, local_rank=rank)


def runtime_with_blocks(rank: int, blocks: int = 2) -> Runtime:
    """Returns a new runtime on the rank's device. On the host runtime, collectives use `blocks` blocks; the default is
    one block.
    """
    return HostRuntime(blocks=blocks) if ON_HOST else rank_runtime(rank)


def runtime_with_lines(rank: int) -> Runtime:
    """Returns a host runtime whose collectives use two blocks, and send data of any size as lines of 128 bytes instead
    of packets.
    """
    runtime = HostRuntime(blocks=2)
    runtime.launch_defaults = replace(runtime.launch_defaults, line_bytes=1)  # type: ignore[misc]
    return runtime


def torch_device(comm: Communicator) -> Any:
    """Returns the rank's device as a torch.device, and makes a GPU the thread's current device."""
    import torch

    if ON_HOST:
        return torch.device("cpu")
    device = torch.device("cuda", comm.runtime.device)
    torch.cuda.set_device(device)
    return device


def most_ranks(*, processes: bool = False) -> int:
    """Returns the largest world size that is sensible on this machine, for ranks as threads or as processes."""
    if ON_HOST:
        return 8
    return max(2, device_count()) if processes else device_count()


def require_devices(ranks: int) -> None:
    """Skips the test if `ranks` threads would need more devices than there are."""
    if not ON_HOST and ranks > most_ranks():
        import pytest

        pytest.skip(f"needs {ranks} devices, and there are {device_count()}")


def world_sizes(*sizes: int, processes: bool = False) -> list[int]:
    """Returns the sizes that are no larger than `most_ranks`."""
    return [size for size in sizes if size <= most_ranks(processes=processes)]


def with_the_largest_once_more(sizes: list[int]) -> list[Any]:
    """Returns numbers of ranks as test parameters. Without --full, tests run only with 1 rank and with the largest
    number of ranks; if ONCE_MORE, only with the largest.
    """
    import pytest

    return [pytest.param(n, marks=pytest.mark.full if n < max(sizes) and (ONCE_MORE or n > 1) else []) for n in sizes]


def processes(wanted: int) -> int:
    """Returns `wanted`, limited to the number of processes that is sensible on this machine."""
    return min(wanted, most_ranks(processes=True))
