"""The tests' runtime, which PROXYCCL_RUNTIME names (the host runtime if it is not set), and the runtime's devices.

On the host every rank has its own device. GPUs are few: ranks that are threads of one process need a GPU each; ranks
that are processes may share one, but their kernels run in turn, which makes every exchange between them slow.

Programs that ranks run also import this module, so it does not import pytest, which takes as long as importing the
library.
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
"""Whether the tests that run are a part of the suite once more: on another runtime, or through a node daemon."""


def device_count() -> int:
    """Returns the number of devices that the runtime offers; 1 on the host."""
    return 1 if ON_HOST else open_driver(RUNTIME).device_count()


def rank_runtime(rank: int) -> Runtime:
    """Returns a new runtime on the rank's device."""
    return open_runtime(RUNTIME, local_rank=rank)


def runtime_with_blocks(rank: int, blocks: int = 2) -> Runtime:
    """Returns a new runtime on the rank's device whose collectives have several blocks; the host runtime's have one by
    default.
    """
    return HostRuntime(blocks=blocks) if ON_HOST else rank_runtime(rank)


def runtime_with_lines(rank: int) -> Runtime:
    """Returns a host runtime whose collectives have several blocks, and send packets of any length as lines."""
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
    """Skips the test if there are fewer devices than ranks that are threads."""
    if not ON_HOST and ranks > most_ranks():
        import pytest

        pytest.skip(f"needs {ranks} devices, and there are {device_count()}")


def world_sizes(*sizes: int, processes: bool = False) -> list[int]:
    """Returns the sizes that are no larger than `most_ranks`."""
    return [size for size in sizes if size <= most_ranks(processes=processes)]


def with_the_largest_once_more(sizes: list[int]) -> list[Any]:
    """Returns numbers of ranks as test parameters. By default one rank alone and the largest number run, and the others
    with --full. When the tests are repeated with another runtime or daemon (ONCE_MORE), only the largest runs by
    default, because neither treats few ranks in a special manner.
    """
    import pytest

    return [pytest.param(n, marks=pytest.mark.full if n < max(sizes) and (ONCE_MORE or n > 1) else []) for n in sizes]


def processes(wanted: int) -> int:
    """Returns the wanted number of processes, or as many as are sensible on this machine if that is less."""
    return min(wanted, most_ranks(processes=True))
