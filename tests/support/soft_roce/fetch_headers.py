"""Puts libibverbs' headers into a directory, for the engine's RDMA transport, unless the C compiler finds the system's.

python fetch_headers.py DIRECTORY     exits with 0, or with 2 and the reason why they can't be had here
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.debian_packages import Apt, fetch_program, fill_once, machine_suite, unpack

PACKAGE = "libibverbs-dev"


def found_by_the_compiler() -> bool:
    """Whether the C compiler that builds extensions finds them without any help."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    preprocess = [*compiler, "-E", "-x", "c", "-"]
    done = subprocess.run(
        preprocess, input=b"#include <infiniband/verbs.h>\n", capture_output=True, check=False, timeout=60
    )
    return done.returncode == 0


def fill(directory: Path) -> None:
    """Downloads and unpacks into `directory`."""
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        unpack([Apt(Path(downloads, "apt"), machine_suite()).download(PACKAGE)], directory)


def fetch(directory: Path) -> None:
    """Fills `directory`, unless there is no need to or that was done before."""
    if not found_by_the_compiler():
        fill_once(directory, PACKAGE, fill)


if __name__ == "__main__":
    fetch_program(fetch)
