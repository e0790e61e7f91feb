"""Time from the start of Python to the first result, on GPUs or on the host runtime: python first_result.py

Each measurement starts a job of new processes. Each rank records the seconds from the start of its own process, which
the system reports in steps of 10 ms, to the end of each stage: the interpreter, the imports, the communicator, and the
first all_reduce of 1 KiB with its result on the CPU. The times therefore exclude the time of the launcher. The first
proxied all_reduce is timed separately: immediately after the first all_reduce, and on a communicator that is 2 s old. A
row shows the slowest rank's times, each as the median over all jobs. The contenders' jobs alternate. Without --quick,
the first job of each contender is not counted, because it fills caches.

On GPUs torch calls NCCL, in ranks that torchrun starts; MPI uses host memory. To find the GPU memory that a separate
process of proxies takes, the program compares the free memory of two jobs 2 s after their start: one with that process,
and one whose proxies run in threads of the ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

# mpi4py reads this setting at its import. This program must not initialise MPI, because it is not an MPI rank.
os.environ["MPI4PY_RC_INITIALIZE"] = "false"

import aims
from program import common_arguments, nvidia_driver, output_of

from proxyccl.device.runtimes import find_runtime, open_runtime
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

_RANK = Path(__file__).with_name("first_result_rank.py")
_JOB_SECONDS = 120.0
_REPEATS = 5
_STAGES = ("interpreter", "imports", "communicator", "first result")
_CALLS = ("first proxied call", "of it the proxy", "second proxied call")
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_PROCESS, _THREAD = "ProxyCCL, 2 s old, proxy in a process", "ProxyCCL, 2 s old, proxy in a thread"


@dataclass(frozen=True)
class Contender:
    """A kind of job that the program starts.

    Attributes:
        title: the job's name in tables.
        argument: a key of `first_result_rank.CONTENDERS`.
        environment: environment variables that the job's ranks get.
        by_torchrun: whether torchrun starts the job instead of mpiexec.
    """

    title: str
    argument: str
    environment: dict[str, str] = field(default_factory=dict)
    by_torchrun: bool = False


def contenders(runtime: str) -> list[Contender]:
    """Returns the jobs that can run on a runtime with the installed libraries."""
    ours = {"PROXYCCL_RUNTIME": runtime}
    found = [
        Contender("ProxyCCL, proxied call at once", "proxyccl", ours),
        Contender(_PROCESS, "proxyccl-later", {**ours, "PROXYCCL_PROXY": "process"}),
        # Loads kernels lazily, as the other jobs do, so that the jobs' GPU memory can be compared. This causes no
        # deadlock, because no other library launches kernels in this job.
        Contender(_THREAD, "proxyccl-later", {**ours, "PROXYCCL_PROXY": "thread"}),
        Contender("MPI, arrays of the CPU", "mpi"),
    ]
    if importlib.util.find_spec("torch") is not None:
        name, argument = ("torch, gloo", "gloo") if runtime == "host" else ("torch, NCCL", "nccl")
        found.append(Contender(name, argument, by_torchrun=True))
    return found


def run(contender: Contender, ranks: int, mpiexec: list[str]) -> Fields:
    """Runs a job. Returns the slowest rank's time in seconds until the end of each stage, and the least free memory of
    the GPUs.

    Raises:
        SystemExit: the job failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [os.fspath(_RANK), contender.argument, folder]
        if contender.by_torchrun:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        else:
            launcher = [*mpiexec, "-n", str(ranks), sys.executable]
        environment = {**os.environ, **_WITHOUT_MULTICAST, **contender.environment}
        del environment["MPI4PY_RC_INITIALIZE"]
        output_of(contender.title, [*launcher, *program], environment, _JOB_SECONDS)
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    worst = {name: max(stages[name] for stages in of_ranks) for name in of_ranks[0]}
    if "free_bytes" in worst:
        worst["free_bytes"] = min(stages["free_bytes"] for stages in of_ranks)
    return worst


def medians(samples: list[Fields]) -> Fields:
    """Returns the median time until the end of each stage."""
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def show(rows: dict[str, Fields]) -> None:
    """Prints the table, in milliseconds."""
    columns = [Column(name, "(ms)", max(12, len(name)), ".0f") for name in _STAGES]
    columns += [Column(name, "(ms)", len(name), ".1f") for name in _CALLS]
    table = Table((Column("", "", 40, left=True), *columns))
    table.header()
    for title, row in rows.items():
        times = [row.get(name) for name in (*_STAGES, *_CALLS)]
        table.row(title, *(None if time is None else 1e3 * time for time in times))


def conclusions(rows: dict[str, Fields]) -> Fields:
    """Prints and returns the comparisons that have a target, and the GPU memory that the process of proxies takes."""
    found: Fields = {}
    ours = next(iter(rows.values()))["first result"]
    if "torch, NCCL" in rows:
        ratio = ours / rows["torch, NCCL"]["first result"]
        found["over_nccl"] = {"value": ratio, "aim": aims.FIRST_RESULT_OVER_NCCL}
        print(f"First result: {ratio:.2f} of NCCL's time (aim: less than {aims.FIRST_RESULT_OVER_NCCL})")
    found["proxied_at_2_s"] = {"value": rows[_PROCESS]["first proxied call"], "aim": aims.FIRST_PROXIED_CALL_SECONDS}
    print(
        f"First proxied call, in a process, on a communicator 2 s old: {1e3 * rows[_PROCESS]['first proxied call']:.1f}"
        f" ms (aim: at most {1e3 * aims.FIRST_PROXIED_CALL_SECONDS:.0f})"
    )
    if "free_bytes" in rows[_PROCESS]:
        taken = rows[_THREAD]["free_bytes"] - rows[_PROCESS]["free_bytes"]
        found["daemon_bytes_of_each_gpu"] = taken
        print(f"The job's own daemon takes {taken / 2**20:.0f} MiB of each GPU")
    return found


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=options.count, help="number of ranks (default: 2 on GPUs, else 4)")
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = os.fspath(beside) if beside.exists() else "mpiexec"
    parser.add_argument("--mpiexec", default=launcher, metavar="COMMAND", help="with its options (%(default)s)")
    parsed = parser.parse_args()
    runtime = os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    ranks = parsed.ranks or (4 if runtime == "host" else 2)
    facts = {"runtime": runtime, "world_size": ranks, "nvidia_driver": nvidia_driver(), "mpiexec": parsed.mpiexec}
    print(f"# ProxyCCL {versions().get('proxyccl', '')}: from python to the first result, {ranks} ranks, {runtime}")
    print(f"# {machine()['cpu']}, {machine()['cores']} cores, load {machine()['load']}\n#", flush=True)
    runs, fill_caches = contenders(runtime), 0 if parsed.quick else 1
    samples: dict[str, list[Fields]] = {contender.title: [] for contender in runs}
    end = time.monotonic() + parsed.seconds
    for repeat in range(1 if parsed.quick else 1 + _REPEATS):
        if repeat > fill_caches and time.monotonic() > end:
            break
        for contender in runs:
            sample = run(contender, ranks, shlex.split(parsed.mpiexec))
            if repeat >= fill_caches:
                samples[contender.title].append(sample)
    rows = {title: medians(found) for title, found in samples.items()}
    show(rows)
    print()
    results = {"benchmark": "first_result", **facts, "stages_s": rows, **conclusions(rows)}
    results["device"] = open_runtime(runtime).describe()  # opening a runtime takes GPU memory, so this is done last
    if parsed.json is not None:
        write_json(parsed.json, {**results, "samples_s": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
