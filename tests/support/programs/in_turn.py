"""Runs programs one after another on the same MPI ranks, each as `__main__`.
Each argument is a program with its arguments, as one string. Rank 0 prints a line "== PROGRAM" before each program. If
a program exits with a message, prints the message to stderr, runs the next program, and finally exits with 1.
"""

import runpy
import shlex
import sys
from pathlib import Path

from mpi4py import MPI

failed = False
for command in sys.argv[1:]:
    sys.argv = shlex.split(command)
    program = Path(sys.argv[0])
    if str(program.parent) not in sys.path:
        sys.path.insert(0, str(program.parent))
    if MPI.COMM_WORLD.rank == 0:
        print(f"== {program.name}", flush=True)
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        if end.code:
            print(end.code, file=sys.stderr, flush=True)
            failed = True
sys.exit(failed)
