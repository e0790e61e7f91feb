"""Broadcasts over two of libfabric's interfaces for each rank, compared with one, between two network namespaces; or,
with `--transport agents`, transfers between two agents.

    python benchmarks/fabric_interfaces.py --rate 400mbit [--transport agents]

Rank 0 broadcasts arrays by proxy: it makes one put and one signal for each call. Agents read one block in each call. A
figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from program import RESULT, common_arguments, end_if_it_hangs

from proxyccl import Communicator, FabricOptions, FileBootstrap
from proxyccl.tools.options import show_size
from proxyccl.tools.results import machine, versions, write_json
from proxyccl.transfer import Agent

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.hosts.networks import Hosts
from support.packages.fabric import unavailable_reason

_ROUNDS, _MOST_CALLS, _BYTES = 5, 100, 16 << 20
_CASES = (["eth0"], ["eth0", "eth1"])


def _run_agent(directory: Path, rank: int, interfaces: str, sizes: list[int]) -> None:
    os.environ["PROXYCCL_FABRIC"] = interfaces
    with Agent(str(rank), paths=["fabric"]) as agent:
        region = agent.register(np.zeros(max(sizes), np.uint8))
        if rank == 0:
            (directory / "made").write_bytes(agent.metadata())
            (directory / "made").rename(directory / "metadata")
            agent.wait_for_message(None)
            return
        while not (directory / "metadata").exists():
            time.sleep(0.01)
        agent.add((directory / "metadata").read_bytes())
        theirs = next(each for each in agent.regions_of("0") if each.nbytes == region.nbytes)
        for nbytes in sizes:
            transfer = agent.prepare("read", "0", [(region.address, theirs.address, nbytes)])
            calls, times = min(_MOST_CALLS, max(1, _BYTES // nbytes)), []
            for _ in range(1 + _ROUNDS):
                began = time.perf_counter()
                for _ in range(calls):
                    transfer.start().wait()
                times.append((time.perf_counter() - began) / calls)
            print(RESULT + json.dumps(statistics.median(times[1:])), flush=True)
        agent.notify("0", b"over")


def _run_rank(directory: str, rank: int, names: list[str], transport: str, provider: str, sizes: list[int]) -> None:
    several = {"interface": f"={names[0]}"} if len(names) == 1 else {"interfaces": names}
    if transport == "agents":
        listed = [f"{name}={text if isinstance(text, str) else ','.join(text)}" for name, text in several.items()]
        return _run_agent(Path(directory), rank, ",".join([f"provider={provider}", *listed]), sizes)
    fabric = FabricOptions(provider=provider, **several)
    bootstrap = FileBootstrap(Path(directory), rank, 2)
    with Communicator(bootstrap, fabric=fabric, transport={(0, 1): transport}, timeout=120) as comm:
        for nbytes in sizes:
            x, calls, times = comm.empty((nbytes,), "uint8"), min(_MOST_CALLS, _BYTES // nbytes), []
            for _ in range(1 + _ROUNDS):
                comm.broadcast(x, 0, algorithm="proxy")
                comm.synchronize()
                comm.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    comm.broadcast(x, 0, algorithm="proxy")
                comm.synchronize()
                comm.barrier()
                comm.synchronize()
                times.append((time.perf_counter() - began) / calls)
            if rank == 1:
                print(RESULT + json.dumps(statistics.median(times[1:])), flush=True)
    return None


def _measure(
    hosts: Hosts, names: list[str], transport: str, provider: str, sizes: list[int], seconds: float
) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        case = [",".join(names), transport, provider, ",".join(map(str, sizes))]
        env = {"PROXYCCL_RUNTIME": "host", "PROXYCCL_PROXY": "thread"}
        ranks = [hosts.start(rank, __file__, "--rank", directory, str(rank), *case, env=env) for rank in range(2)]
        outputs = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(outputs))
    return [json.loads(line.removeprefix(RESULT)) for line in outputs[1].splitlines() if line.startswith(RESULT)]


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--rate", help="limits each interface by tc's token bucket, such as 400mbit")
    parser.add_argument("--transport", default="fabric", choices=("fabric", "staged_fabric", "agents"))
    parser.add_argument("--provider", default="tcp", help="libfabric's provider; ranks go on after failures with net")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)  # the processes that this program starts
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    if parsed.rank:
        directory, rank, names, transport, provider, sizes = parsed.rank
        lengths = [int(each) for each in sizes.split(",")]
        return _run_rank(directory, int(rank), names.split(","), transport, provider, lengths)
    reason = unavailable_reason()  # fetches libfabric
    if reason:
        sys.exit(f"there is no libfabric: {reason}")
    sizes = [1 << 20] if parsed.quick else [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
    if parsed.transport == "agents" and not parsed.quick:
        sizes.append(64 << 20)
    with Hosts(2, interfaces=2) as hosts:
        for host in range(2 if parsed.rate else 0):
            for interface in range(2):
                limit = ("tbf", "rate", parsed.rate, "burst", "256kb", "latency", "50ms")
                hosts.disturb(host, *limit, interface=interface)
        how = parsed.transport, parsed.provider, sizes, parsed.seconds
        one, two = (_measure(hosts, names, *how) for names in _CASES)
    rows = []
    for nbytes, of_one, of_two in zip(sizes, one, two, strict=True):
        rows.append({"bytes": nbytes, "one_interface_s": of_one, "two_interfaces_s": of_two, "ratio": of_one / of_two})
        times_ms = f"one interface {1e3 * of_one:8.2f} ms  two interfaces {1e3 * of_two:8.2f} ms"
        print(f"{show_size(nbytes):>8}  {times_ms}  {of_one / of_two:.2f} x")
    if parsed.json:
        facts = {"machine": machine(), "versions": versions(), "rate": parsed.rate, "transport": parsed.transport}
        facts["provider"] = parsed.provider
        write_json(parsed.json, {**facts, "interfaces": rows})
    return None


if __name__ == "__main__":
    main()
