"""Runs one rank of a job on several hosts, with the task WHAT. The ranks bootstrap by MPI or by files in DIRECTORY.

mpiexec -n WORLD_SIZE python -m mpi4py on_hosts.py WHAT
python on_hosts.py DIRECTORY RANK WORLD_SIZE WHAT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from proxyccl import Communicator, DispatchCombine, ExecutionPlan, FileBootstrap, ProxyCCLError
from support.cases.plan_documents import all_gather, all_reduce_of_nodes, port_packets

SHORT = 2.0
"""A time-out that expires in a task."""


def collectives(comm: Communicator) -> None:
    arrays(comm)
    experts(comm)


def arrays(comm: Communicator) -> None:
    """Checks collectives of several lengths, in registered and in unregistered memory."""
    n, rank = comm.world_size, comm.rank
    for count in (1, 1000, 300_001):
        x = comm.empty(count, "float32").upload(np.arange(count) % 7 + rank)
        comm.all_reduce(x)
        assert (x.numpy() == n * (np.arange(count) % 7) + n * (n - 1) / 2).all()
    gathered = comm.empty(n * 5000, "int32")
    comm.register(gathered)
    comm.all_gather(comm.empty(5000, "int32").fill(rank), out=gathered)
    assert (gathered.numpy() == np.arange(n).repeat(5000)).all()
    sent = comm.empty(n * 3000, "int32").upload(np.arange(n * 3000) + 7 * rank)
    received = comm.empty(n * 3000, "int32")
    comm.all_to_all(sent, out=received)
    part = np.arange(rank * 3000, (rank + 1) * 3000)
    assert (received.numpy().reshape(n, 3000) == part + 7 * np.arange(n)[:, None]).all()


def experts(comm: Communicator) -> None:
    """Checks a dispatch and combine without experts: each result is the token times its number of experts (2)."""
    rng = np.random.default_rng(comm.rank)
    tokens = rng.integers(-8, 8, (40, 64)).astype(np.float32)
    chosen = rng.permuted(np.tile(np.arange(2 * comm.world_size), (40, 1)), axis=1)[:, :2].astype(np.int32)
    exchange = DispatchCombine(comm, hidden=64, max_tokens=64, experts_per_rank=2, topk=2, dtype="float32")
    exchange.prepare(tokens, chosen, np.ones((40, 2), np.float32))
    rows, _ = exchange.dispatch()
    assert (exchange.combine(rows) == 2 * tokens).all()


def plans(comm: Communicator) -> None:
    """Repeatedly executes plans with port channels to other hosts."""
    n, local = comm.world_size, comm.local_world_size
    gathers = [ExecutionPlan.load(plan) for plan in (all_gather(n, "port", "pwsf"), port_packets(n))]
    reduce = ExecutionPlan.load(all_reduce_of_nodes(n, local)) if local > 1 else None
    for seed in range(5):
        count = 96 if seed < 3 else 30_000
        inputs = np.arange(count, dtype=np.float32) % 50 * (seed + 1) + np.arange(n, dtype=np.float32)[:, None]
        x, out = comm.empty(count, "float32").upload(inputs[comm.rank]), comm.empty(n * count, "float32")
        for gather in gathers:
            comm.execute(gather, x, out=out.fill(0))
            assert (out.numpy().reshape(n, count) == inputs).all()
        if reduce is not None:
            assert (comm.all_reduce(x, algorithm=reduce).numpy() == inputs.sum(0)).all()


def flood(comm: Communicator) -> None:
    """Makes collectives with more writes than may be outstanding."""
    for _ in range(20):
        x = comm.empty(50_000, "float32").fill(1)
        comm.all_reduce(x)
        assert (x.numpy() == comm.world_size).all()


def go_on(comm: Communicator) -> None:
    """Kills the last rank. The other ranks print their errors, shrink the communicator, and check collectives."""

    def die() -> None:
        if comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _until_it_fails(comm, die)
    with comm.shrink() as shrunk:
        collectives(shrunk)
        print(f"went on with {shrunk.members}", flush=True)


def cut(comm: Communicator) -> None:
    """Prints "ready" after a first collective, then makes collectives until a network fault ends them."""

    def report() -> None:
        comm.timeout = SHORT
        print("ready", flush=True)

    _until_it_fails(comm, report)


def _until_it_fails(comm: Communicator, after_first: Callable[[], None]) -> None:
    first, x = comm.empty(1000, "float32").fill(1), comm.empty(100_000, "float32")
    began = time.monotonic()
    try:
        comm.all_reduce(first)
        comm.synchronize()
        after_first()
        while True:
            comm.all_reduce(x.fill(1))
            comm.synchronize()
            time.sleep(0.001)
    except ProxyCCLError as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)


def one(comm: Communicator) -> None:
    """Makes one collective."""
    x = comm.empty(1000, "float32").fill(1)
    comm.all_reduce(x)
    assert (x.numpy() == comm.world_size).all()


WHAT: dict[str, Callable[[Communicator], None]] = {
    each.__name__: each for each in (arrays, collectives, plans, flood, go_on, cut, one)
}
MEETINGS = int(os.environ.get("MEETINGS", "0"))


def main() -> None:
    *place, what = sys.argv[1:]
    bootstrap = FileBootstrap(Path(place[0]), int(place[1]), int(place[2])) if place else None
    if what == "meetings":
        for _ in range(MEETINGS):
            with Communicator(bootstrap) as comm:
                one(comm)
        what = "one"
    with Communicator(bootstrap) as comm:
        transports = comm.topology.transports()
        WHAT[what](comm)
        print(f"done by {transports}", flush=True)


if __name__ == "__main__":
    main()
