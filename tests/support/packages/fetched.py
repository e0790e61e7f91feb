"""Debian's packages that tests use where the machine lacks them: fetched once, into a directory of build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.packages.debian import UNAVAILABLE, UnavailableError
from support.paths import ROOT

_SECONDS = 280  # less than a test may take


class FetchedPackages:
    """The contents of a directory of build once `fetch` has filled it.

    Args:
        name: the directory's. program: the script in this folder that fetches it.
        arguments: for the program, after the directory.
    """

    def __init__(self, name: str, program: str, *arguments: str) -> None:
        self.directory = ROOT / "build" / name
        self._command = [sys.executable, str(Path(__file__).with_name(program)), str(self.directory), *arguments]

    def fetch(self) -> None:
        """Fills the directory, unless that was done before.

        Raises:
            UnavailableError: it is not available here.
        """
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"it was not fetched within {_SECONDS} s") from None
        if done.returncode:
            raise UnavailableError((done.stdout if done.returncode == UNAVAILABLE else done.stderr).strip())

    def program(self, name: str) -> str:
        """The path of a program: the machine's, else the one that was fetched."""
        installed = installed_program(name)
        if installed is not None:
            return installed
        return next(str(path) for place in ("*bin", "usr/*bin") for path in self.directory.glob(f"{place}/{name}"))

    def environment(self) -> dict[str, str]:
        """This process's environment, in which a program finds the fetched libraries, if any."""
        own = dict(os.environ)
        fetched = [str(path) for path in self.directory.glob("usr/lib/*-linux-gnu")]
        if fetched:
            own["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (*fetched, own.get("LD_LIBRARY_PATH"))))
        return own


def installed_program(name: str) -> str | None:
    """The path of an installed program, including those for administrators."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=search)
