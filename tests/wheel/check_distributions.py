"""Checks the distributions that `make wheel` made.

python check_distributions.py DIRECTORY

DIRECTORY holds one wheel and one sdist.
  - The wheel must have a manylinux tag.
  - The sdist must hold all tracked files.
  - README's first program must run on 4 ranks in a new virtual environment, made from the wheel and MPICH of PyPI,
    where PATH contains only that environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
BUILD_TOOLS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "make")
OF_THE_REPOSITORY = (".ci/", ".gitignore")
"""Tracked files that are not part of the sdist."""


class CheckError(Exception):
    """Raised if a distribution is wrong; the message states the defect."""


def run(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Runs a program, and returns its standard output.

    Raises:
        CheckError: the exit code is not 0.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, check=False)
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def only(directory: Path, pattern: str) -> Path:
    """Returns the only file in a directory that matches a pattern.

    Raises:
        CheckError: no file matches, or several do.
    """
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise CheckError(f"{directory} should hold one {pattern}; found {names}")
    return found[0]


def check_platform(wheel: Path) -> str:
    """Returns the manylinux tag that auditwheel determines for the wheel, which must also be in the wheel's name.

    Raises:
        CheckError: auditwheel finds no manylinux tag, or the wheel's name has another tag.
    """
    said = run([sys.executable, "-m", "auditwheel", "show", str(wheel)], timeout=60)
    tag = re.search(r'platform\s+tag:\s+"(manylinux_\w+)"', said)
    if tag is None:
        raise CheckError(f"{wheel.name} is not a manylinux wheel: {said}")
    if tag[1] not in wheel.name:
        raise CheckError(f"{wheel.name} should be tagged {tag[1]}")
    return tag[1]


def check_sdist(sdist: Path) -> int:
    """Checks that the sdist has all tracked files, except files that belong only to the repository. Returns its number
    of files.

    Raises:
        CheckError: tracked files are missing.
    """
    tracked = run(["git", "ls-files"], timeout=60, cwd=ROOT).splitlines()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked if name not in packed and not name.startswith(OF_THE_REPOSITORY)]
    if missing:
        raise CheckError(f"{sdist.name} lacks {', '.join(missing)}; add them to MANIFEST.in")
    return len(packed)


def first_program() -> str:
    program = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if program is None:
        raise CheckError("README.md has no program")
    return program[1]


def run_first_program(wheel: Path, directory: Path) -> str:
    """Runs README's first program on 4 ranks, from the wheel, without a compiler. Returns its output.

    Raises:
        CheckError: the installation or the program failed, a rank printed nothing, or a build tool can be found.
    """
    environment = directory / "venv"
    venv.create(environment, with_pip=True)
    bin_directory = environment / "bin"
    # Without buffering, the parts of a rank's line are written one by one and mix with parts of other ranks' lines.
    hidden = {"PATH", "CC", "CXX", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONUNBUFFERED"}
    env = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("PROXYCCL_")}
    env |= {"PATH": str(bin_directory), "PROXYCCL_RUNTIME": "host"}
    found = [tool for tool in BUILD_TOOLS if shutil.which(tool, path=env["PATH"])]
    if found:
        raise CheckError(f"{bin_directory} should hold no build tools; it has {', '.join(found)}")
    python = str(bin_directory / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    run([*install, f"proxyccl[mpich] @ {wheel.as_uri()}"], timeout=300, env=env, cwd=directory)
    program = directory / "sums.py"
    program.write_text(first_program())
    command = [str(bin_directory / "mpiexec"), "-n", str(RANKS), python, "-m", "mpi4py", str(program)]
    printed = run(command, timeout=120, env=env, cwd=directory)
    ranks = sorted(line.split()[0] for line in printed.splitlines())
    if ranks != [str(rank) for rank in range(RANKS)]:
        raise CheckError(f"each of {RANKS} ranks should print one line; they printed\n{printed}")
    return printed


def main() -> int:
    """Checks the distributions in the directory that the first argument names. Returns the exit code."""
    directory = Path(sys.argv[1]).resolve()
    try:
        wheel, sdist = only(directory, "*.whl"), only(directory, "*.tar.gz")
        print(f"{sdist.name}: {check_sdist(sdist)} files, all that are tracked")
        print(f"{wheel.name}: {check_platform(wheel)}, {wheel.stat().st_size / 1e6:.1f} MB")
        with tempfile.TemporaryDirectory() as scratch:
            printed = run_first_program(wheel, Path(scratch))
        print(f"README's first program on {RANKS} ranks, without a compiler:\n{printed}", end="")
    except CheckError as error:
        print(f"make wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
