"""Replays graphs of mixed collectives of random sizes in random order, on new values, and checks every result.

Start one process per GPU (Open MPI's mpirun may need --allow-run-as-root):

    mpirun -n 4 python3 -m mpi4py tests/support/programs/graph_replays.py --count 10000
    mpirun -n 4 python3 -m mpi4py tests/support/programs/graph_replays.py --seconds 180
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator, Stream
from support.cases.graphs import Graph, Replayed
from support.cases.reference import ALGORITHMS, DTYPES, OPS, Call

COLLECTIVES = ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
TOGETHER = 100  # number of replays between checks of the clock


def random_call(rng: np.random.Generator, world_size: int, algorithms: tuple[str, ...]) -> Call:
    """Returns a random collective call, with a log-uniform size of up to about 1 MiB."""
    collective = str(rng.choice(COLLECTIVES))
    reduces = collective in ("all_reduce", "reduce_scatter")
    choices = (*algorithms, None) if collective == "all_reduce" else ("proxy", None)
    count = int(2 ** rng.uniform(0, 18))
    return Call(
        collective,
        str(rng.choice(DTYPES)),
        str(rng.choice(OPS)) if reduces else "sum",
        choices[rng.integers(len(choices))],
        count if collective in ("all_reduce", "broadcast") else -(-count // world_size),
        in_place=bool(rng.integers(2)),
        root=int(rng.integers(world_size)),
    )


def capture(stream: Stream, calls: list[Replayed]) -> Graph:
    """Captures all calls into one graph."""

    def issue() -> None:
        for call in calls:
            call.issue()

    issue()
    stream.synchronize()
    return Graph(stream, issue)


def main() -> None:
    parser = argparse.ArgumentParser(description="Replays graphs of mixed collectives and checks every result.")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--count", type=int, help="replays")
    length.add_argument("--seconds", type=float, help="about how long to go on")
    parser.add_argument("--graphs", type=int, default=24, help="different graphs (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes, order and values (default 0)")
    options = parser.parse_args()

    rng = np.random.default_rng(options.seed)  # all ranks use one seed, so they draw the same numbers
    with Communicator() as comm:
        algorithms = ALGORITHMS if comm.topology.all_accessible() else ("two_shot", "ring", "proxy")
        stream = comm.runtime.create_stream()
        contents = [
            [Replayed(comm, random_call(rng, comm.world_size, algorithms), stream) for _ in range(rng.integers(1, 6))]
            for _ in range(options.graphs)
        ]
        graphs = [capture(stream, calls) for calls in contents]
        began, replays, results, nbytes = time.monotonic(), 0, 0, 0

        def more() -> bool:
            """Returns whether to replay again, by the count if there is one, else by rank 0's clock."""
            if options.count is not None:
                return replays < options.count
            if replays % TOGETHER:
                return True
            late = time.monotonic() - began >= options.seconds
            return comm.all_gather_bytes(bytes([late]))[0] == b"\0"

        while more():
            chosen = int(rng.integers(len(graphs)))
            for call in contents[chosen]:
                call.load(int(rng.integers(1 << 31)))
            graphs[chosen].launch()
            comm.synchronize(stream)
            for call in contents[chosen]:
                call.check()
                nbytes += call.nbytes
            replays, results = replays + 1, results + len(contents[chosen])
        seconds = time.monotonic() - began
        everyone = comm.all_gather_bytes(f"{replays} {results}".encode())
        assert len(set(everyone)) == 1, everyone
        if comm.rank == 0:
            print(
                f"OK: {replays} replays of {len(graphs)} graphs on {comm.world_size} ranks, {results} collectives, "
                f"{nbytes / 1e6:.0f} MB in on each, all results right, {seconds:.0f} s"
            )


if __name__ == "__main__":
    main()
