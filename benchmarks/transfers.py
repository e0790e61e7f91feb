"""Times transfers between two processes of this host through ProxyCCL's version of NIXL's interface, and through NIXL
itself if installed.

python benchmarks/transfers.py [--rounds 5] [--tcp] [--devices [--mixed]] [--nixl DIRECTORY] [--json FILE]

Each round runs the two libraries one after the other, each in a pair of new processes; the table shows medians over
rounds. DIRECTORY is where NIXL's wheel was installed (`pip install --target DIRECTORY nixl`). The table shows
wall-clock times and the initiator's CPU time; "idle" is the share of a core that a process with an idle agent uses.

The last rows are times per region, for as many regions of 4 KiB as the number says. "register" and "deregister" make
a call for each region; "list" and "list backwards" register all regions by one call, in ascending and in descending
order of their addresses. "metadata" makes the bytes that another agent reads in "add"; "prepare" and "prepare remote"
prepare a list of as many blocks, of this agent's memory and of the other agent's.

With --devices, both agents use GPU memory (of two GPUs, or of one GPU if the machine has only one), and the table also
shows GB/s. With --mixed the initiator uses the host's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from proxyccl import open_runtime
from proxyccl.tools.results import write_json

ROOT = Path(__file__).resolve().parents[1]
SIZES = [(1, 8), (1, 4096), (1, 64 << 10), (1, 1 << 20), (1, 64 << 20), (1024, 4096), (10000, 45 << 10)]
"""The cases: the number of blocks, and the bytes of each block."""
DEVICE_SIZES = [
    *((1, 1 << bits) for bits in (3, 12, 16, 20, 24, 26, 30)),
    (1024, 4096),
    (1000, 256 << 10),
    (500, 1 << 20),
    (10000, 45 << 10),
]
MIXED_SIZES = [(1, 8), (1, 64 << 20), (10000, 45 << 10)]
"""The cases between the host's memory and a GPU's: the number of blocks, and the bytes of each block."""
REGIONS, REGION_BYTES = (5_000, 100_000), 4096
MOST_ENDED = 5_000
"""The most regions whose ends are timed."""
MOST_BYTES = 1 << 29
MOST_DEVICE_BYTES = 1 << 30
HUGE_PAGE = 2 << 20
IDLE_SECONDS, TARGET_SECONDS = 1.0, 60.0
MOST_SECONDS, MOST_SECONDS_TIMES = 0.5, 5
"""A case ends after this many seconds, if it ran this many times."""


def rows_of(address: int, blocks: int, nbytes: int, backwards: bool, most: int) -> Any:
    """Returns the rows of blocks that are not adjacent, in ascending or descending order."""
    stride = nbytes if blocks == 1 else min(2 * nbytes, most // blocks // 16 * 16)
    offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(stride)
    rows = np.zeros((blocks, 3), np.uint64)
    rows[:, 0] = np.uint64(address) + (offsets[::-1] if backwards else offsets)
    rows[:, 1] = nbytes
    return rows


class Side:
    """An agent, and its memory.

    Attributes:
        agent: the agent of NIXL's interface.
        kinds: for each kind of memory, its address and device.
    """

    def __init__(self, name: str, devices: bool, number: int) -> None:
        from nixl._api import nixl_agent

        self.agent = nixl_agent(name)
        # The memory starts at a huge page: copies of small pages take twice as long, and the number of small pages
        # would vary from run to run.
        memory = np.ones(MOST_BYTES + HUGE_PAGE, np.uint8)
        self._memory: list[Any] = [memory[-memory.ctypes.data % HUGE_PAGE :][:MOST_BYTES]]
        self.kinds = {"DRAM": (int(self._memory[0].ctypes.data), 0)}
        self.agent.register_memory([(self.kinds["DRAM"][0], MOST_BYTES, 0, "")], "DRAM")
        if devices:
            runtime = open_runtime(local_rank=number)
            runtime.activate()  # NIXL registers memory of the thread's current device
            self._memory += [runtime, runtime.allocate(MOST_DEVICE_BYTES)]
            self.kinds["VRAM"] = (self._memory[-1].ptr, runtime.device)
            self.agent.register_memory([(self._memory[-1].ptr, MOST_DEVICE_BYTES, runtime.device, "")], "VRAM")


def target(directory: Path, devices: bool) -> None:
    side = Side("target", devices, 1)
    partial = directory / "partial"
    data = json.dumps({"kinds": side.kinds, "metadata": side.agent.get_agent_metadata().hex()})
    partial.write_text(data)
    partial.rename(directory / "metadata")
    sys.stdin.read()  # waits until the parent ends this process
    os._exit(0)


def initiator(directory: Path, devices: bool, mixed: bool) -> None:
    given_up = time.monotonic() + TARGET_SECONDS
    while not (directory / "metadata").exists():
        if time.monotonic() > given_up:
            sys.exit(f"the target has not begun within {TARGET_SECONDS} s")
        time.sleep(0.01)
    data = json.loads((directory / "metadata").read_text())
    side = Side("initiator", devices, 0)
    agent = side.agent
    peer = agent.add_remote_agent(bytes.fromhex(data["metadata"]))
    results: dict[str, dict[str, float]] = {}
    kind = "VRAM" if devices else "DRAM"
    here = "DRAM" if mixed else kind
    for blocks, nbytes in MIXED_SIZES if mixed else DEVICE_SIZES if devices else SIZES:
        most = MOST_DEVICE_BYTES if here == "VRAM" else MOST_BYTES
        sides = []
        for to, of, (address, device), backwards in (
            ("", here, side.kinds[here], False),
            (peer, kind, data["kinds"][kind], True),
        ):
            rows = rows_of(address, blocks, nbytes, backwards, most)
            rows[:, 2] = device
            sides.append(agent.prep_xfer_dlist(to, rows, of))
        indices = np.arange(blocks, dtype=np.int32)
        for operation in ("WRITE", "READ"):
            times: list[tuple[float, float, float]] = []
            repetitions = max(5, min(1000, ((8 if devices else 1) << 28) // (blocks * nbytes)))
            began = time.perf_counter()
            handle = agent.make_prepped_xfer(operation, sides[0], indices, sides[1], indices)
            made = time.perf_counter() - began
            for repetition in range(repetitions + 3):
                processor, start = time.process_time(), time.perf_counter()
                state = agent.transfer(handle)
                posted = time.perf_counter()
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                if repetition >= 3:
                    end = time.perf_counter()
                    times.append((end - start, posted - start, time.process_time() - processor))
                if end_of(times):
                    break
            whole, post, spent = (statistics.median(column) for column in zip(*times, strict=True))
            case = f"{operation} {blocks} x {nbytes}"
            results[case] = {"us": whole * 1e6, "post": post * 1e6, "make": made * 1e6, "cpu": spent * 1e6}
            if devices:
                results[case]["GB/s"] = blocks * nbytes / whole / 1e9
            agent.release_xfer_handle(handle)
    if not devices:
        for count in REGIONS:
            results |= registrations(agent, count)
    spent, start = time.process_time(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    results["idle"] = {"cores": (time.process_time() - spent) / (time.perf_counter() - start)}
    print(json.dumps(results), flush=True)
    os._exit(0)


def registrations(peer: Any, count: int) -> dict[str, dict[str, float]]:
    """Times work on `count` regions of a new agent, which `peer` then knows, in microseconds per region."""
    from nixl._api import nixl_agent

    memory = np.zeros(count * REGION_BYTES, np.uint8)
    rows = [(memory.ctypes.data + number * REGION_BYTES, REGION_BYTES, 0, "") for number in range(count)]
    array = np.array([row[:3] for row in rows], np.uint64)
    results: dict[str, dict[str, float]] = {}

    def timed(what: str, number: int, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        results[f"{what} {count}"] = {"us": 1e6 * (time.perf_counter() - start) / number}
        return result

    agent = nixl_agent(f"regions {count}")
    ended = min(count, MOST_ENDED)  # because NIXL takes half a millisecond for each of 100,000
    made = timed("register", count, lambda: [agent.register_memory([row], "DRAM") for row in rows])
    metadata = timed("metadata", count, agent.get_agent_metadata)
    name = timed("add", count, lambda: peer.add_remote_agent(metadata))
    timed("prepare", count, lambda: agent.prep_xfer_dlist("", array, "DRAM"))
    timed("prepare remote", count, lambda: peer.prep_xfer_dlist(name, array, "DRAM"))
    timed("deregister", ended, lambda: [agent.deregister_memory(each) for each in made[:ended]])
    for what, listed in (("list", rows), ("list backwards", rows[::-1])):
        agent = nixl_agent(f"{what} {count}")
        descs = timed(what, count, lambda listed=listed, agent=agent: agent.register_memory(listed, "DRAM"))
        timed(f"deregister {what}", count, lambda descs=descs, agent=agent: agent.deregister_memory(descs))
    return results


def end_of(times: list[tuple[float, float, float]]) -> bool:
    """Returns whether a case has been measured for long enough."""
    return len(times) >= MOST_SECONDS_TIMES and sum(each[0] for each in times) > MOST_SECONDS


def run(path: str, flags: list[str], *, tcp: bool) -> dict[str, dict[str, float]]:
    """Runs a pair of processes that import `nixl` from a path. Returns the initiator's results."""
    paths = os.pathsep.join((path, os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": paths, "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    if tcp:
        env.update(PROXYCCL_TRANSFER_PATHS="tcp", UCX_TLS="tcp")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, *flags, "--directory", directory, "--role"]
        far = subprocess.Popen([*command, "target"], env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            near = subprocess.run([*command, "initiator"], env=env, stdout=subprocess.PIPE, check=True, timeout=600)
        finally:
            far.kill()
            far.wait()
    parsed: dict[str, dict[str, float]] = json.loads(near.stdout.splitlines()[-1])
    return parsed


def version_in(directory: Path) -> str:
    """Returns the version of NIXL that is installed in a directory."""
    found = next(directory.glob("nixl-*.dist-info"), None)
    return "unknown" if found is None else found.stem.removeprefix("nixl-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each library (default: 5)")
    parser.add_argument("--devices", action="store_true", help="move memory of GPUs")
    parser.add_argument("--mixed", action="store_true", help="with --devices: between the host's memory and a GPU's")
    parser.add_argument("--nixl", help="the directory in which NIXL is installed")
    parser.add_argument("--tcp", action="store_true", help="both by TCP, as between hosts")
    parser.add_argument("--json", type=Path, help="write the medians")
    parser.add_argument("--role", choices=("target", "initiator"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        if options.role == "target":
            target(options.directory, options.devices)
        initiator(options.directory, options.devices, options.mixed)
    flags = ["--devices"] * options.devices + ["--mixed"] * options.mixed
    libraries = {"proxyccl": str(ROOT / "packages/nixl"), **({"nixl": options.nixl} if options.nixl else {})}
    runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in libraries}
    for number in range(options.rounds):
        for name in list(libraries)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(run(libraries[name], flags, tcp=options.tcp))
    medians = {
        name: {
            case: {key: statistics.median(each[case][key] for each in of_library) for key in values}
            for case, values in of_library[0].items()
        }
        for name, of_library in runs.items()
    }
    for case, values in medians["proxyccl"].items():
        for key in values:
            print(f"{case:28} {key:6}", *(f"{name} {medians[name][case][key]:12.2f}" for name in medians))
    if options.json:
        facts: dict[str, Any] = {"benchmark": "transfers", "tcp": options.tcp, "rounds": options.rounds}
        facts["memory"] = "mixed" if options.mixed else "devices" if options.devices else "host"
        if options.nixl:
            facts["peers"] = {"NIXL": version_in(Path(options.nixl))}
        runtime = open_runtime(None if options.devices else "host")
        facts |= {"runtime": runtime.name, "device": runtime.describe()}
        write_json(options.json, {**facts, "medians": medians})


if __name__ == "__main__":
    main()
