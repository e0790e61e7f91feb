"""Runs two ranks whose proxies run in the job's daemon. Rank 0 starts the daemon and is killed. With the
argument "with_a_child", rank 0 first forks a child that continues. Prints the process ids of daemon and child.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator, PeerLostError, ThreadBootstrap
from proxyccl.proxy.daemon.client import DaemonClient
from support.device_arrays import on_device
from support.processes import FileBootstrap

bootstrap = FileBootstrap.from_environment()


def daemon_of(comm: Communicator) -> int:
    assert isinstance(comm.proxy, DaemonClient)
    return comm.proxy.daemon


def meet() -> None:
    bootstrap.all_gather(b"", 30, lambda: None)


comm = Communicator(bootstrap, proxy="process", timeout=60)
if comm.rank == 0:
    daemon_of(comm)
meet()
sys.stdout.write(f"daemon {daemon_of(comm)}\n")
sys.stdout.flush()
x = on_device(comm, np.ones(8, np.float32))
comm.all_reduce(x, algorithm="proxy")
comm.synchronize()
meet()
if comm.rank == 0:
    if sys.argv[1] == "with_a_child":  # the child keeps the daemon's socket open
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
            child = os.fork()
        if child == 0:
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            time.sleep(120)
            os._exit(0)
        sys.stdout.write(f"child {child}\n")
        sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

deadline = time.monotonic() + 20
try:
    while time.monotonic() < deadline:
        comm.check()
        time.sleep(0.01)
except PeerLostError:
    comm.close()
with Communicator(ThreadBootstrap.create(1)[0], comm.runtime, proxy="process") as alone:
    sys.stdout.write(f"daemon {daemon_of(alone)}\n")
    assert alone.proxy.drain(10)
