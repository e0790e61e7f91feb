"""Picks the kind of job for the runtime: GPUs need torch, the host runtime needs nothing."""

from __future__ import annotations

import importlib.util
import os

from side_by_side import Job

from proxyccl.device.runtimes import find_runtime


def open_job(seconds: float, *, nodes: int | None = None) -> Job:
    """Opens the job on the runtime that `PROXYCCL_RUNTIME` names, or else on the runtime that this machine has.
    `nodes`: see `Job`.

    Raises:
        SystemExit: the runtime is a GPU's, and torch is missing.
    """
    runtime = os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    if runtime == "host":
        from host_job import HostJob

        return HostJob(seconds, nodes=nodes)
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            f"on the {runtime} runtime this program needs torch, which holds its arrays, captures its graphs and has "
            "its peers; PROXYCCL_RUNTIME=host runs it on the CPU without peers"
        )
    from gpu_job import GpuJob

    return GpuJob(seconds, nodes=nodes)
