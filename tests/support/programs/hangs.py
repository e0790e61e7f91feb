"""Runs ranks that hang in the manner that the first argument names, and write reports to ``PROXYCCL_REPORT_DIR``.

Ranks are plain processes (`run_processes`) or MPI processes (`run_mpi`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Bootstrap, Communicator, MpiBootstrap, ProxyCCLError
from support.device_arrays import on_device
from support.processes import FileBootstrap

VICTIM = 1
LONG = 60.0
REPORTS = Path(os.environ["PROXYCCL_REPORT_DIR"])
bootstrap: Bootstrap = FileBootstrap.from_environment() if "RENDEZVOUS" in os.environ else MpiBootstrap()
rank = bootstrap.rank


def meet(data: bytes = b"") -> list[bytes]:
    return bootstrap.all_gather(data, LONG, lambda: None)


def say(text: str) -> None:
    sys.stdout.write(f"rank {rank}: {text}\n")
    sys.stdout.flush()


def await_reports(count: int) -> None:
    deadline = time.monotonic() + LONG
    while len(list(REPORTS.glob("*.json"))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} reports were not written in time")
        time.sleep(0.01)


def killed() -> None:
    comm = Communicator(bootstrap, timeout=LONG)
    x = on_device(comm, np.ones(10, np.float32))
    comm.all_reduce(x)
    comm.synchronize()
    meet()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(ProxyCCLError):
        comm.all_reduce(x)
        comm.synchronize()
    comm.close()


def signalled_while_it_hangs() -> None:
    """Sends the report signal while the main threads of all ranks except one wait in a call. The call then completes
    normally.
    """
    comm = Communicator(bootstrap, timeout=LONG)
    x = on_device(comm, np.ones(10, np.float32))
    comm.all_reduce(x)
    comm.synchronize()
    stream = comm.runtime.create_stream()
    pids = [int(data) for data in meet(str(os.getpid()).encode())]
    if rank != VICTIM:
        comm.all_reduce(x, stream=stream)
    meet()
    if rank == VICTIM:
        time.sleep(0.5)  # gives the other ranks time to wait in their calls
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        await_reports(len(pids))
        comm.all_reduce(x, stream=stream)
    stream.synchronize()
    comm.synchronize()
    say(f"finished with {float(np.asarray(x.numpy() if hasattr(x, 'numpy') else x)[0])}")
    comm.close()


def signalled_while_all_is_well() -> None:
    comm = Communicator(bootstrap, timeout=LONG)
    os.kill(os.getpid(), signal.SIGUSR1)
    await_reports(comm.world_size)
    comm.close()
    before = len(list(REPORTS.iterdir()))
    meet()
    os.kill(os.getpid(), signal.SIGUSR1)  # the report signal does nothing without an open communicator
    time.sleep(0.2)
    say(f"wrote {len(list(REPORTS.iterdir())) - before} more")


def signalled_after_other_signals() -> None:
    """Sends the report signal after the reporting thread has received other signals, which the program handles."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    comm = Communicator(bootstrap, timeout=LONG)
    (reporter,) = (thread for thread in threading.enumerate() if thread.name == "proxyccl-signal")
    assert reporter.ident is not None
    for _ in range(20):
        signal.pthread_kill(reporter.ident, signal.SIGALRM)
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    await_reports(comm.world_size)
    say("reported")
    comm.close()


def signal_handled_by_the_program() -> None:
    caught = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: caught.set())
    comm = Communicator(bootstrap, timeout=LONG)
    os.kill(os.getpid(), signal.SIGUSR1)
    say(f"caught {caught.wait(LONG)}")
    comm.close()


def forked() -> None:
    """Checks that the report signal has its default effect in a forked child."""
    comm = Communicator(bootstrap, timeout=LONG)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say(f"ended by {os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}")
    comm.close()


SCENARIOS = {
    function.__name__: function
    for function in (
        killed,
        signalled_while_it_hangs,
        signalled_while_all_is_well,
        signalled_after_other_signals,
        signal_handled_by_the_program,
        forked,
    )
}
meet()
SCENARIOS[sys.argv[1]]()
