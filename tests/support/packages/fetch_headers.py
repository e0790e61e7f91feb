"""Downloads the headers for building a transport into a directory, unless the C compiler finds installed headers.

python fetch_headers.py DIRECTORY PACKAGE     exits with 0, or with 2 and the reason why the headers are not available
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

from support.packages.debian import Apt, fetch_program, fill_once, machine_suite, unpack

HEADERS = {"libibverbs-dev": "infiniband/verbs.h", "libfabric-dev": "rdma/fabric.h"}
"""By package: a header that shows whether the package is installed."""


def found_by_the_compiler(header: str) -> bool:
    """Returns whether the C compiler that builds extensions finds the header without further options."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    preprocess = [*compiler, "-E", "-x", "c", "-"]
    done = subprocess.run(
        preprocess, input=f"#include <{header}>\n".encode(), capture_output=True, check=False, timeout=60
    )
    return done.returncode == 0


def fetch(directory: Path, package: str) -> None:
    """Fills `directory` with the package's headers, unless it is already filled or the compiler finds installed
    headers.
    """

    def fill(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory) as downloads:
            unpack([Apt(Path(downloads, "apt"), machine_suite()).download(package)], directory)

    if not found_by_the_compiler(HEADERS[package]):
        fill_once(directory, package, fill)


if __name__ == "__main__":
    fetch_program(lambda directory: fetch(directory, sys.argv[2]))
