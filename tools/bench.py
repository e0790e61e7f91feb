"""`proxyccl bench`: runs a benchmark of the source tree, which is not part of the wheel. The arguments after the
benchmark's name are the benchmark's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from proxyccl.device.errors import ProxyCCLError

_BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=("ring", "collectives"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `proxyccl bench ring --help`")


def run(parsed: Namespace) -> int:
    """Runs the benchmark until its end, and returns its exit code. Raises ProxyCCLError without a source tree."""
    program = _BENCHMARKS / f"{parsed.benchmark}.py"
    if not program.exists():
        raise ProxyCCLError(
            f"bench: the benchmarks are in the source tree only; expected {program}. Install from a clone of the "
            "repository by `pip install --editable .`"
        )
    return subprocess.run([sys.executable, str(program), *parsed.arguments], check=False).returncode
