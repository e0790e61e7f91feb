"""A rank of a job of `first_result.py`: first_result_rank.py CONTENDER FOLDER.

Writes, into FOLDER/RANK.json, the seconds from the start of the rank's process to the end of each stage. Each contender
imports only the modules that a user's program would import.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COUNT = 256
"""Elements of float32: 1 KiB."""
_AGE = 2.0
"""Age of the communicator, in seconds, at a proxied call that is not made at once."""


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_started() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


STARTED = _process_started()
stages: dict[str, float] = {}


def reached(stage: str) -> None:
    """Records the time at which a stage ends."""
    stages[stage] = _since_boot() - STARTED


def require(value: float, expected: float) -> None:
    if value != expected:
        raise SystemExit(f"a sum is {value}, not {expected}")


def proxyccl(when: str) -> int:
    """Makes a communicator, calls all_reduce, and calls a proxied all_reduce: immediately if `when` is "at once", or 2
    s later if `when` is "later". Returns the rank.
    """
    from proxyccl import Communicator

    reached("imports")
    comm = Communicator()
    made = time.monotonic()
    reached("communicator")
    array = comm.empty(_COUNT, "float32").fill(1)
    comm.all_reduce(array)
    comm.synchronize()
    value = float(array.numpy()[_COUNT - 1])
    reached("first result")
    require(value, float(comm.world_size))
    if when == "later":
        time.sleep(max(0.0, made + _AGE - time.monotonic()))
        if comm.runtime.name == "cuda":
            stages["free_bytes"] = _free_bytes(comm.runtime)
        comm.all_gather_bytes(b"")  # used as a barrier
    before = _since_boot()
    comm.proxy  # noqa: B018  the first use opens the proxy
    stages["of it the proxy"] = _since_boot() - before
    comm.all_reduce(array, algorithm="proxy")
    comm.synchronize()
    stages["first proxied call"] = _since_boot() - before
    before = _since_boot()
    comm.all_reduce(array, algorithm="proxy")
    comm.synchronize()
    stages["second proxied call"] = _since_boot() - before
    require(float(array.numpy()[_COUNT - 1]), float(comm.world_size**3))
    rank = comm.rank
    comm.close()
    return rank


def _free_bytes(runtime: Any) -> int:
    from cuda.bindings import driver

    with runtime.current():
        status, free, _ = driver.cuMemGetInfo()
    if status:
        raise SystemExit(f"cuMemGetInfo: {status}")
    return int(free)


def mpi() -> int:
    """Calls MPI's Allreduce on numpy arrays. Returns the rank."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD  # importing the module has initialised MPI
    reached("imports")
    reached("communicator")
    array = np.ones(_COUNT, np.float32)
    world.Allreduce(MPI.IN_PLACE, array)
    reached("first result")
    require(float(array[_COUNT - 1]), float(world.size))
    return int(world.rank)


def torch_group(backend: str) -> int:
    """Calls torch.distributed's all_reduce with NCCL or gloo, in a rank that torchrun started. Returns the rank."""
    import torch
    import torch.distributed as dist

    reached("imports")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        dist.init_process_group(backend, device_id=device)  # makes NCCL's communicator before the first call
    else:
        dist.init_process_group(backend)
    reached("communicator")
    tensor = torch.ones(_COUNT, device=device)
    dist.all_reduce(tensor)
    value = float(tensor[_COUNT - 1])
    reached("first result")
    require(value, float(dist.get_world_size()))
    dist.destroy_process_group()
    return rank


CONTENDERS: dict[str, Callable[[], int]] = {
    "proxyccl": lambda: proxyccl("at once"),
    "proxyccl-later": lambda: proxyccl("later"),
    "mpi": mpi,
    "nccl": lambda: torch_group("nccl"),
    "gloo": lambda: torch_group("gloo"),
}


if __name__ == "__main__":
    reached("interpreter")
    rank = CONTENDERS[sys.argv[1]]()
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(stages))
