"""A rank of other people's programs: others_rank.py --by nccl --folder DIRECTORY, with torchrun's variables

`programs.py` writes the titles of the programs (others.py) to the rank's standard input, one per line. A job has one
contender, the backend of torch's default group, and makes a new group for each family of programs. The jobs of all
contenders run at the same time, but only one job at a time executes steps: before each group of steps (a turn), the
ranks wait for a line of input. After the last turn the first rank prints a row with the outputs of all ranks, which
`programs.py` compares between contenders. If a program fails, its job ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from others import GO, OURS, PROBLEM, TURN, Program, named
from program import RESULT
from torch import Tensor

import proxyccl.torch  # noqa: F401  registers the backend, which torch 2.15 and later find without this import
from proxyccl.channels.group import open_groups
from proxyccl.proxy.observe.publications import find
from proxyccl.proxy.processes import stat_of

_SAMPLES = 16
_AIMED_STEPS = 10  # The value `late` covers steps 2 to 10.
_TURN_STEPS = 4  # steps per turn; the CPU time of the first turn is not counted, because its steps create caches
_CORES = 4
"""In each turn, the main thread of a rank and torch's threads for backward passes may run on this number of cores. Each
turn has other cores, and all contenders have the same cores in a turn. The cores of a shared machine differ in speed by
up to 80 % from minute to minute, so a program whose pace the CPU sets would otherwise measure the cores of its job.
"""


class World:
    """This rank's environment, and the steps of the running program.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        on_gpus: whether each rank has a GPU.
        device: this rank's device.
        dtype: the element type of models.
        folder: a directory for files, the same for all ranks and contenders.
        seconds: for each step, the time until the device had finished the step, and the time until the step was issued.
        outputs: the elements that the program passed to `keep`.
    """

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ["LOCAL_RANK"])
        wanted = os.environ.get("PROXYCCL_RUNTIME") != "host"
        self.on_gpus = wanted and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device("cuda", local) if self.on_gpus else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.on_gpus else torch.float32
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*address, self.size, self.rank == 0, timedelta(seconds=60))
        self.folder, self._quick, self._met = folder, quick, 0
        self._cores = sorted(os.sched_getaffinity(0))
        self._pids = set(self.of_all(os.getpid()))

    def begin(self, program: Program) -> None:
        """Clears the state of the previous program, and sets a time limit for the wait for the first turn and for each
        turn.
        """
        self._limit = program.seconds
        faulthandler.dump_traceback_later(self._limit, exit=True)
        self.seconds: list[tuple[float, float]] = []
        self.outputs: list[Tensor] = []
        self._cpu = 0.0

    def steps(self, count: int = 24) -> Iterator[int]:
        """Yields the number of each step. A step ends when the program asks for the next step and the device has
        finished this step. Waits for a turn before the first step, and again after every _TURN_STEPS steps.
        """
        count = _TURN_STEPS + 1 if self._quick else count
        cpu = 0.0
        for first in range(0, count, _TURN_STEPS):
            self._await_turn(first // _TURN_STEPS)
            proxies = self._proxies()
            before = self._cpu_seconds(proxies)
            for step in range(first, min(first + _TURN_STEPS, count)):
                start = time.perf_counter()
                yield step
                issued = time.perf_counter() - start
                self.synchronize()
                self.seconds.append((time.perf_counter() - start, issued))
            cpu += self._cpu_seconds(proxies) - before if first else 0.0
        self._cpu = cpu / (count - _TURN_STEPS)

    def _await_turn(self, turn: int) -> None:
        self.meet()
        faulthandler.cancel_dump_traceback_later()
        if self.rank == 0:
            print(TURN, flush=True)
        if sys.stdin.readline().strip() != GO:
            raise RuntimeError("programs.py ended before this program's last turn")
        faulthandler.dump_traceback_later(self._limit, exit=True)
        share = len(self._cores) // self.size
        if share >= 2 * _CORES:
            first = self.rank * share + turn % (share // _CORES) * _CORES
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # the thread may have ended
                    if int(thread.name) == os.getpid() or (thread / "comm").read_text().startswith("pt_autograd"):
                        os.sched_setaffinity(int(thread.name), self._cores[first : first + _CORES])
        self.meet()

    def synchronize(self) -> None:
        """Waits for the device without spinning, because spinning would count as CPU time of the step."""
        if self.on_gpus:
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()

    def keep(self, output: Tensor) -> None:
        """Keeps elements of a tensor for the comparison with other contenders. Does not wait for the device."""
        whole = output.detach().reshape(-1)
        self.outputs.append(whole[:: -(-whole.numel() // _SAMPLES)].clone())

    def of_all(self, own: Any) -> list[Any]:
        """Returns the objects of all ranks. A store transfers the objects, so that the contender's backend gets only
        the program's calls.
        """
        self._met += 1
        self.store.set(f"met/{self._met}/{self.rank}", json.dumps(own))
        return [json.loads(self.store.get(f"met/{self._met}/{rank}")) for rank in range(self.size)]

    def meet(self) -> None:
        """Waits for the device and for all ranks."""
        if self.on_gpus:
            torch.cuda.synchronize()
        self.of_all(None)

    def _proxies(self) -> set[int]:
        """Returns the processes, other than the ranks, in which this job's proxies run."""
        jobs = {group.job for group in open_groups}
        return {found.pid for _, found in find() if found.description.job in jobs} - self._pids

    def _cpu_seconds(self, proxies: set[int]) -> float:
        ticks = sum(int(field) for pid in proxies for field in stat_of(Path(f"/proc/{pid}/stat"))[11:13])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK") / self.size

    def row(self, program: Program, by: str) -> dict[str, Any]:
        """Returns the row of a program, with the slowest rank's times. All ranks call this together."""
        seconds, issued = zip(*self.seconds, strict=True)
        median = statistics.median(seconds)
        late = max(seconds[1:_AIMED_STEPS]) / median
        own = median, seconds[0], late, self._cpu, statistics.median(issued)
        step, first, late, cpu, issue = (max(column) for column in zip(*self.of_all(own), strict=True))
        outputs = torch.cat(self.outputs).tolist() if self.outputs else []
        value = {"name": by, "ours": by.startswith(OURS), "value": step * 1e3, "cpu_share": min(1.0, issue / step)}
        value |= {"first_ms": first * 1e3, "late": late, "cpu_ms": cpu * 1e3, "outputs": self.of_all(outputs)}
        return {"program": program.title, "figure": "a step", "unit": "ms", "values": [value]}


def why_not(program: Program, world: World) -> str:
    """Returns the reason why a program can't run in this job, or ""."""
    if missing := [module for module in program.needs if find_spec(module) is None]:
        return f"no module named {missing[0]}"
    if world.size < program.ranks:
        return f"it takes {program.ranks} ranks"
    return "it needs a GPU" if program.needs_gpu and not world.on_gpus else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", required=True, metavar="CONTENDER", help="its name; its first word is the backend")
    parser.add_argument("--folder", required=True, type=Path, help="for files of all contenders")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parsed = parser.parse_args()
    world = World(parsed.folder, quick=parsed.quick)
    if world.on_gpus:
        torch.cuda.set_device(world.device)
    before = None
    for line in iter(sys.stdin.readline, ""):
        family, program = named(line.strip())
        if reason := why_not(program, world):
            if world.rank == 0:
                print(f"{PROBLEM}not run: {reason}", flush=True)
            continue
        world.begin(program)
        if family != before:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.PrefixStore(f"{family}/", world.store)
            dist.init_process_group(parsed.by.split(",")[0], store=store, rank=world.rank, world_size=world.size)
            before = family
        torch.manual_seed(world.rank)
        module, function = program.function.split(":")
        getattr(importlib.import_module(module), function)(world, **program.options)
        row = world.row(program, parsed.by)
        if world.rank == 0:
            print(RESULT + json.dumps(row), flush=True)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # reference cycles keep models alive
        if world.on_gpus:
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    world.store.set(f"ended/{world.rank}", "")
    if world.rank == 0:  # rank 0 hosts the store, so it exits last
        world.store.wait([f"ended/{rank}" for rank in range(world.size)])


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # skips the destruction of the groups, which would wait for the other ranks
