"""The runtime of the tests, which PROXYCCL_RUNTIME names (the host's if it is not set), and its devices.

On the host every rank has its own device. GPUs are few: ranks that are threads of one process need one each; processes
may share one, but take turns, which makes every exchange between them slow.

Programs that ranks run use this too: pytest, whose import takes as long as that of the library, is left to the tests.
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
    """Number of devices that the runtime offers; 1 on the host."""
    return 1 if ON_HOST else open_driver(RUNTIME).device_count()


def rank_runtime(rank: int) -> Runtime:
    """A new runtime on the device of the rank with this number."""
    return open_runtime(RUNTIME, local_rank=rank)


def runtime_with_blocks(rank: int, blocks: int = 2) -> Runtime:
    """The same, with collectives of several blocks: on the host they have one unless asked for more."""
    return HostRuntime(blocks=blocks) if ON_HOST else rank_runtime(rank)


def runtime_with_lines(rank: int) -> Runtime:
    """The host runtime, with collectives of several blocks, and with lines for packets of whatever length."""
    runtime = HostRuntime(blocks=2)
    runtime.launch_defaults = replace(runtime.launch_defaults, line_bytes=1)  # type: ignore[misc]
    return runtime


def torch_device(comm: Communicator) -> Any:
    """torch's name of a rank's device, which becomes the thread's current one."""
    import torch

    if ON_HOST:
        return torch.device("cpu")
    device = torch.device("cuda", comm.runtime.device)
    torch.cuda.set_device(device)
    return device


def most_ranks(*, processes: bool = False) -> int:
    """The largest world size that is sensible here for ranks as threads, or as processes."""
    if ON_HOST:
        return 8
    return max(2, device_count()) if processes else device_count()


def require_devices(ranks: int) -> None:
    """Skips the test if there are fewer devices than ranks that are threads."""
    if not ON_HOST and ranks > most_ranks():
        import pytest

        pytest.skip(f"needs {ranks} devices, and there are {device_count()}")


def world_sizes(*sizes: int, processes: bool = False) -> list[int]:
    """Those of the sizes that are sensible here."""
    return [size for size in sizes if size <= most_ranks(processes=processes)]


def with_the_largest_once_more(sizes: list[int]) -> list[Any]:
    """Numbers of ranks as parameters: one rank alone, and the largest for several. Once more only the largest runs:
    what few ranks have of their own is in no runtime and no daemon.
    """
    import pytest

    return [pytest.param(n, marks=pytest.mark.full if n < max(sizes) and (ONCE_MORE or n > 1) else []) for n in sizes]


def processes(wanted: int) -> int:
    """The wanted number of processes, or as many as are sensible here."""
    return min(wanted, most_ranks(processes=True))
