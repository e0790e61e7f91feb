"""Where reports lie: a directory that the user names, or one among the user's own files that is kept from growing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from proxyccl.channels.reports.report import Report, ReportError, read

KEPT = 1000
"""Reports that are kept in the default directory; the oldest go when there are more."""

_NAME = re.compile(r"[0-9a-f]{8}-rank\d+-\d+-\d+\.json")


def default_directory() -> Path:
    """Where reports go unless ``PROXYCCL_REPORT_DIR`` names a directory. Hosts that share homes share it."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "proxyccl" / "reports"


def directory() -> Path:
    """Where this process's reports go."""
    named = os.environ.get("PROXYCCL_REPORT_DIR")
    return Path(named) if named else default_directory()


def write(report: Report, number: int) -> Path:
    """Writes a process's report of this number, whole or not at all. Raises OSError."""
    where = directory().absolute()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = where / f"{report.communicator}-rank{report.rank}-{report.process.pid}-{number}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(report.encode())
    unfinished.replace(path)
    if where == default_directory().absolute():
        _forget_oldest(where)
    return path


def _reports_in(where: Path) -> list[Path]:
    """The reports in a directory by age, the oldest first."""
    found = []
    for path in where.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process has just forgotten it
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _forget_oldest(where: Path) -> None:
    for path in _reports_in(where)[:-KEPT]:
        path.unlink(missing_ok=True)


def find(paths: Iterable[Path]) -> tuple[list[Report], list[str]]:
    """The reports in files, and in directories by their names; and what is wrong with files of a directory.

    Raises:
        ReportError: a file that is named is no report, or a directory has none.
    """
    found: list[Report] = []
    problems: list[str] = []
    for path in paths:
        if not path.is_dir():
            found.append(read(path))
            continue
        try:
            names = _reports_in(path)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from error
        if not names:
            raise ReportError(f"{path}: there are no reports in this directory")
        for name in names:
            try:
                found.append(read(name))
            except ReportError as error:
                problems.append(str(error))
    return found, problems
