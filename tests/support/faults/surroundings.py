"""Sets up the environment of a case's ranks: compilers, a full disk, a jumping clock, hosts, and a faulty link."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from proxyccl import CompileError
from proxyccl.device.host.compiler import find_compiler
from support.faults.case import LINK_FAULTS, Case
from support.hosts.networks import Hosts

_CLOCK = Path(__file__).with_name("jumping_clock.c")
_FULL_DISK = 'mount -t tmpfs -o size=4k,mode=700 full "$0" && head -c 4096 /dev/zero > "$0/filling" && exec "$@"'
_LOSS = ("tbf", "rate", "20mbit", "burst", "4kb", "limit", "8kb")
"""A slow link with a short queue, which drops packets of a burst. Unlike netem, most kernels have tbf."""


def why_no_mounts() -> str:
    """Returns why this process can't mount file systems in a private mount namespace, or ""."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tried", "/tmp"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "there is no unshare (util-linux)"
    return done.stderr.strip() if done.returncode else ""


def why_no_kernels() -> str:
    """Returns why ranks can't compile their own kernels on this machine, or ""."""
    try:
        find_compiler()
    except CompileError as error:
        return str(error)
    return ""


def why_no_clock(library: Path) -> str:
    """Compiles jumping_clock.c. Returns why the compilation failed, or ""."""
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(library), str(_CLOCK)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no C compiler {command[0]} (CC)"
    return done.stderr.strip() if done.returncode else ""


class Surroundings:
    """The environment of the ranks of cases.

    Args:
        directory: directory of the files that all cases share.
        hosts: the two hosts of the ranks; None if all ranks are on this host.
    """

    def __init__(self, directory: Path, hosts: Hosts | None = None) -> None:
        self._hosts = hosts
        self._clock = directory / "jumping_clock.so"
        self._no_kernels = why_no_kernels()
        self._no_mounts = functools.cache(why_no_mounts)
        self._no_clock = functools.cache(lambda: why_no_clock(self._clock))

    def why_not(self, case: Case) -> str:
        """Sets up everything that a case needs. Returns why the case can't be run on this machine, or ""."""
        if self._no_kernels:
            return self._no_kernels
        if case.fault in LINK_FAULTS and self._hosts is None:
            return "its ranks are on one host"
        if case.fault == "full disk":
            return self._no_mounts()
        return self._no_clock() if case.fault == "clock jumps" else ""

    def command(self, case: Case, rank: int, program: list[str], here: Path) -> list[str]:
        """Returns the command that starts a rank's program. The started process itself becomes the program (exec)."""
        command = [sys.executable, *program]
        if rank == case.victim and case.fault == "full disk":
            command = ["unshare", "--mount", "sh", "-c", _FULL_DISK, str(self._full(here)), *command]
        if self._hosts is not None:
            command = [*self._hosts.inside(case.host(rank)), *command]
        return command

    def environment(self, case: Case, rank: int, here: Path) -> dict[str, str]:
        """Returns a rank's own environment variables, without the variables of all ranks."""
        found = {} if self._hosts is None else dict(self._hosts.environment)
        if rank == case.victim and case.fault == "full disk":
            found["PROXYCCL_CACHE"] = found["PROXYCCL_REPORT_DIR"] = str(self._full(here))
        if rank == case.victim and case.fault == "clock jumps":
            found["LD_PRELOAD"] = str(self._clock)
        return found

    @staticmethod
    def _full(here: Path) -> Path:
        full = here / "full"
        full.mkdir(exist_ok=True)
        return full

    @contextlib.contextmanager
    def link_fault(self, case: Case) -> Iterator[None]:
        """Applies the case's link fault, if any, during the `with` block, and repairs the link at the block's end."""
        hosts = self._hosts
        if hosts is None or case.fault not in LINK_FAULTS:
            yield
            return
        if case.fault == "link loss":
            hosts.disturb(1, *_LOSS)
        else:
            hosts.cut(1)
        mend = hosts.calm if case.fault == "link loss" else hosts.join
        early = threading.Timer(case.timeout / 6, mend, (1,)) if case.fault == "link pause" else None
        if early is not None:
            early.start()
        try:
            yield
        finally:
            if early is None:
                mend(1)
            else:
                early.join()
