"""`proxyccl doctor`: reads the reports of ranks that hang, and says who waits for whom and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from proxyccl.channels.reports import daemons
from proxyccl.channels.reports.diagnosis import Diagnosis, diagnose, listed
from proxyccl.channels.reports.find import find
from proxyccl.channels.reports.render import render
from proxyccl.channels.reports.report import Report
from proxyccl.proxy.daemon.report import DaemonReport
from proxyccl.proxy.reports.files import directory


def run(paths: Sequence[Path], *, full: bool, as_json: bool) -> int:
    """Prints what the reports say; one report alone is printed whole, and so are those of daemons alone.

    Args:
        paths: files and directories; none for the newest reports of this user.
        full: print each report too.
        as_json: print JSON: for each group of communicators the fields of a `Diagnosis`.

    Returns:
        0 if they say why somebody waits, else 1.

    Raises:
        ReportError: a file is no report, or there is none.
    """
    found = find(paths or [directory()])
    reports = found.ranks
    for problem in found.problems:
        print(f"proxyccl: {problem}", file=sys.stderr)
    diagnoses = diagnose(reports, found.daemons)
    if not paths:
        del diagnoses[1:]
    if as_json:
        print(json.dumps([asdict(diagnosis) for diagnosis in diagnoses], indent=2))
    else:
        shown = {name for diagnosis in diagnoses for name in diagnosis.communicators}
        chosen = [report for report in reports if report.communicator in shown]
        processes = [process for diagnosis in diagnoses for process in diagnosis.daemons]
        beside = [report for report in found.daemons if report.process in processes or not diagnoses]
        if full or len(chosen) + len(beside) == 1 or not chosen:
            _print_reports(chosen, beside)
        for diagnosis in diagnoses:
            _print(diagnosis)
    return 0 if any(diagnosis.findings for diagnosis in diagnoses) else 1


def _print_reports(reports: Sequence[Report], of_daemons: Sequence[DaemonReport]) -> None:
    for report in sorted(reports, key=lambda report: (report.communicator, report.rank, report.written)):
        print(render(report))
    for daemon in sorted(of_daemons, key=lambda report: report.written):
        print(daemons.render(daemon))


def _print(diagnosis: Diagnosis) -> None:
    for name, ranks, reported in zip(diagnosis.communicators, diagnosis.world_sizes, diagnosis.reported, strict=True):
        of = f"all {ranks} ranks" if len(reported) == ranks else listed([f"rank {rank}" for rank in reported])
        print(f"communicator {name} of {ranks} ranks: reports of {of}")
    for daemon in diagnosis.daemons:
        print(f"report of their node daemon, process {daemon.pid} on {daemon.host.partition('/')[0]}")
    for finding in diagnosis.findings:
        print(f"  {finding.text}")
        for reason in finding.reasons:
            print(f"    {reason}")
    if not diagnosis.findings:
        print("  nobody waits for another rank")
    for note in diagnosis.notes:
        print(f"  ({note})")
