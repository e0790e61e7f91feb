"""`proxyccl tune`: measures all collectives' algorithms with the ranks of an MPI job, and stores the tuning tables."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from proxyccl.channels.collectives import tuned
from proxyccl.channels.collectives.selection import SizeTable
from proxyccl.device.errors import ArgumentError
from proxyccl.tools import options
from proxyccl.tools.options import show_size


def in_words(table: SizeTable) -> str:
    """Formats a table on one line: "one_shot to 32 KiB, then two_shot"."""
    upwards = [f"{algorithm} to {show_size(limit)}" for limit, algorithm in table.limits]
    return ", ".join([*upwards, f"then {table.beyond}" if upwards else str(table.beyond)])


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "Start it with: mpiexec -n 4 python -m mpi4py -m proxyccl tune"
    parser.add_argument(
        "-t", "--seconds", type=options.seconds, default=10.0, help="time to spend, about (default %(default)s)"
    )


def run(parsed: Namespace) -> int:
    """Runs the command; every rank of the MPI job calls this. Returns the exit code."""
    from proxyccl.channels.communicator import Communicator

    with Communicator.from_mpi() as communicator:
        if communicator.world_size == 1:
            raise ArgumentError(
                "ranks", "expected several; start it with mpiexec -n 4 python -m mpi4py -m proxyccl tune"
            )
        selector = communicator.tune(seconds=parsed.seconds)
        if communicator.rank == 0:
            machine = tuned.Machine.of(communicator.group)
            path = tuned.path_of(machine)
            print(f"{machine}\n{path if path.exists() else 'not kept on disk'}")
            for case, table in selector.tables.items():
                print(f"  {case}: {in_words(table)}")
    return 0
