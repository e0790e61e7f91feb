"""all_to_all compared with NCCL's kernels and copy engines: mpiexec -n 4 python -m mpi4py all_to_all.py

A size is the number of bytes that one rank sends, including the bytes to itself. The contenders `auto` and `proxy` use
arrays that are not registered; `registered_kernels` and `registered_proxy` use symmetric memory. moves.py describes the
calls, and gpu_job.py how times are measured.
"""

from __future__ import annotations

import sys

from moves import measure

if __name__ == "__main__":
    sys.exit(measure("all_to_all", __doc__.splitlines()[0]))
