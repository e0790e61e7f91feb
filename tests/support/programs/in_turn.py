"""Runs programs one after another on the same ranks, each as `__main__` in its own directory's company.

Arguments: each program with its arguments, as one text. Rank 0 prints a line "== PROGRAM" before each. A program that
ends with a message has it on stderr, as an interpreter does, and the next one runs; the exit code is 1 in the end.
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
