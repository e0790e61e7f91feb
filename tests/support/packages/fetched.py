"""Debian packages that tests need but that are not installed, fetched once into a subdirectory of build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.packages.debian import UNAVAILABLE, UnavailableError
from support.paths import ROOT

_SECONDS = 280  # a test may take 300 s


class FetchedPackages:
    """A subdirectory of build, which `fetch` fills with packages.

    Args:
        name: the directory's name.
        program: the fetching script, which is in this folder.
        arguments: the script's arguments after the directory.
    """

    def __init__(self, name: str, program: str, *arguments: str) -> None:
        self.directory = ROOT / "build" / name
        self._command = [sys.executable, str(Path(__file__).with_name(program)), str(self.directory), *arguments]

    def fetch(self) -> None:
        """Fills the directory, unless it is already filled.

        Raises:
            UnavailableError: the packages are not available on this machine.
        """
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"it was not fetched within {_SECONDS} s") from None
        if done.returncode:
            raise UnavailableError((done.stdout if done.returncode == UNAVAILABLE else done.stderr).strip())

    def program(self, name: str) -> str:
        """Returns the path of an installed program, or else of the fetched program."""
        installed = installed_program(name)
        if installed is not None:
            return installed
        return next(str(path) for place in ("*bin", "usr/*bin") for path in self.directory.glob(f"{place}/{name}"))

    def environment(self) -> dict[str, str]:
        """Returns this process's environment, with the fetched libraries on the library path."""
        own = dict(os.environ)
        fetched = [str(path) for path in self.directory.glob("usr/lib/*-linux-gnu")]
        if fetched:
            own["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (*fetched, own.get("LD_LIBRARY_PATH"))))
        return own


def installed_program(name: str) -> str | None:
    """Returns the path of an installed program, or None. Also searches /usr/sbin and /sbin."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=search)
