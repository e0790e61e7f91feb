"""Kills rank 0. The other ranks print the errors of a communicator with rank 0 and of one without."""

import os
import signal
import sys
import time
from pathlib import Path

from proxyccl import Communicator

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.processes import FileBootstrap

bootstrap = FileBootstrap.from_environment()
comm = Communicator(bootstrap, timeout=60)
part = comm.split([0, 1, 2])
rest = comm.split([1, 2]) if comm.rank else None
part.barrier()
bootstrap.all_gather(b"", 60, lambda: None)  # waits until the barriers of all ranks have returned
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
for communicator in (part, rest):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            communicator.check()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            break
        time.sleep(0.01)
    else:
        raise TimeoutError("it goes on")
