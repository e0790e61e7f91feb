"""Makes torch launch a kernel for the first time while a collective by proxy waits for the other rank.

Run on two MPI processes without ProxyCCL's environment variables. Each rank prints each collective whose result is
correct.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from proxyccl import Communicator

LATE_SECONDS = 0.3
COUNT = 1 << 18  # elements of each rank's share
rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
device = torch.device("cuda", rank)

FIRST_LAUNCHED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": torch.erfinv,
    "all_gather": torch.lgamma,
    "reduce_scatter": torch.digamma,
    "all_to_all": torch.special.i0e,
    "broadcast": torch.special.ndtri,
}
"""For each collective, a torch function whose kernel nothing else launches."""


def filled(*values: float) -> Any:
    """Returns a tensor with one share of COUNT elements for each value."""
    return torch.cat([torch.full((COUNT,), value, device=device) for value in values])


torch.cuda.set_device(device)
argument = torch.rand(64, 64, device=device)
own, everyone = rank + 1.0, [peer + 1.0 for peer in range(ranks)]
total = sum(everyone)
SHARES: dict[str, tuple[list[float], list[float]]] = {
    "all_reduce": ([own], [total]),
    "all_gather": ([own], everyone),
    "reduce_scatter": ([own] * ranks, [total]),
    "all_to_all": ([own] * ranks, everyone),
    "broadcast": ([own], [everyone[0]]),
}
"""The value of each share of a collective's input and output."""

with Communicator(timeout=60) as comm:
    for collective, first_launched in FIRST_LAUNCHED.items():
        given, expected = (filled(*values) for values in SHARES[collective])
        result = torch.zeros_like(expected)
        call = getattr(comm, collective)
        for late in (False, True):  # the first call loads the collective's own kernels
            result.zero_()
            torch.cuda.synchronize()
            comm.barrier()
            comm.synchronize()
            if late and rank == 0:
                time.sleep(LATE_SECONDS)
            call(given, out=result, algorithm="proxy")
            if late:
                first_launched(argument)
            torch.cuda.synchronize()
            comm.check()
            assert torch.equal(result, expected), collective
        sys.stdout.write(f"{collective}\n")
        sys.stdout.flush()
