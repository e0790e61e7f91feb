"""Programs as users write them, with ProxyCCL and with NCCL: python programs.py --ranks 2 --json FILE

The parts measure trainings by FSDP2 and DDP, a mixture of experts, the time to issue calls, and proxied calls after the
proxy was idle. Each part is a separate job with its own time-out; in the job, measurements of the contenders alternate.
The results are written after each row, so a part that fails loses only its own rows; the file names the failed part and
the reason. Times are those of the slowest rank.

Then other people's programs run (others.py). Each contender (ProxyCCL with the defaults, ProxyCCL with other settings,
and NCCL or gloo) has a separate job. All these jobs run at the same time on the same cores, but only one job at a time
executes steps, four steps per turn. The rows of other people's programs also have the time of the first step, the time
of the slowest of steps 2 to 10 divided by the median ("late"), and the CPU time of a step, including the CPU time of
the proxies.

The CPU's share is the fraction of the measured time in which the CPU issued the work. If this share is near 1, a faster
GPU would not help. In the rows of calls after idle times, the CPU's share is the share of a core that an idle proxy
uses.

Without a GPU for each rank, the program runs tiny cases on the host runtime and with gloo, only to show that the cases
work.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from others import CONTENDERS, FAMILIES, GO, OURS, PROBLEM, TURN, Program, named
from program import FACTS, RESULT, common_arguments

from proxyccl.device.runtimes import find_runtime
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

_HERE = Path(__file__).parent
_RANK = _HERE / "programs_rank.py"
_OTHERS = _HERE / "others_rank.py"
_START_SECONDS = 60.0  # time limit in seconds for imports and the start of communicators
_MIXTURE = _HERE.parent / "examples" / "moe_training.py"
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_GRACE_SECONDS = 3.0
_SHOWN_LINES = 15  # number of lines shown of a failed job's output
_COLUMNS = (
    Column("program", "", 50, left=True),
    Column("figure", "", 50, left=True),
    Column("by", "", 34, left=True),
    Column("value", "", 12, ",.1f"),
    Column("unit", "", 8, left=True),
    Column("CPU's", "share", 6, ".2f"),
    Column("over", "ours", 6, ".2f"),
    Column("first", "ms", 9, ",.1f"),
    Column("late", "/ median", 8, ".2f"),
    Column("CPU", "ms", 8, ",.2f"),
)

Rows = Callable[[Fields], list[Fields]]
"""Makes rows of `programs.py` from another program's results."""


def figure(name: str, value: float | None, cpu_share: float | None = None, *, ours: bool = True) -> Fields:
    """Returns the entry of one contender in a row."""
    return {"name": name, "ours": ours, "value": value, "cpu_share": cpu_share}


def row(program: str, what: str, unit: str, values: list[Fields], **more: Any) -> Fields:
    """Returns a row: a program, the measured quantity, its unit, and a value for each contender, ours first."""
    return {"program": program, "figure": what, "unit": unit, "values": values, **more}


def of_a_mixture(result: Fields) -> Fields:
    """Makes a row from the output of `moe_training.py` for one backend; `Collected.add` joins the rows of ProxyCCL and
    of torch's own backend.
    """
    how = "captured" if result["captured"] else "eager"
    name = result["name"]
    value = figure(name, result["tokens_per_second"], result["cpu_share"], ours=name == "proxyccl")
    return row("mixture of experts, 8 layers", f"training, {how}", "tokens/s", [value], more_is_better=True)


def of_rests(results: Fields) -> list[Fields]:
    """Makes rows of calls that follow idle times: calls by a proxy with its default process and idle policy, by
    kernels, and by NCCL.
    """
    rows = [each for each in results["rows"] if each["issued"] == "call"]
    rests = [key for key in rows[0] if key.startswith("after_")]
    shown = []
    for rest in rests:
        values = [
            figure(
                {"NCCL": "nccl", "kernels": "proxyccl, by kernels"}.get(
                    each["by"], f"proxyccl, proxy, {each['place']}"
                ),
                each[rest],
                each.get("share"),
                ours=each["by"] != "NCCL",
            )
            for each in sorted(rows, key=lambda each: (each["by"] != "proxy", each["place"] != "process"))
        ]
        after = f"after {rest.split('_')[1]} ms of rest"
        shown.append(row("all_reduce of 1 KiB by proxy", after, "µs", values))
    return shown


def of_values(results: Fields) -> list[Fields]:
    """Makes a row for each operation whose trigger carries a value. The row also has the time of an 8-byte put."""
    times = {each["operation"]: each["one_way_us"] for each in results["value_latency"]}
    beside = "putWithSignal, 8 B"
    return [
        row(name, "one way", "µs", [figure(f"proxyccl, {name}", us), figure(f"proxyccl, {beside}", times.get(beside))])
        for name, us in times.items()
        if name != beside
    ]


def of_normal_mode(results: Fields) -> list[Fields]:
    """Makes rows of deep_ep's normal mode: with outputs of the exact size, with outputs of a fixed size, and with NCCL,
    which moves the same number of bytes.
    """
    shown = []
    for tokens in dict.fromkeys(each["tokens"] for each in results["results"]):
        names = {"Buffer": "proxyccl", "Buffer, num_worst_tokens": "proxyccl, num_worst_tokens", "NCCL": "nccl"}
        of_it = {names[e["name"]]: e for e in results["results"] if e["tokens"] == tokens and e["name"] in names}
        for what, key in (("a dispatch", "dispatch_us"), ("issue of a pair", "issuing_us")):
            values = []
            for name, each in of_it.items():
                share = min(1.0, each["issuing_us"] / (each["dispatch_us"] + each["combine_us"]))
                values.append(figure(name, each[key], share, ours=name != "nccl"))
            shown.append(row(f"deep_ep normal mode, exact, {tokens} tokens", what, "µs", values))
    return shown


@dataclass(frozen=True)
class Part:
    """A part of the measurements, which runs as a separate job.

    Attributes:
        arguments: the program that the job runs, and its options.
        seconds: the time after which the job is ended.
        of_file: makes rows from the JSON file that the program writes if mpiexec starts it. None for a program that
            prints its rows and is started with torchrun's variables.
        ranks: the number of ranks that the program requires; None for any number.
        needs_gpus: whether the program can't run on CPUs.
        quick: options with which the program measures less.
    """

    arguments: tuple[str, ...]
    seconds: float
    of_file: Rows | None = None
    ranks: int | None = None
    needs_gpus: bool = False
    quick: tuple[str, ...] = ("--quick",)


PARTS: dict[str, Part] = {
    "trainings": Part((str(_RANK), "fsdp-bf16", "fsdp-f32", "ddp-f32", "fsdp-half"), 100),
    "moe": Part((str(_MIXTURE), "--json"), 60, quick=("--steps", "1")),
    "moe-captured": Part((str(_MIXTURE), "--json", "--captured"), 90, needs_gpus=True, quick=("--steps", "1")),
    "calls": Part((str(_RANK), "issue", "proxied-graphs", "experts"), 80),
    "normal-mode": Part(
        (str(_HERE / "deep_ep_buffer.py"), "--tokens", "4096", "--quick"),
        40,
        of_normal_mode,
        needs_gpus=True,
        quick=(),
    ),
    "rests": Part((str(_HERE / "after_a_rest.py"), "--policy", "default"), 60, of_rests),
    "values": Part((str(_HERE / "put_signal.py"), "--quick"), 40, of_values, ranks=2, quick=()),
}


class Job:
    """The processes of a job. `lines` returns when the processes have ended.

    Args:
        commands: for each process, its command and environment variables. `lines` reads the first process's output.
        log: the file for the output of the other processes.
    """

    def __init__(self, commands: list[tuple[list[str], dict[str, str]]], log: Any) -> None:
        self.timed_out = False
        self._timer: threading.Timer | None = None
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **_WITHOUT_MULTICAST, **variables},
                stdin=subprocess.PIPE,
                stdout=log if number else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for number, (command, variables) in enumerate(commands)
        ]

    def limit(self, seconds: float | None) -> None:
        """Kills the processes if `limit` is not called again within `seconds`; None removes the limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else threading.Timer(seconds, self._end)
        if self._timer is not None:
            self._timer.start()

    def tell(self, line: str) -> None:
        """Writes a line to the standard input of each process that has not closed it."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{line}\n")
                process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Yields the lines that the first process prints."""
        output = self._processes[0].stdout
        assert output is not None
        yield from iter(output.readline, "")  # `yield from output` would close the file

    def status(self) -> int:
        """Waits until all processes have ended. Returns the first nonzero status; 0 if all are 0."""
        statuses = [process.wait() for process in self._processes]
        self.limit(None)
        return next((status for status in statuses if status), 0)

    def close(self) -> None:
        """Closes the processes' standard input, which makes the ranks exit, and kills processes that do not exit
        soon.
        """
        self.limit(None)
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        end = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._kill()

    def _end(self) -> None:
        self.timed_out = True
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def commands_of(part: Part, parsed: Any, more: list[str], written: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the commands of a part's ranks, with their environment variables."""
    arguments = [part.arguments[0], *parsed.cases] if parsed.cases and part is PARTS["trainings"] else part.arguments
    given = [*arguments, *(part.quick if parsed.quick else ()), *more]
    if part.of_file is not None:
        launcher = [*shlex.split(parsed.mpiexec), "-n", str(parsed.ranks), sys.executable, "-m", "mpi4py"]
        return [([*launcher, *given, "--json", str(written)], {})]
    return ranks_of([sys.executable, *given], parsed.ranks)


def ranks_of(command: list[str], ranks: int) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the command for each rank, with the variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return [(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]


class Collected:
    """Collects the rows. Prints each row when it is added, and writes all rows to the file."""

    def __init__(self, path: Path | None, facts: Fields) -> None:
        self._path, self.facts = path, facts
        self.rows: list[Fields] = []
        self.failed: dict[str, str] = {}
        self.outputs: dict[tuple[str, str], list[list[float]]] = {}  # each rank's outputs, by program and contender
        self._table = Table(_COLUMNS)
        self._table.header()

    def add(self, new: Fields) -> None:
        """Adds a row, or adds the row's values to an earlier row of the same measurement."""
        same = [row for row in self.rows if all(row[key] == new[key] for key in ("program", "figure", "unit"))]
        if same:
            same[0]["values"] += new["values"]
        else:
            self.rows.append(new)
        ours = (same or [new])[0]["values"][0]["value"]
        for value in new["values"]:
            ratio = value["value"] / ours if value["value"] and ours else None
            given = (value["value"], new["unit"], value["cpu_share"], ratio)
            given += tuple(value.get(key) for key in ("first_ms", "late", "cpu_ms"))
            self._table.row(new["program"], new["figure"], value["name"], *given)
        self.write()

    def fail(self, part: str, reason: str, output: list[str]) -> None:
        """Records that a part has failed."""
        self.failed[part] = reason
        print(f"# {part}: {reason}", *(f"#   {line.rstrip()}" for line in output[-_SHOWN_LINES:]), sep="\n", flush=True)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            write_json(self._path, {"benchmark": "programs", **self.facts, "rows": self.rows, "failed": self.failed})


def run(name: str, part: Part, parsed: Any, more: list[str], collected: Collected, folder: Path) -> None:
    """Runs a part."""
    written, others = folder / f"{name}.json", folder / f"{name}.log"
    output: list[str] = []
    with others.open("w") as log, closing(Job(commands_of(part, parsed, more, written), log)) as job:
        job.limit(part.seconds)
        for line in job.lines():
            if line.startswith(RESULT):
                found = json.loads(line.removeprefix(RESULT))
                collected.add(of_a_mixture(found) if "tokens_per_second" in found else found)
            elif line.startswith(FACTS):
                collected.facts |= json.loads(line.removeprefix(FACTS))
            else:
                output.append(line)
        status = job.status()
    if part.of_file is not None and written.exists():
        for found in part.of_file(json.loads(written.read_text())):
            collected.add(found)
    if job.timed_out or status:
        reason = f"ended after {part.seconds:g} s" if job.timed_out else f"status {status}"
        collected.fail(name, reason, output + others.read_text().splitlines())


class Contender:
    """A contender of other people's programs, with its job.

    Args:
        name: a key of CONTENDERS.
        parsed: the program's arguments.
        folder: the directory for files of all contenders.

    Attributes:
        by: the contender's name in rows.
        row: the row of the finished program; None if the program did not finish.
        reason: why the program did not run or did not finish; "" if it finished.
        output: what the job has printed since the program began.
    """

    def __init__(self, name: str, parsed: Any, folder: Path) -> None:
        self.by = torch_backend() if name == "peer" else name
        self._default = name in (OURS, "peer")
        self._variables = {**CONTENDERS[name], "TORCHELASTIC_RUN_ID": "programs"}  # for Lightning
        files = folder / name
        files.mkdir()
        self._command = [sys.executable, str(_OTHERS), "--by", self.by, "--folder", str(files)]
        self._command += ["--quick"] if parsed.quick else []
        self._ranks, self._log = parsed.ranks, folder / f"others {name}.log"
        self._job: Job | None = None
        self.row: Fields | None = None
        self.reason = ""
        self.output: list[str] = []

    def runs(self, program: Program) -> bool:
        return self._default or program.variants

    def begin(self, program: Program) -> None:
        """Lets the job begin a program."""
        self.row, self.reason, self.output = None, "", []
        if self._job is None:
            commands = [(each, {**given, **self._variables}) for each, given in ranks_of(self._command, self._ranks)]
            with self._log.open("w") as log:
                self._job = Job(commands, log)
        self._job.tell(program.title)

    def go_on(self) -> None:
        """Lets the job execute the steps of its turn."""
        assert self._job is not None
        self._job.tell(GO)

    def comes_to_a_turn(self, seconds: float) -> bool:
        """Waits for at most `seconds` until the job is ready for its next turn. If the program has ended, sets `row` or
        `reason` and returns False.
        """
        assert self._job is not None
        self._job.limit(seconds)
        for line in self._job.lines():
            if line.startswith((TURN, PROBLEM, RESULT)):
                self._job.limit(None)
                if line.startswith(TURN):
                    return True
                if line.startswith(PROBLEM):
                    self.reason = line.removeprefix(PROBLEM).strip()
                else:
                    self.row = json.loads(line.removeprefix(RESULT))
                return False
            self.output.append(line)
        status = self._job.status()
        self.reason = "the time was up" if self._job.timed_out else f"status {status}"
        self.output += self._log.read_text().splitlines()
        self.close()
        return False

    def close(self) -> None:
        """Ends the job. The next `begin` starts a new job."""
        if self._job is not None:
            self._job.close()
            self._job = None


def run_others(families: list[str], parsed: Any, end: float, collected: Collected, folder: Path) -> None:
    """Runs other people's programs. All contenders begin a program at the same time, then take turns at executing the
    program's steps.
    """
    contenders = [Contender(name, parsed, folder) for name in parsed.contenders]
    try:
        for program in (program for family in families for program in FAMILIES[family]):
            if end <= time.monotonic():
                collected.fail(program.title, f"the {parsed.seconds} s were up", [])
                continue
            run_in_turns(program, [each for each in contenders if each.runs(program)], end)
            for each in (each for each in contenders if each.runs(program)):
                if each.row is None:
                    title = program.title if each.reason.startswith("not run") else f"{program.title} by {each.by}"
                    if title not in collected.failed:
                        collected.fail(title, each.reason, each.output)
                else:
                    collected.outputs[program.title, each.by] = each.row["values"][0].pop("outputs")
                    collected.add(each.row)
                    compare(collected, program.title, each.by, torch_backend())
    finally:
        for each in contenders:
            each.close()


def run_in_turns(program: Program, contenders: list[Contender], end: float) -> None:
    """Runs a program with all contenders. The contenders' order alternates."""

    def comes_to_a_turn(each: Contender, seconds: float) -> bool:
        return each.comes_to_a_turn(min(seconds, end - time.monotonic()))

    for each in contenders:
        each.begin(program)
    left = [each for each in contenders if comes_to_a_turn(each, _START_SECONDS + program.seconds)]
    while left:
        going = left[::-1]
        left = []
        for each in going:
            each.go_on()
            if comes_to_a_turn(each, program.seconds):
                left.append(each)


def torch_backend() -> str:
    return "gloo" if os.environ["PROXYCCL_RUNTIME"] == "host" else "nccl"


def compare(collected: Collected, title: str, by: str, peer: str) -> None:
    """Records a failure if a program's outputs differ from the outputs with NCCL or gloo by more than rounding. Does
    nothing until the outputs of both contenders are known.
    """
    _, program = named(title)
    theirs = collected.outputs.get((title, peer))
    for (other, name), outputs in collected.outputs.items() if theirs is not None else ():
        if other == title and by in (name, peer) and (found := difference(outputs, theirs)) > program.rounding:
            collected.fail(f"{title} by {name}", f"its outputs differ by {found:.2g} of the largest from {peer}'s", [])


def difference(outputs: list[list[float]], right: list[list[float]]) -> float:
    """Returns the largest difference between two contenders' outputs, relative to the largest output. Returns infinity
    if the numbers of outputs differ, or if an output is not finite.
    """
    if [len(each) for each in outputs] != [len(each) for each in right]:
        return float("inf")
    pairs = [pair for ours, theirs in zip(outputs, right, strict=True) for pair in zip(ours, theirs, strict=True)]
    largest = max((abs(value) for _, value in pairs), default=0.0)
    most = max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)
    whole = all(math.isfinite(value) for pair in pairs for value in pair)
    return most / (largest or 1.0) if whole else float("inf")


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(seconds=470)
    parser.add_argument("-n", "--ranks", type=options.count, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("-p", "--parts", nargs="+", choices=[*PARTS, *FAMILIES], help="default: all", metavar="PART")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="of others' programs"
    )
    parser.add_argument("--cases", nargs="+", default=[], help="only these of the trainings, such as fsdp-bf16")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="WORDS", help="of ours in trainings: see programs_ranks.py"
    )
    parser.add_argument("--together", action="store_true", help="also time steps of trainings that follow one another")
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = os.fspath(beside) if beside.exists() else "mpiexec"
    parser.add_argument("--mpiexec", default=launcher, metavar="COMMAND", help="with its options (%(default)s)")
    parsed = parser.parse_args()
    runtime = os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    os.environ["PROXYCCL_RUNTIME"] = runtime
    print(f"# ProxyCCL {versions().get('proxyccl', '')}: programs, {parsed.ranks} ranks, {runtime}")
    print(f"# {machine()['cpu']}, {machine()['cores']} cores, load {machine()['load']}\n#", flush=True)
    method = "the contenders alternate; a value is the median over turns, on the slowest rank"
    collected = Collected(parsed.json, {"runtime": runtime, "world_size": parsed.ranks, "method": method})
    end = time.monotonic() + parsed.seconds
    parts = parsed.parts or [*PARTS, *FAMILIES]
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in parts if name in PARTS):
            part = PARTS[name]
            if (part.needs_gpus and runtime == "host") or part.ranks not in (None, parsed.ranks):
                continue
            if time.monotonic() > end:
                collected.fail(name, f"the {parsed.seconds} s were up", [])
                continue
            more: list[str] = []
            if name == "trainings":
                more = [word for variant in parsed.variant for word in ("--variant", variant)]
                more += ["--together"] if parsed.together else []
            run(name, part, parsed, more, collected, Path(folder))
        if families := [name for name in parts if name in FAMILIES]:
            run_others(families, parsed, end, collected, Path(folder))
    collected.write()
    return 1 if collected.failed else 0


if __name__ == "__main__":
    sys.exit(main())
