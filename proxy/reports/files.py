"""The directory for reports: the user's choice, or a default directory that keeps only the newest `KEPT` reports."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from proxyccl.device.errors import ArgumentError
from proxyccl.device.process.private_directories import open_private
from proxyccl.device.process.user_directories import user_directory

KEPT = 1000
"""Number of reports that the default directory keeps; older reports are removed."""

_NAME = re.compile(r"[0-9a-f]{8}-(rank\d+|daemon)-\d+-\d+\.json")


def wanted() -> bool:
    """Whether reports are written: ``PROXYCCL_REPORTS=off`` turns reports off."""
    value = os.environ.get("PROXYCCL_REPORTS") or "on"
    if value not in ("on", "off"):
        raise ArgumentError("PROXYCCL_REPORTS", f"unknown value {value!r}; expected 'on' or 'off'")
    return value == "on"


def default_directory() -> Path:
    """Returns the directory used without ``PROXYCCL_REPORT_DIR``. Several hosts may share its file system."""
    return user_directory("XDG_STATE_HOME", ".local/state", "state") / "reports"


def directory() -> Path:
    named = os.environ.get("PROXYCCL_REPORT_DIR")
    return Path(named) if named else default_directory()


def write(group: str, who: str, number: int, text: str) -> Path:
    """Writes a report of this process atomically. Raises OSError if the report can't be written, and UntrustedPathError
    if other users can change the default directory.

    Args:
        group: eight random hexadecimal digits, which distinguish this process from other processes with the same
            process id.
        who: "rank" and its number, or "daemon".
        number: number of this report among the reports of the same `who`, from 1.
        text: the report's text.
    """
    where = directory().absolute()
    is_default = where == default_directory().absolute()
    if is_default:
        os.close(open_private(where.parent, make=True))
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_default:
        os.close(open_private(where))
    path = where / f"{group}-{who}-{os.getpid()}-{number}.json"
    unfinished = path.with_suffix(".unfinished")
    # O_NOFOLLOW is needed, because other users may create links in a shared directory.
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(descriptor, "w") as file:
        file.write(text)
    unfinished.replace(path)
    if is_default:
        for old in reports_in(where)[:-KEPT]:
            old.unlink(missing_ok=True)
    return path


def is_written(group: str, who: str) -> bool:
    """Whether a process has written a report. The arguments are those of `write`."""
    return any(directory().glob(f"{group}-{who}-*.json"))


def reports_in(where: Path) -> list[Path]:
    """Returns the reports in a directory, the oldest first. Raises OSError."""
    found = []
    for path in where.iterdir():
        if _NAME.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(FileNotFoundError):  # another process may have removed the file
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]
