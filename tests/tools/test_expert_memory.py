"""The documentation's table of ProxyCCL's and DeepEP's memory is the output of expert_memory.py."""

from __future__ import annotations

from support.paths import ROOT
from support.running import run_alone


def test_the_page_shows_the_table_that_the_program_prints() -> None:
    done = run_alone(str(ROOT / "benchmarks" / "expert_memory.py"))
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "coming_from_deepep.md").read_text()
    assert "".join(f"    {line}\n" for line in done.stdout.splitlines()) in page
