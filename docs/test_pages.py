"""Runs every code block of the pages on the host runtime (`make docs-test`).

The first line of a Python block is a comment with the command that runs it:

    # mpiexec -n 4 python -m mpi4py sums.py      as many ranks; also `python sums.py`
    # torchrun --nproc-per-node 2 program.py     where torch is installed
    # srun -n 4 python program.py                processes with the variables that Slurm sets, without Slurm

A program with `device="cuda"`, or in Numba, needs a GPU. A C++ block is a kernel's source, which must compile. Each
line after `$ ` of a console block runs in a directory with the programs of its page, and must print the lines below it,
in which … matches any text; other output between these lines is allowed. Other shell commands are only parsed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxyccl.__main__ import command_parser
from proxyccl.device.host import HostRuntime
from support.paths import ROOT
from support.running import run_alone, run_mpi

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.name.endswith(".rendered.md")),
]
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (\S.*)$", re.MULTILINE)
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PROXYCCL_RUNTIME": "host", "TRITON_INTERPRET": "1"}
HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True)
class Block:
    """A block of code on a page, the number of its first line on the page, and the language that the page names."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in FENCE.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def written_in(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", written_in("python"), ids=str)
def test_a_program_runs(block: Block, tmp_path: Path) -> None:
    first = block.text.partition("\n")[0]
    assert first.startswith("# "), f"{block}: the first line says no command"
    program, *command = reversed(shlex.split(first.removeprefix("# ")))
    path = tmp_path / program
    path.write_text(block.text)
    if 'device="cuda"' in block.text:
        pytest.skip("needs a GPU")
    if "import proxyccl.numba" in block.text:
        pytest.skip("needs a GPU and Numba-CUDA")
    if "import ray" in block.text and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    if "import torch" in block.text and not HAS_TORCH:
        pytest.skip("needs torch")
    match command[::-1]:
        case ["mpiexec", "-n", ranks, "python", "-m", "mpi4py"]:
            done = run_mpi(int(ranks), path, env=ENVIRONMENT)
        case ["python"]:
            done = run_alone(path, env=ENVIRONMENT)
        case ["torchrun", *options]:
            done = run_alone("-m", "torch.distributed.run", *options, str(path), env=ENVIRONMENT)
        case ["srun", "-n", ranks, "python"]:
            done = run_tasks(int(ranks), path)
        case _:
            raise AssertionError(f"{block}: unknown command {first}")
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


def run_tasks(count: int, program: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in processes with the variables of a step of Slurm. Returns the result of the first process that
    failed, or of the last one.
    """
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "HOME": str(program.parent)}
    with ThreadPoolExecutor(count) as pool:
        tasks = pool.map(
            lambda rank: run_alone(program, env=ENVIRONMENT | step | {"SLURM_PROCID": str(rank)}), range(count)
        )
        done = list(tasks)
    return next((task for task in done if task.returncode), done[-1])


@pytest.mark.parametrize("block", written_in("console"), ids=str)
def test_a_command_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    for program in blocks_of(block.page):
        if program.language == "python":
            (tmp_path / program.text.partition("\n")[0].split()[-1]).write_text(program.text)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own = {"PROXYCCL_CACHE": str(tmp_path / "cache"), "PATH": path, "COLUMNS": "500"}
    own["PYTHONUNBUFFERED"] = ""  # unbuffered output writes a newline separately, so ranks' lines would mix
    for part in block.text.replace("\\\n", "").removeprefix("$ ").split("\n$ "):
        command, *expected = part.splitlines()
        missing = [program for program in ("gdb", "g++") if program in command and shutil.which(program) is None]
        if missing:
            pytest.skip(f"needs {missing[0]}")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT, **own},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        printed = done.stdout + done.stderr
        pattern = ".*?".join(re.escape(line).replace("…", "[^\\n]*") for line in expected)
        assert re.search(pattern, printed, re.DOTALL), f"{block}: {command}\n{printed}"


@pytest.mark.parametrize("block", written_in("cpp"), ids=str)
def test_a_kernel_compiles(block: Block) -> None:
    HostRuntime().compile(block.text)


def commands() -> list[tuple[str, str]]:
    """Returns (page, command) for every line, in a block or indented, that starts with `proxyccl`, `make` or `pip`."""
    found = []
    for page in PAGES:
        lines = [
            line
            for block in blocks_of(page)
            if block.language in {"", "sh", "console"}
            for line in block.text.splitlines()
        ]
        for line in (*lines, *INDENTED.findall(page.read_text())):
            words = line.removeprefix("$ ").split("#")[0].split()
            if words and words[0] in {"proxyccl", "make", "pip"}:
                found.append((str(page.relative_to(ROOT)), " ".join(words)))
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_exists(page: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "proxyccl":
        command_parser().parse_args(arguments)
    elif program == "pip":
        for word in arguments[1:]:
            name, _, extras = word.rstrip("]").partition("[")
            assert not name.startswith("proxyccl"), f"{page}: {command}: no index has the project, only a clone"
            assert "/" not in name or (ROOT / name / "pyproject.toml").is_file(), f"{page}: {command}"
            assert name != "." or set(filter(None, extras.split(","))) <= EXTRAS, f"{page}: {command}"
    else:
        named = [word for word in arguments if "=" not in word]
        assert set(named) <= TARGETS, f"{page}: {command}"
