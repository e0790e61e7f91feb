"""The options, the time limit and the description of the machine that all benchmark programs share. Needs no torch."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxyccl import Communicator
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions

RESULT, FACTS = "RESULT ", "FACTS "
"""The beginnings of a rank's lines that `programs.py` reads: a row, and the facts about the job."""
_ENDING_SECONDS = 3.0
_SHOWN_CHARACTERS = 20_000  # number of characters that are shown of a failed command's output


def common_arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all programs have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-t", "--seconds", type=options.count, default=150, help="time to spend (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")
    return parser


def end_if_it_hangs(seconds: float) -> None:
    """Ends the process with a traceback of all threads if the process runs far longer than `seconds`."""
    faulthandler.dump_traceback_later(2 * seconds + 60, exit=True)


def output_of(title: str, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Runs a command, and returns its output, errors included. Processes that the command started end with the command,
    also if SIGTERM or SIGINT ends this program meanwhile.

    Args:
        title: the name of the command in messages.
        command: the command.
        environment: all environment variables.
        seconds: the time after which the processes are killed.

    Raises:
        SystemExit: the command failed, or did not end in time; the message contains the end of the output.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            output, _ = job.communicate(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun then ends its ranks, which are not of its process group
            try:
                output, _ = job.communicate(timeout=_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                output, _ = job.communicate()
            ended = "interrupted" if isinstance(error, KeyboardInterrupt) else f"not done within {seconds:g} s"
            raise SystemExit(f"{title}: {ended}\n{output[-_SHOWN_CHARACTERS:]}") from None
    if job.returncode:
        raise SystemExit(f"{title}: status {job.returncode}\n{output[-_SHOWN_CHARACTERS:]}")
    return output


def nvidia_driver() -> str:
    """Returns the version of NVIDIA's kernel driver, or "unknown"."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else "unknown"


def describe(comm: Communicator) -> Fields:
    """Returns the fields of results that describe the ranks and their devices."""
    from mpi4py import MPI  # programs that torchrun starts do not use MPI

    return {
        "device": comm.runtime.describe(),
        "nvidia_driver": nvidia_driver(),
        "runtime": comm.runtime.name,
        "world_size": comm.world_size,
        "mpi": " ".join(MPI.Get_library_version().strip("\0").split("\n")[0].split()),
    }


def heading(comm: Communicator, title: str, *notes: str) -> None:
    """Prints the title and the machine on the first rank."""
    if comm.rank:
        return
    facts = machine()
    print(f"# ProxyCCL {versions().get('proxyccl', '')} {title}: {comm.world_size} ranks, {comm.runtime.name} runtime")
    if comm.runtime.name != "host":
        print(f"# {comm.runtime.describe()}; kernel driver {nvidia_driver()}")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    for note in notes:
        print(f"# {note}")
    print("#", flush=True)
