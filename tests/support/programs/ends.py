"""Runs two ranks. Rank 1 exits in the manner that the first argument names, without closing its communicator; rank 0
prints the error of its next call.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))


@atexit.register
def hear_out() -> None:
    """Waits under MPI until rank 0 has printed its error, because MPI_Abort ends both programs. This exit handler runs
    after the communicator's handler, which is registered later.
    """
    if isinstance(bootstrap, MpiBootstrap):
        bootstrap.all_gather(b"", 30, lambda: None)


from proxyccl import Bootstrap, Communicator, MpiBootstrap, ProxyCCLError  # noqa: E402  (the import registers exit handlers)
from support.processes import FileBootstrap  # noqa: E402

how = sys.argv[1]
bootstrap: Bootstrap = FileBootstrap.from_environment() if "RENDEZVOUS" in os.environ else MpiBootstrap()
comm = Communicator(bootstrap, timeout=30)
x = comm.empty(4, np.float32)
x.fill(1)
comm.all_reduce(x)
bootstrap.all_gather(b"", 30, lambda: None)  # waits until the call is complete on both ranks
if comm.rank == 0:
    began = time.monotonic()
    try:
        if how == "caught":
            comm.close()
        else:
            comm.all_reduce(x)
            comm.synchronize()
    except ProxyCCLError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.write(f"after {'long' if time.monotonic() - began > 10 else 'no time'}\n")
    sys.stdout.flush()
    hear_out()
    os._exit(0)  # keeps rank 1's end from changing rank 0's exit status
match how:
    case "sys.exit":
        sys.exit(3)
    case "exit":
        exit("a message")
    case "raise":
        raise SystemExit(3)
    case "idiom":
        raise SystemExit(None)
    case "caught":
        try:
            sys.exit(3)
        except SystemExit:
            sys.stdout.write("caught\n")
