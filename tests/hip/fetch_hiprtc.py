"""Puts AMD's real run-time compiler into a directory: Debian testing's HIPRTC, no root and no system package touched.

PyPI has no HIPRTC, and the stable distributions' ones are too old for gfx942. Debian testing's is built against a newer
C library than most machines have, so it comes with that and with the loader to start Python under it (about 60 MB down,
250 MB unpacked). apt runs with directories of its own; the mirror is the one that the machine's own apt uses.

    python fetch_hiprtc.py DIRECTORY      exits with 0, or with 2 and the reason why it can't be had here
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("libhiprtc6", "libhiprtc-builtins6", "libamd-comgr3")  # the last two it opens when it compiles
SUITE = "testing"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
LIBRARIES = Path("root/usr/lib/x86_64-linux-gnu")
LOADER = LIBRARIES / "ld-linux-x86-64.so.2"
DONE = "complete"


class UnavailableError(Exception):
    """This machine can't have it; the message says why."""


def debian_mirror() -> str:
    """The archive that this machine's apt takes Debian from."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise UnavailableError("there is no apt-get or dpkg here: Debian's packages are what is installed")
    if platform.machine() != "x86_64":
        raise UnavailableError(f"Debian's HIPRTC is fetched for x86_64, and this is {platform.machine()}")
    if not KEYRING.exists():
        raise UnavailableError(f"Debian's keys ({KEYRING}) are missing: apt install debian-archive-keyring")
    out = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(ORIGIN)|$(LABEL)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    # Nothing is known of origins before the machine's own lists were fetched, as in a fresh container.
    for line in out.stdout.splitlines():
        uri, origin, label = line.split("|")
        if label == "Debian" or (origin in {"", "Debian"} and re.search(r"/debian/?$", uri)):
            return uri
    raise UnavailableError("this machine's apt has no Debian archive among its sources")


def run(command: list[str], timeout: float) -> None:
    """Runs one step."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} did not answer within {timeout:.0f} s") from None
    if done.returncode:
        raise UnavailableError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])


def fetch(directory: Path) -> None:
    """Downloads and unpacks into `directory`, unless that was done before."""
    if (directory / DONE).exists():
        return
    mirror = debian_mirror()
    shutil.rmtree(directory, ignore_errors=True)
    for folder in ("etc", "state/lists/partial", "cache/archives/partial", "root", "lib"):
        (directory / folder).mkdir(parents=True)
    sources = directory / "etc/sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {SUITE} main\n")
    # With an empty list of installed packages apt takes everything that they need, the C library included.
    status = directory / "state/status"
    status.touch()
    settings = {
        "Dir::State": directory / "state",
        "Dir::State::status": status,
        "Dir::Cache": directory / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferences": "-",
        "Dir::Etc::preferencesparts": "-",
        "APT::Install-Recommends": "false",
        "Acquire::Retries": "2",
        "Acquire::Languages": "none",
        # apt downloads as a user of its own where it runs as root, and that one may not write here.
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "--quiet", "--assume-yes", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update", "--error-on=any"], 300)
    run([*apt, "install", "--download-only", *PACKAGES], 600)
    for package in sorted((directory / "cache/archives").glob("*.deb")):
        run(["dpkg", "--extract", str(package), str(directory / "root")], 120)
    for folder in ("etc", "state", "cache"):
        shutil.rmtree(directory / folder)
    # The bindings look for the unversioned name that only a development package has.
    (directory / "lib/libhiprtc.so").symlink_to(".." / LIBRARIES / "libhiprtc.so.6")
    for file in (LOADER, Path("lib/libhiprtc.so")):
        if not (directory / file).exists():
            raise UnavailableError(f"Debian's packages have no {file.name} any more")
    (directory / DONE).touch()


if __name__ == "__main__":
    try:
        fetch(Path(sys.argv[1]).resolve())
    except UnavailableError as error:
        print(error)
        sys.exit(2)
