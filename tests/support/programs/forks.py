"""Makes rank 0 fork children, which make every call and end in every possible manner. After each child, the ranks check
that their collectives still work.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import ClosedError, Communicator
from proxyccl.device.host import HostRuntime
from support.processes import FileBootstrap
from support.running import run_ranks

bootstrap = FileBootstrap.from_environment()
comm = Communicator(bootstrap, HostRuntime(blocks=2), timeout=20)
x, registered, stream = np.ones(5000), comm.empty(100, "float64"), comm.runtime.create_stream()
part = comm.split([0, 1])
channels = comm.proxy_channels(registered)
proxy = comm.proxy


def all_reduced() -> None:
    for algorithm in ("ring", "proxy"):
        y = np.ones(5000)
        comm.all_reduce(y, algorithm=algorithm)
        assert (y == 2).all()
    part.all_reduce(x)
    comm.all_reduce(registered)


def refused(call: Callable[[], object]) -> None:
    told = "nothing"
    try:
        call()
    except ClosedError as error:
        told = str(error)
    assert f"process {parent}; this process, {os.getpid()}, is a fork of it" in told, told


def call_everything() -> None:
    signal.alarm(20)  # ends a call that waits forever for a thread of the parent
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(x, algorithm="ring"),
        lambda: comm.all_reduce(registered),
        lambda: part.all_reduce(x),
        lambda: comm.all_gather(x, stream=stream),
        lambda: comm.send(x, 1),
        lambda: comm.recv(x, 1),
        lambda: comm.gather(x),
        comm.prepare_transfers,
        comm.barrier,
        lambda: comm.empty(10),
        lambda: comm.register(x),
        lambda: comm.deregister(registered),
        lambda: comm.sm_channels(registered),
        lambda: comm.handler_channel(lambda trigger: None),
        lambda: comm.compile('extern "C" __global__ void k() {}'),
        lambda: comm.split([0, 1]),
        comm.shrink,
        lambda: comm.grow(bootstrap),
        lambda: comm.all_gather_bytes(b""),
        comm.tune,
        comm.synchronize,
        lambda: comm.synchronize(stream),
        comm.drain,
        comm.check,
        lambda: comm.abort("by a child"),
        lambda: setattr(comm, "timeout", 0.001),
        lambda: comm.group.exchange.barrier("by a child"),
        lambda: proxy.drain(1.0),
        lambda: proxy.add_schedule(None),  # type: ignore[arg-type]  # raises before it uses None
        comm.runtime.synchronize,
        stream.synchronize,
    ]
    failures = []
    for number, call in enumerate(calls):
        try:
            refused(call)
        except Exception as error:
            failures.append(f"call {number}: {error!r}")
    assert not failures, failures
    comm.close()
    registered.free()
    stream.close()
    os._exit(0)


def leave_with() -> None:
    with comm, part:
        pass
    os._exit(0)


def collect() -> None:
    global comm, part, registered, stream, channels, proxy  # noqa: PLW0603  (del frees the parent's objects)
    del comm, part, registered, stream, channels, proxy
    gc.collect()
    os._exit(0)


def make_its_own() -> None:
    signal.alarm(60)
    run_ranks(
        2, lambda own: own.all_reduce(np.ones(100000), algorithm="ring"), make_runtime=lambda _: HostRuntime(blocks=2)
    )
    os._exit(0)


def raise_error() -> None:
    raise ValueError("a child's")


CHILDREN: list[tuple[Callable[[], object], int]] = [
    (lambda: sys.exit(0), 0),
    (lambda: sys.exit(3), 3),
    (raise_error, 1),
    (leave_with, 0),
    (call_everything, 0),
    (collect, 0),
    (make_its_own, 0),
]
parent = os.getpid()
all_reduced()
all_reduced()
for child, status in CHILDREN:
    if comm.rank == 0:
        pid = os.fork()
        if pid == 0:
            child()
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended == status, (child, ended)
    all_reduced()
if comm.rank == 0:
    process = multiprocessing.get_context("fork").Process(target=refused, args=(lambda: comm.all_reduce(x),))
    process.start()
    process.join()
    assert process.exitcode == 0
all_reduced()
comm.close()
sys.stdout.write("went on\n")
