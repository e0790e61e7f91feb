"""Runs benchmarks on emulated hosts (networks.py): by mpiexec with RANKS ranks on each host, or as one process on one
host. TCP uses cubic, Linux's default congestion control, because between namespaces BBR reaches only half of cubic's
throughput, and shares the bandwidth unevenly between connections.

python run_on_hosts.py [RANKS...] -- PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.hosts.networks import INTERFACE, Hosts
from support.packages.debian import UnavailableError
from support.packages.fabric import unavailable_reason

_CONGESTION_CONTROL = "cubic"
_SECONDS = 900
_PORT = "29533"


def main() -> int:
    reason = unavailable_reason()  # fetches libfabric
    if reason:
        sys.exit(f"there is no libfabric: {reason}")
    split = sys.argv.index("--")
    ranks, command = [int(count) for count in sys.argv[1:split]], sys.argv[split + 1 :]
    # Gloo needs the interface's name, because the host names can't be resolved. OpenMP gets one thread per rank,
    # because idle OpenMP threads spin and take the cores from other ranks. UCX is restricted to TCP; otherwise UCX
    # would recognise that all hosts are one machine, and use shared memory.
    env = {
        "MASTER_ADDR": Hosts.address(0),
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self",
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        Hosts(max(1, len(ranks)), secure_shell=Path(directory) if ranks else None) as hosts,
    ):
        hosts.choose_congestion_control(_CONGESTION_CONTROL)
        if not ranks:
            return subprocess.run([*hosts.inside(0), *command], check=False, timeout=_SECONDS).returncode
        job = hosts.mpiexec(ranks, command, Path(directory), env=env)
        try:
            output, _ = job.communicate(timeout=_SECONDS)
        finally:
            job.kill()
    print(output, end="")
    return job.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnavailableError as error:
        sys.exit(f"there are no such hosts: {error}")
