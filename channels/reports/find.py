"""Reads reports back, from files and from directories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from proxyccl.channels.reports import report
from proxyccl.channels.reports.report import Report
from proxyccl.proxy.daemon import report as daemon_report
from proxyccl.proxy.daemon.report import DaemonReport
from proxyccl.proxy.reports.document import ReportError, load
from proxyccl.proxy.reports.files import reports_in


@dataclass
class Found:
    """What there was.

    Attributes:
        ranks: the reports of ranks.
        daemon_files: those of node daemons, by their files.
        problems: what is wrong with files of a directory.
    """

    ranks: list[Report] = field(default_factory=list)
    daemon_files: dict[Path, DaemonReport] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def daemons(self) -> list[DaemonReport]:
        """The reports of node daemons."""
        return list(self.daemon_files.values())

    def read(self, path: Path) -> None:
        """Reads the report in a file.

        Raises:
            ReportError: it holds none, or can't be read; the message names the file and what is wrong.
        """
        data = load(path)
        try:
            if data.get("format") == report.FORMAT:
                self.ranks.append(report.from_json(data))
            elif data.get("format") == daemon_report.FORMAT:
                self.daemon_files[path] = daemon_report.from_json(data)
            else:
                raise ReportError(f"{path}: no report of ProxyCCL")
        except ValueError as error:
            raise ReportError(f"{path}: no report: {error}") from error


def find(paths: Iterable[Path]) -> Found:
    """The reports in files, and in directories by their names.

    Raises:
        ReportError: a file that is named is no report, or a directory has none.
    """
    found = Found()
    for path in paths:
        if not path.is_dir():
            found.read(path)
            continue
        try:
            names = reports_in(path)
        except OSError as error:
            raise ReportError(f"{path}: {error.strerror}") from error
        if not names:
            raise ReportError(f"{path}: there are no reports in this directory")
        for name in names:
            try:
                found.read(name)
            except ReportError as error:
                found.problems.append(str(error))
    return found
