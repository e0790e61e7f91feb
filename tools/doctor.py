"""`proxyccl doctor`: reads the reports of ranks that hang, and prints which rank waits for which rank, and why."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from proxyccl.channels.reports import daemons
from proxyccl.channels.reports.diagnosis import Diagnosis, diagnose, listed
from proxyccl.channels.reports.find import find
from proxyccl.channels.reports.render import render
from proxyccl.channels.reports.report import Report
from proxyccl.device.shown_text import printed_json, shown
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.daemon.report import DaemonReport
from proxyccl.proxy.reports.document import MOST_BYTES
from proxyccl.proxy.reports.files import directory

_DIAGNOSES = Codec(list[Diagnosis], MOST_BYTES)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "reports",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="reports of ranks and node daemons, or directories of reports (default: this user's newest)",
    )
    parser.add_argument("--full", action="store_true", help="print the reports too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: Namespace) -> int:
    """Prints why ranks wait. Returns 0 if the reports show the reason, else 1.

    If there is only one report, also prints it in full. If there are no ranks' reports, prints the daemons' reports in
    full. Without paths, reads this user's newest reports of one group of communicators, and mentions a newer report of
    a daemon. If no rank has written a report, reads the newest report of a daemon.

    Raises:
        ReportError: a file is not a report, or there are no reports.
    """
    paths = parsed.reports
    found = find(paths or [directory()])
    for problem in found.problems:
        print(shown(f"proxyccl: {problem}"), file=sys.stderr)
    diagnoses = diagnose(found.ranks, found.daemons)
    if not paths:
        diagnoses = [_with_later(diagnosis, found.daemon_files) for diagnosis in diagnoses[:1]]
    if parsed.json:
        print(printed_json(_DIAGNOSES.encode(diagnoses, indent=2).decode()))
    else:
        names = {name for diagnosis in diagnoses for name in diagnosis.communicators}
        chosen = [report for report in found.ranks if report.communicator in names]
        processes = [process for diagnosis in diagnoses for process in diagnosis.daemons]
        beside = [report for report in found.daemons if report.process in processes]
        if not diagnoses:
            beside = sorted(found.daemons, key=lambda report: report.written)[0 if paths else -1 :]
        if parsed.full or len(chosen) + len(beside) == 1 or not chosen:
            _print_reports(chosen, beside)
        for diagnosis in diagnoses:
            _print(diagnosis)
    return 0 if any(diagnosis.findings for diagnosis in diagnoses) else 1


def _with_later(diagnosis: Diagnosis, files: Mapping[Path, DaemonReport]) -> Diagnosis:
    path, newest = max(files.items(), key=lambda item: item[1].written, default=(None, None))
    if newest is None or newest.written <= diagnosis.written:
        return diagnosis
    note = f"a report of the node daemon, process {newest.process.pid}, is newer and not included: {path}"
    return replace(diagnosis, notes=[*diagnosis.notes, note])


def _print_reports(reports: Sequence[Report], of_daemons: Sequence[DaemonReport]) -> None:
    for report in sorted(reports, key=lambda report: (report.communicator, report.rank, report.written)):
        print(render(report))
    for daemon in sorted(of_daemons, key=lambda report: report.written):
        print(daemons.render(daemon))


def _print(diagnosis: Diagnosis) -> None:
    for name, ranks, reported in zip(diagnosis.communicators, diagnosis.world_sizes, diagnosis.reported, strict=True):
        of = f"all {ranks} ranks" if len(reported) == ranks else listed([f"rank {rank}" for rank in reported])
        print(shown(f"communicator {name} of {ranks} ranks: reports of {of}"))
    for daemon in diagnosis.daemons:
        print(shown(f"report of their node daemon, {daemon.shown}"))
    for finding in diagnosis.findings:
        print(shown(f"  {finding.text}"))
        for reason in finding.reasons:
            print(shown(f"    {reason}"))
    if not diagnosis.findings:
        print("  no rank waits for another")
    for note in diagnosis.notes:
        print(shown(f"  ({note})"))
