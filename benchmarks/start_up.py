"""Time to start: imports, the commands, and a program's first result: python start_up.py

Each measurement runs a new process on the host runtime, with the modules' bytecode cached. The table shows the
process's wall-clock time from fork to exit, and the CPU time of the process and its children. The measured programs
alternate, so that other load affects all programs equally. For comparison, the table also has the times of Python alone
and numpy alone.

Below the table the program lists the modules with the longest import times without their imports, as shown by `python
-X importtime`.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from program import common_arguments, end_if_it_hangs

from proxyccl.tools.results import Fields, installed_version, machine, write_json
from proxyccl.tools.tables import Column, Table

ALL_REDUCE = """
import numpy
import proxyccl

class Alone:
    rank, world_size = 0, 1
    def all_gather(self, data, timeout, give_up): return [data]
    def close(self): pass

with proxyccl.Communicator(Alone(), runtime="host") as comm:
    x = numpy.ones(256, numpy.float32)
    comm.all_reduce(x)
    assert x.sum() == 256
"""
IMPORT, COMMUNICATOR = "import proxyccl", "proxyccl.Communicator"
PROGRAMS: dict[str, Sequence[str]] = {
    "python": ("-c", "pass"),
    "import numpy": ("-c", "import numpy"),
    IMPORT: ("-c", IMPORT),
    "import proxyccl, numpy": ("-c", "import proxyccl, numpy"),
    COMMUNICATOR: ("-c", f"{IMPORT}\n{COMMUNICATOR}"),
    "every public name": ("-c", "from proxyccl import *"),
    "first all_reduce, 1 KiB, one rank": ("-c", ALL_REDUCE),
    "proxyccl --help": ("-m", "proxyccl", "--help"),
    "proxyccl info": ("-m", "proxyccl", "info"),
    "proxyccl top --help": ("-m", "proxyccl", "top", "--help"),
    "proxyccl doctor --help": ("-m", "proxyccl", "doctor", "--help"),
    "proxyccl daemon --help": ("-m", "proxyccl", "daemon", "--help"),
}
"""Arguments of Python by the name in the table. A program that starts ranks goes here too."""
AIMS_S = {IMPORT: 0.08, "import proxyccl, numpy": 0.15, "proxyccl info": 0.3}
"""Wall-clock times on a quiet machine."""
_SLOWEST = 15
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)")
_COLUMNS = (
    Column("process", "", 36, left=True),
    Column("median", "(ms)", 8, ".0f"),
    Column("best", "(ms)", 8, ".0f"),
    Column("processor", "(ms)", 10, ".0f"),
    Column("aim", "(ms)", 6, ".0f"),
)


class Start(NamedTuple):
    """One run of a process: its wall-clock time and its processor time, in seconds."""

    wall: float
    processor: float


def environment() -> dict[str, str]:
    """Returns this process's environment variables, with bytecode caching turned on."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def start(arguments: Sequence[str]) -> Start:
    """Runs Python once."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment())
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(repeats: int, seconds: float) -> list[Fields]:
    """Runs each program once to fill caches, then `repeats` times, or fewer if the time is up. Returns a row for each
    program.
    """
    for arguments in PROGRAMS.values():
        start(arguments)
    end = time.monotonic() + seconds
    starts: dict[str, list[Start]] = {name: [] for name in PROGRAMS}
    for turn in range(repeats):
        if turn and time.monotonic() > end:
            break
        for name, arguments in PROGRAMS.items():
            starts[name].append(start(arguments))
    return [
        {
            "name": name,
            "median_s": statistics.median(run.wall for run in runs),
            "best_s": min(run.wall for run in runs),
            "processor_s": min(run.processor for run in runs),
            "aim_s": AIMS_S.get(name),
        }
        for name, runs in starts.items()
    ]


def slowest_imports(program: str, repeats: int) -> list[Fields]:
    """Returns the modules with the longest import times. A module's time is its minimum over several runs of a
    program.
    """
    best: dict[str, int] = {}
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env=environment(),
        )
        for microseconds, module in _LINE.findall(done.stderr):
            best[module] = min(best.get(module, sys.maxsize), int(microseconds))
    slowest = sorted(best.items(), key=lambda entry: -entry[1])[:_SLOWEST]
    return [{"module": module, "us": microseconds} for module, microseconds in slowest]


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(parsed.seconds)
    facts, version = machine(), installed_version("proxyccl") or ""
    print(f"# ProxyCCL {version} start-up, Python {sys.version.split()[0]}; processor: the least of a process")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}\n#")
    rows = measure(3 if parsed.quick else 20, parsed.seconds)
    table = Table(_COLUMNS)
    table.header()
    for row in rows:
        times = (row["median_s"], row["best_s"], row["processor_s"], row["aim_s"])
        table.row(row["name"], *(None if value is None else 1e3 * value for value in times))
    imports = slowest_imports(ALL_REDUCE, 2 if parsed.quick else 5)
    print("#\n# slowest imports up to the first all_reduce, each without its own imports:")
    for each in imports:
        print(f"# {each['us'] / 1e3:8.1f} ms  {each['module']}")
    if parsed.json is not None:
        write_json(parsed.json, {"benchmark": "start_up", "results": rows, "imports": imports})
    return 0


if __name__ == "__main__":
    sys.exit(main())
