"""Kills rank 1 while rank 0 waits in a kernel for rank 1's signal. Rank 0 prints its exception and the wait's
result.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

import proxyccl.triton as pt
from proxyccl import Communicator, CommunicatorError
from support.kernels import triton as kernels
from support.processes import FileBootstrap

bootstrap = FileBootstrap.from_environment()
with Communicator(bootstrap, timeout=60) as comm:
    out = comm.empty(1, "int32").upload(np.full(1, 7, np.int32))
    (channel,) = comm.proxy_channels(comm.empty(4, "int32"))
    bootstrap.all_gather(b"", 60, lambda: None)  # waits until no message of the communicator is in flight
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pt.compile(comm, kernels.waits, grid=1)(channel, out)
        comm.synchronize()
    except CommunicatorError as error:
        print(type(error).__name__, error.peer, out.numpy()[0])
