"""all_gather compared with NCCL's kernels and copy engines: mpiexec -n 4 python -m mpi4py all_gather.py

The contenders `auto` and `proxy` use arrays that are not registered; `registered_kernels` and `registered_proxy` use
symmetric memory. moves.py describes the calls, and gpu_job.py how times are measured.
"""

from __future__ import annotations

import sys

from moves import measure

if __name__ == "__main__":
    sys.exit(measure("all_gather", __doc__.splitlines()[0]))
