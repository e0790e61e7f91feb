"""A pytest plugin that shows after every run which tests took the most processor time. Durations say little, because
tests wait and share the machine. The plugin measures the user and system time of the test's process and of its ended
children.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.forked import FORKS

SHOWN = 20
"""Number of rows."""


def processor_seconds() -> float:
    """Returns the user and system time that this process and its ended children have used, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + FORKS.processor_seconds


class ProcessorTime:
    """Measures processor time in each process that runs tests, such as a pytest-xdist worker, and adds the times up in
    the main process. A fixture that tests share has a separate row, so that no test's row contains its time.
    """

    def __init__(self) -> None:
        self._used = processor_seconds()
        self._of_fixtures: dict[str, float] = {}
        self._ending: dict[str, float] = {}  # processor seconds at the start of each fixture's teardown
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def _since(self) -> float:
        before, self._used = self._used, processor_seconds()
        return self._used - before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._since()  # excludes test collection
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self._count(fixturedef, before)
            fixturedef.addfinalizer(lambda: self._ending.update({fixturedef.argname: processor_seconds()}))

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if (before := self._ending.pop(fixturedef.argname, None)) is not None:
            self._count(fixturedef, before)

    def _count(self, fixture: pytest.FixtureDef[Any], before: float) -> None:
        name = f"{fixture.baseid or 'tests'}: {fixture.argname}, a fixture"
        self._of_fixtures[name] = self._of_fixtures.get(name, 0.0) + processor_seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        fixtures, self._of_fixtures = self._of_fixtures, {}
        # The times become attributes of the report, because pytest-xdist sends these to the main process.
        vars(report).update(processor_seconds=self._since() - sum(fixtures.values()), of_fixtures=fixtures)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = {report.nodeid: getattr(report, "processor_seconds", 0.0), **getattr(report, "of_fixtures", {})}
        for name, used in rows.items():  # a report of a crashed worker has no times
            self._sums[name][0] += used
        self._sums[report.nodeid][1] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        rows = sorted(self._sums.items(), key=lambda row: -row[1][0])
        if path := config.getoption("--processor-seconds", None):
            lines = [f"{used:.3f}\t{took:.3f}\t{name}\n" for name, (used, took) in rows]
            Path(path).write_text("".join(lines), encoding="utf-8")
        if not rows:
            return
        folders: dict[str, float] = defaultdict(float)
        for name, (used, _) in rows:
            folders["/".join(name.split("::")[0].split("/")[:2])] += used
        terminalreporter.section("processor seconds")
        total = sum(used for used, _ in self._sums.values())
        by_folder = sorted(folders.items(), key=lambda row: -row[1])
        shown = ", ".join(f"{Path(name).name} {used:.0f}" for name, used in by_folder if used >= 1)
        terminalreporter.write_line(f"tests {total:.0f}: {shown}")
        for name, (used, took) in rows[:SHOWN]:
            terminalreporter.write_line(f"{used:7.1f} (took {took:.1f}) {name}")
