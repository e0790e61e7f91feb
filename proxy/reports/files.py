"""Where reports lie: a directory that the user names, or one among the user's own files that is kept from growing."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from proxyccl.device.errors import ArgumentError

KEPT = 1000
"""Reports that are kept in the default directory; the oldest go when there are more."""

_NAME = re.compile(r"[0-9a-f]{8}-(rank\d+|daemon)-\d+-\d+\.json")


def wanted() -> bool:
    """Whether reports are: not with ``PROXYCCL_REPORTS=off``."""
    value = os.environ.get("PROXYCCL_REPORTS") or "on"
    if value not in ("on", "off"):
        raise ArgumentError("PROXYCCL_REPORTS", f"{value!r} is neither 'on' nor 'off'")
    return value == "on"


def default_directory() -> Path:
    """Where reports go unless ``PROXYCCL_REPORT_DIR`` names a directory. Hosts that share homes share it."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "proxyccl" / "reports"


def directory() -> Path:
    """Where this process's reports go."""
    named = os.environ.get("PROXYCCL_REPORT_DIR")
    return Path(named) if named else default_directory()


def write(group: str, who: str, number: int, text: str) -> Path:
    """Writes this process's report of a number, whole or not at all. Raises OSError.

    Args:
        group: eight hexadecimal digits that keep it apart from those of other processes of this number.
        who: "rank" and its number, or "daemon".
        number: of the reports on that, from 1.
        text: the report.
    """
    where = directory().absolute()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = where / f"{group}-{who}-{os.getpid()}-{number}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
    if where == default_directory().absolute():
        _forget_oldest(where)
    return path


def reports_in(where: Path) -> list[Path]:
    """The reports in a directory by age, the oldest first. Raises OSError."""
    found = []
    for path in where.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process has just forgotten it
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _forget_oldest(where: Path) -> None:
    for path in reports_in(where)[:-KEPT]:
        path.unlink(missing_ok=True)
