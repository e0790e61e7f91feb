"""Picks the kind of `Job` for the runtime. A job on GPUs needs torch; a job on the host runtime does not."""

from __future__ import annotations

import importlib.util
import os

from side_by_side import Job

from proxyccl.device.runtimes import find_runtime


def open_job(seconds: float, *, nodes: int | None = None) -> Job:
    """Opens a job on the runtime that `PROXYCCL_RUNTIME` names, by default on this machine's GPU runtime if there is
    one. `nodes`: see `Job`.

    Raises:
        SystemExit: torch is missing, which a job on GPUs needs.
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
