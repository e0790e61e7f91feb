"""Downloads the parts of the virtual machine with Soft-RoCE into a directory, without root and without changing system
packages: a kernel, QEMU, and RDMA packages. The packages are of this machine's Debian release; installed packages are
not fetched (about 100 MB compressed, 150 MB unpacked).

    python fetch_machine.py DIRECTORY     exits with 0, or with 2 and the reason why the parts are not available

Afterwards the directory contains:
    root/       all unpacked packages
    kernel      the kernel
    modules/    the kernel modules that the machine loads; their names sort in load order
    python/     only pyverbs, for PYTHONPATH
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from kernel_image import uncompressed
from kernel_modules import MODULES, PLACES, in_load_order

from support.packages.debian import (
    INSTALLED,
    Apt,
    UnavailableError,
    fetch_program,
    fill_once,
    machine_suite,
    require_x86_64,
    unpack,
)
from support.paths import ROOT

KERNEL = "linux-image-amd64"
PACKAGES = (
    *("qemu-system-x86", "busybox-static"),
    *("libibverbs1", "ibverbs-providers", "libibverbs-dev", "librdmacm1", "python3-pyverbs"),
    *("iproute2", "perftest"),
)
PYVERBS = Path("usr/lib/python3/dist-packages/pyverbs")
DIRECTORY = ROOT / "build/soft-roce"


def fill(directory: Path) -> None:
    """Downloads the parts and unpacks them into `directory`."""
    root, modules, python = (directory / name for name in ("root", "modules", "python"))
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        apt = Apt(Path(temporary, "apt"), machine_suite(), INSTALLED)
        unpack(apt.download_with_dependencies(*PACKAGES), root)
        # The kernel's dependencies, which only make an initramfs, are not downloaded.
        unpacked = Path(temporary, "kernel")
        unpack([apt.download(apt.dependency(KERNEL, r"linux-image-\S+"))], unpacked, PLACES)
        (image,) = unpacked.glob("boot/vmlinuz-*")
        (directory / "kernel").write_bytes(uncompressed(image.read_bytes()))
        (tree,) = unpacked.glob("lib/modules/*")
        modules.mkdir()
        for position, (name, module) in enumerate(in_load_order(tree).items()):
            (modules / f"{position:02d}-{name}.ko").write_bytes(module)
    python.mkdir()
    (python / "pyverbs").symlink_to(Path("/") / PYVERBS)


def require_pyverbs_for_this_python(directory: Path) -> None:
    """Raises UnavailableError unless Debian's pyverbs is built for this version of Python."""
    places = [place / PYVERBS for place in (directory / "root", Path("/"))]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not any(place.glob(f"*{suffix}") for place in places):
        raise UnavailableError(f"Debian {machine_suite()} has no pyverbs for Python {sysconfig.get_python_version()}")


def fetch(directory: Path) -> None:
    """Fills `directory` with the parts, unless it is already filled."""
    require_x86_64("the machine with Soft-RoCE")
    fill_once(directory, " ".join((machine_suite(), *PACKAGES, *MODULES)), fill)
    require_pyverbs_for_this_python(directory)


if __name__ == "__main__":
    fetch_program(fetch)
