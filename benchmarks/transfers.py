"""Times of transfers between two processes of this host, by NIXL's interface, beside NIXL where it is installed.

python benchmarks/transfers.py [--rounds 5] [--nixl DIRECTORY] [--json FILE]

Each round runs the two libraries in turn, each in a pair of fresh processes, and the table has medians of rounds.
DIRECTORY is where NIXL's wheel was installed (`pip install --target DIRECTORY nixl`). Wall-clock times, and processor
time of the initiator; "idle" is the part of a core that a process takes with an agent that has nothing to do.
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
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SIZES = [(1, 8), (1, 4096), (1, 64 << 10), (1, 1 << 20), (1, 64 << 20), (1024, 4096), (10000, 45 << 10)]
"""(blocks, bytes of each)."""
MOST_BYTES = 1 << 29
IDLE_SECONDS = 1.0


def rows_of(address: int, blocks: int, nbytes: int, backwards: bool) -> Any:
    """Blocks that don't follow each other, in one order or the other."""
    stride = nbytes if blocks == 1 else min(2 * nbytes, MOST_BYTES // blocks)
    offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(stride)
    rows = np.zeros((blocks, 3), np.uint64)
    rows[:, 0] = np.uint64(address) + (offsets[::-1] if backwards else offsets)
    rows[:, 1] = nbytes
    return rows


def agent_with_memory(name: str) -> tuple[Any, Any]:
    from nixl._api import nixl_agent

    agent = nixl_agent(name)
    memory = np.ones(MOST_BYTES, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent, memory


def target(directory: Path) -> None:
    agent, memory = agent_with_memory("target")
    partial = directory / "partial"
    partial.write_bytes(memory.ctypes.data.to_bytes(8, "little") + agent.get_agent_metadata())
    partial.rename(directory / "metadata")
    sys.stdin.read()  # until the parent ends it
    os._exit(0)


def initiator(directory: Path) -> None:
    while not (directory / "metadata").exists():
        time.sleep(0.01)
    data = (directory / "metadata").read_bytes()
    there = int.from_bytes(data[:8], "little")
    agent, memory = agent_with_memory("initiator")
    peer = agent.add_remote_agent(data[8:])
    results: dict[str, dict[str, float]] = {}
    for blocks, nbytes in SIZES:
        local = agent.prep_xfer_dlist("", rows_of(memory.ctypes.data, blocks, nbytes, False), "DRAM")
        remote = agent.prep_xfer_dlist(peer, rows_of(there, blocks, nbytes, True), "DRAM")
        indices = np.arange(blocks, dtype=np.int32)
        for operation in ("WRITE", "READ"):
            times: list[tuple[float, float, float]] = []
            repetitions = max(5, min(1000, (256 << 20) // (blocks * nbytes)))
            handle = agent.make_prepped_xfer(operation, local, indices, remote, indices)
            for repetition in range(repetitions + 3):
                processor, start = time.process_time(), time.perf_counter()
                state = agent.transfer(handle)
                posted = time.perf_counter()
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                if repetition >= 3:
                    end = time.perf_counter()
                    times.append((end - start, posted - start, time.process_time() - processor))
            whole, post, spent = (statistics.median(column) for column in zip(*times, strict=True))
            results[f"{operation} {blocks} x {nbytes}"] = {"us": whole * 1e6, "post": post * 1e6, "cpu": spent * 1e6}
    spent, start = time.process_time(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    results["idle"] = {"cores": (time.process_time() - spent) / (time.perf_counter() - start)}
    print(json.dumps(results), flush=True)
    os._exit(0)


def run(path: str) -> dict[str, dict[str, float]]:
    """One pair of processes with the `nixl` that is found at a path."""
    env = {**os.environ, "PYTHONPATH": path, "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--directory", directory, "--role"]
        far = subprocess.Popen([*command, "target"], env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            near = subprocess.run([*command, "initiator"], env=env, stdout=subprocess.PIPE, check=True, timeout=600)
        finally:
            far.kill()
            far.wait()
    parsed: dict[str, dict[str, float]] = json.loads(near.stdout.splitlines()[-1])
    return parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each library (default: 5)")
    parser.add_argument("--nixl", help="the directory in which NIXL is installed")
    parser.add_argument("--json", type=Path, help="write the medians")
    parser.add_argument("--role", choices=("target", "initiator"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        (target if options.role == "target" else initiator)(options.directory)
    libraries = {"proxyccl": str(ROOT / "packages/nixl"), **({"nixl": options.nixl} if options.nixl else {})}
    runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in libraries}
    for number in range(options.rounds):
        for name in list(libraries)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(run(libraries[name]))
    medians = {
        name: {
            case: {key: statistics.median(each[case][key] for each in of_library) for key in values}
            for case, values in of_library[0].items()
        }
        for name, of_library in runs.items()
    }
    for case, values in medians["proxyccl"].items():
        for key in values:
            print(f"{case:22} {key:6}", *(f"{name} {medians[name][case][key]:12.2f}" for name in medians))
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
