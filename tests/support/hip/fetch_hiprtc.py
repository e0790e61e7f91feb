"""Downloads Debian testing's HIPRTC, AMD's run-time compiler, into a directory, without root and without changing
system packages.

PyPI has no HIPRTC, and stable distributions' HIPRTC is too old for gfx942. Debian testing's HIPRTC needs a newer C
library than most machines have, so this program also downloads that C library and its loader (about 60 MB compressed,
250 MB unpacked).

    python fetch_hiprtc.py DIRECTORY      exits with 0, or with 2 and the reason why HIPRTC is not available
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.packages.debian import Apt, UnavailableError, fetch_program, fill_once, require_x86_64, unpack

PACKAGES = ("libhiprtc6", "libhiprtc-builtins6", "libamd-comgr3")  # hiprtc6 loads the other two libraries
LIBRARIES = Path("root/usr/lib/x86_64-linux-gnu")
LOADER = LIBRARIES / "ld-linux-x86-64.so.2"


def fill(directory: Path) -> None:
    """Downloads the packages and unpacks them into `directory`."""
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        # With an empty list of installed packages, apt downloads all dependencies, including the C library.
        apt = Apt(Path(downloads), "testing")
        unpack(apt.download_with_dependencies(*PACKAGES), directory / "root")
    # hip-python opens the unversioned name, which only development packages have.
    library = directory / "lib/libhiprtc.so"
    library.parent.mkdir()
    library.symlink_to(".." / LIBRARIES / "libhiprtc.so.6")
    for file in (directory / LOADER, library):
        if not file.exists():
            raise UnavailableError(f"Debian's packages no longer have {file.name}")


def fetch(directory: Path) -> None:
    """Fills `directory` with HIPRTC, unless it is already filled."""
    require_x86_64("Debian's HIPRTC")
    fill_once(directory, " ".join(PACKAGES), fill)


if __name__ == "__main__":
    fetch_program(fetch)
