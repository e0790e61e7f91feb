"""`proxyccl doctor`: reads the reports of ranks that hang, and says who waits for whom and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
        paths: files and directories; none for the newest reports of this user: those of one group of communicators,
            and the name of a daemon's that is newer; or where there are only daemons' the newest.
        full: print each report too.
        as_json: print JSON: for each group of communicators the fields of a `Diagnosis`.

    Returns:
        0 if they say why somebody waits, else 1.

    Raises:
        ReportError: a file is no report, or there is none.
    """
    found = find(paths or [directory()])
    for problem in found.problems:
        print(f"proxyccl: {problem}", file=sys.stderr)
    diagnoses = diagnose(found.ranks, found.daemons)
    if not paths:
        diagnoses = [_with_later(diagnosis, found.daemon_files) for diagnosis in diagnoses[:1]]
    if as_json:
        print(json.dumps([asdict(diagnosis) for diagnosis in diagnoses], indent=2))
    else:
        shown = {name for diagnosis in diagnoses for name in diagnosis.communicators}
        chosen = [report for report in found.ranks if report.communicator in shown]
        processes = [process for diagnosis in diagnoses for process in diagnosis.daemons]
        beside = [report for report in found.daemons if report.process in processes]
        if not diagnoses:
            beside = sorted(found.daemons, key=lambda report: report.written)[0 if paths else -1 :]
        if full or len(chosen) + len(beside) == 1 or not chosen:
            _print_reports(chosen, beside)
        for diagnosis in diagnoses:
            _print(diagnosis)
    return 0 if any(diagnosis.findings for diagnosis in diagnoses) else 1


def _with_later(diagnosis: Diagnosis, files: Mapping[Path, DaemonReport]) -> Diagnosis:
    """A diagnosis with a note on the newest report of a daemon, if that was written after all that it is made of."""
    path, newest = max(files.items(), key=lambda item: item[1].written, default=(None, None))
    if newest is None or newest.written <= diagnosis.written:
        return diagnosis
    note = f"a node daemon, process {newest.process.pid}, has reported since, which is not part of this: {path}"
    return replace(diagnosis, notes=[*diagnosis.notes, note])


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
