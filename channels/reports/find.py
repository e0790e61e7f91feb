"""Reads reports from files and directories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from proxyccl.channels.reports.report import Report
from proxyccl.device.errors import ProtocolError
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.daemon.report import DaemonReport
from proxyccl.proxy.reports.document import MOST_BYTES, ReportError, read
from proxyccl.proxy.reports.files import reports_in

_REPORTS = Codec[Report | DaemonReport](Report | DaemonReport, MOST_BYTES, name="report")


@dataclass
class Found:
    """The reports that were read."""

    ranks: list[Report] = field(default_factory=list)  # reports of ranks
    daemon_files: dict[Path, DaemonReport] = field(default_factory=dict)  # reports of node daemons, by file
    problems: list[str] = field(default_factory=list)  # for each unreadable file of a directory, the error text

    @property
    def daemons(self) -> list[DaemonReport]:
        return list(self.daemon_files.values())

    def read(self, path: Path) -> None:
        """Reads the report in a file. Raises ReportError, which names the file, if it is unreadable or invalid."""
        data = read(path)
        try:
            report = _REPORTS.decode(data, str(path))
            if isinstance(report, DaemonReport):
                self.daemon_files[path] = report
                return
            report.require_ranks()
        except ProtocolError as error:
            raise ReportError(str(error)) from error
        except ValueError as error:
            raise ReportError(f"invalid report from {path}: {error}") from error
        self.ranks.append(report)


def find(paths: Iterable[Path]) -> Found:
    """Reads report files and all reports in directories.

    Raises:
        ReportError: one of the files is not a report, or a directory has no reports.
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
            raise ReportError(f"{path}: no reports in this directory")
        for name in names:
            try:
                found.read(name)
            except ReportError as error:
                found.problems.append(str(error))
    return found
