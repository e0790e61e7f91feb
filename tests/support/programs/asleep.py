"""Suspends the communicator of two ranks, and kills rank 1. Rank 0 prints the errors of `resume` and of a collective,
which would resume the communicator, and goes on alone.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from proxyccl import Communicator, PeerLostError

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.processes import FileBootstrap

comm = Communicator(FileBootstrap.from_environment(), timeout=60, suspendable=True)
x = comm.empty(1 << 20, "float32").fill(1)
comm.all_reduce(x, algorithm="proxy")
comm.suspend(resume_on_call=True)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 30
try:
    while time.monotonic() < deadline:  # the watcher notices the loss without a call
        comm.check()
        time.sleep(0.01)
except PeerLostError:
    print("noticed while suspended")
for call in (comm.barrier, comm.resume):
    try:
        call()
    except PeerLostError as error:
        print(f"{call.__name__}: lost rank {error.peer}")
rest = comm.shrink()
y = rest.empty(1 << 20, "float32").fill(3)
rest.all_reduce(y)
print("alone:", float(y.numpy()[-1]), np.size(y.numpy()))
for _ in range(2):
    rest.suspend()
    rest.resume()
rest.close()
