"""Downloads Debian packages and unpacks them into a directory, without root and without changing system packages.

apt runs with separate state and cache directories, and with the machine's mirror.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from support.locks import one_at_a_time
from support.paths import ROOT

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
INSTALLED = Path("/var/lib/dpkg/status")
LISTS = ROOT / "build/debian-lists"
FRESH = 600.0
"""Seconds for which downloaded package lists are reused, because downloading them takes longer than most packages."""
COMPLETE = "complete"
UNAVAILABLE = 2
"""Exit status of a fetching program if the packages are not available on this machine."""


class UnavailableError(Exception):
    """A requirement of a test is not available on this machine, for the reason in the message."""


def require_x86_64(what: str) -> None:
    """Raises UnavailableError unless this machine is x86-64."""
    if platform.machine() != "x86_64":
        raise UnavailableError(f"{what} is fetched for x86_64, and this is {platform.machine()}")


def machine_suite() -> str:
    """Returns the code name of the Debian release that this machine runs."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    if release.get("ID") != "debian" or "VERSION_CODENAME" not in release:
        raise UnavailableError(f"this is {release.get('PRETTY_NAME', platform.system())} and no release of Debian")
    return release["VERSION_CODENAME"]


def debian_mirror() -> str:
    """Returns the URL of the archive from which this machine's apt gets Debian."""
    if any(shutil.which(program) is None for program in ("apt-get", "dpkg-deb", "tar")):
        raise UnavailableError("this machine has no apt-get, dpkg-deb or tar, which fetching Debian's packages needs")
    if not KEYRING.exists():
        raise UnavailableError(f"Debian's keys ({KEYRING}) are missing: apt install debian-archive-keyring")
    targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI)|$(ORIGIN)|$(LABEL)", "Created-By: Packages"], 60)
    # An archive's origin is empty if apt has not fetched the archive's list, for example in a fresh container.
    for line in targets.splitlines():
        uri, origin, label = line.split("|")
        if label == "Debian" or (origin in {"", "Debian"} and re.search(r"/debian/?$", uri)):
            return uri
    raise UnavailableError("this machine's apt has no Debian archive among its sources")


def run(command: list[str], timeout: float, *, cwd: Path | None = None, stdin: IO[bytes] | None = None) -> str:
    """Runs a command for at most `timeout` seconds. Returns the command's stdout, or raises UnavailableError if the
    command fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd, stdin=stdin
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} did not answer within {timeout:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"ended with {done.returncode}").splitlines()
        # apt's first error is the cause, and others may follow from it.
        cause = next((line.removeprefix("E: ") for line in said if line.startswith("E: ")), said[-1])
        raise UnavailableError(f"{command[0]}: {cause}")
    return done.stdout


def _is_fresh(directory: Path) -> bool:
    marker = directory / COMPLETE
    return marker.exists() and time.time() - marker.stat().st_mtime < FRESH


class Apt:
    """apt for one suite of Debian, with its state and downloads in `directory`.

    `installed` is a list of installed packages in dpkg's format; by default, apt assumes that no packages are
    installed.
    """

    def __init__(self, directory: Path, suite: str, installed: Path | None = None) -> None:
        for folder in ("state", "cache/archives/partial"):
            (directory / folder).mkdir(parents=True)
        # apt reads a copy of the list, because apt locks the list's directory, and only root may lock the system's
        # directory.
        status = directory / "state/status"
        status.write_bytes(installed.read_bytes() if installed is not None else b"")
        available = LISTS / suite
        settings = {
            "Dir::State": directory / "state",
            "Dir::State::status": status,
            "Dir::State::lists": available / "lists",
            "Dir::Cache": directory / "cache",
            # apt reads this package cache ten times faster than the lists; Docker images disable the cache.
            "Dir::Cache::srcpkgcache": available / "srcpkgcache.bin",
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Dir::Etc::sourcelist": available / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "-",
            "Dir::Etc::preferencesparts": "-",
            "APT::Install-Recommends": "false",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
            "Acquire::Languages": "none",
            # By default, root's apt downloads as another user, who may not write to this directory.
            "APT::Sandbox::User": "",
        }
        self._directory = directory
        self._settings = [f"-o{name}={value}" for name, value in settings.items()]
        self._get = ["apt-get", "--quiet", "--assume-yes", *self._settings]
        with one_at_a_time(available.with_name(f"{suite}.lock")):
            if not _is_fresh(available):
                self._update(available, suite)

    def _update(self, available: Path, suite: str) -> None:
        """Updates the package lists in place, because other processes may be reading them."""
        (available / "lists/partial").mkdir(parents=True, exist_ok=True)
        sources, source = available / "sources.list", f"deb [signed-by={KEYRING}] {debian_mirror()} {suite} main\n"
        if not sources.exists() or sources.read_text() != source:
            sources.write_text(source)
        run([*self._get, "update", "--error-on=any"], 300)
        (available / COMPLETE).touch()

    def download_with_dependencies(self, *packages: str) -> list[Path]:
        """Downloads packages and their dependencies, except installed packages. Returns the downloaded files."""
        run([*self._get, "install", "--download-only", *packages], 600)
        return sorted((self._directory / "cache/archives").glob("*.deb"))

    def download(self, package: str) -> Path:
        """Downloads one package without its dependencies. Returns the file."""
        run([*self._get, "download", package], 600, cwd=self._directory)
        (file,) = self._directory.glob(f"{package}_*.deb")
        return file

    def dependency(self, package: str, pattern: str) -> str:
        """Returns the first dependency of `package` that fully matches the regular expression `pattern`."""
        output = run(["apt-cache", *self._settings, "depends", package], 60)
        found = re.findall(rf"^ *Depends: ({pattern})$", output, re.MULTILINE)
        if not found:
            raise UnavailableError(f"Debian's {package} depends on nothing like {pattern}")
        return str(found[0])


def unpack(packages: list[Path], root: Path, members: Sequence[str] = ()) -> None:
    """Unpacks packages into `root`, where bin, lib, lib64 and sbin are links into usr, as in Debian. `members` are
    patterns of the paths to unpack, by default all.
    """
    for folder in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / folder).mkdir(parents=True, exist_ok=True)
        if not (root / folder).is_symlink():
            (root / folder).symlink_to(f"usr/{folder}")
    # tar keeps the links into usr, which dpkg-deb --extract would replace by directories.
    into = ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--touch", "--file", "-"]
    for package in packages:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as contents:
            chosen = ["--wildcards", *members] if members else []
            run([*into, "--directory", str(root), *chosen], 300, stdin=contents.stdout)
        if contents.returncode:
            raise UnavailableError(f"{package.name} can't be read")


def unpack_with_dependencies(packages: Sequence[str], directory: Path) -> None:
    """Downloads packages and dependencies that are not installed, and unpacks them into `directory`."""
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        unpack(Apt(Path(downloads), machine_suite(), INSTALLED).download_with_dependencies(*packages), directory)


def fill_once(directory: Path, contents: str, fill: Callable[[Path], None]) -> None:
    """Fills a directory with `fill`, unless it is already filled with the same `contents`, a description of the files.

    `fill` fills a temporary directory, which then replaces the old one, so no process finds partial contents.
    Concurrent calls for the same directory wait.
    """
    with one_at_a_time(directory.with_name(f"{directory.name}.lock")):
        marker = directory / COMPLETE
        if marker.exists() and marker.read_text() == contents:
            return
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left this directory
        partial.mkdir()
        fill(partial)
        (partial / COMPLETE).write_text(contents)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)


def fetch_program(fetch: Callable[[Path], None]) -> None:
    """Calls `fetch` with the directory that the program's first argument names.

    If the packages are not available, prints the reason to stdout and exits with status 2.
    """
    try:
        fetch(Path(sys.argv[1]).resolve())
    except UnavailableError as error:
        print(error)
        sys.exit(UNAVAILABLE)
