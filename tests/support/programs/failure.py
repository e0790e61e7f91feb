"""Runs ranks, one of which fails in the manner that the first argument names. Each rank prints its exception.

Ranks are plain processes (`run_processes`) or MPI processes (`run_mpi`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Bootstrap, Communicator, EPAll2AllLayer, MpiBootstrap, ProxyCCLError, Trigger
from proxyccl.channels import group
from support.cases.span_calls import SpanCalls
from support.device_arrays import on_device
from support.processes import FileBootstrap

VICTIM = 1
TIMEOUT = 60.0
SHORT = 2.0
"""A time-out that expires in a scenario."""
WAIT_FOR_VICTIM = """
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void wait_for_victim(DeviceHandle<SmChannel>* channels, int channel) {
  if (threadIdx.x == 0) channels[channel].wait();
}
"""
CALL_HANDLER = """
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void call_handler(ProxyChannelDeviceHandle channel) {
  if (threadIdx.x == 0) channel.flush();
}
"""
ILLEGAL_ACCESS = """
extern "C" __global__ void illegal_access(char* p) { p[1ull << 45] = 1; }
"""
bootstrap: Bootstrap = FileBootstrap.from_environment() if "RENDEZVOUS" in os.environ else MpiBootstrap()
rank = bootstrap.rank
kept: list[Communicator] = []


def meet(data: bytes = b"") -> list[bytes]:
    return bootstrap.all_gather(data, TIMEOUT, lambda: None)


def say(text: str) -> None:
    sys.stdout.write(f"rank {rank}: {text}\n")
    sys.stdout.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def report(action: Callable[[], object]) -> BaseException | None:
    """Runs the action. Prints the library's error that the action raised, and returns it; None if there is no error."""
    started = time.monotonic()
    try:
        action()
    except ProxyCCLError as error:
        seconds = time.monotonic() - started
        peer = getattr(error, "peer", None)
        say(f"{type(error).__name__} peer={peer} late={seconds > TIMEOUT / 2} message={error}")
        return error
    say("nothing was raised")
    return None


def all_reduce(comm: Communicator, count: int = 10, algorithm: str | None = None) -> None:
    """Makes an all_reduce and waits for it, because on a GPU only the wait raises errors."""
    comm.all_reduce(on_device(comm, np.ones(count, np.float32)), algorithm=algorithm)
    comm.synchronize()


def opened() -> Communicator:
    comm = Communicator(bootstrap, timeout=TIMEOUT)
    all_reduce(comm, algorithm="proxy")
    all_reduce(comm)
    return comm


def killed_in_a_collective(algorithm: str) -> None:
    comm = opened()
    meet()
    if rank == VICTIM:
        die()
    report(lambda: all_reduce(comm, 100_000, algorithm))
    report(lambda: all_reduce(comm))
    comm.close()


def killed_in_a_schedule(collective: str) -> None:
    comm = opened()
    calls, stream = SpanCalls(comm, 100_000 * comm.world_size), comm.runtime.create_stream()
    x, out = calls.spans(collective, 100_000, 1, in_place=False)

    def call() -> None:
        calls.issue(collective, x, out, VICTIM, stream)
        comm.synchronize(stream)

    call()
    meet()
    if rank == VICTIM:
        die()
    report(call)
    report(call)
    comm.close()


def killed_in_a_kernel() -> None:
    comm = opened()
    channels = comm.sm_channels(comm.empty(16))
    kernel = comm.compile(WAIT_FOR_VICTIM, "wait_for_victim")
    meet()
    if rank == VICTIM:
        die()
    kernel(1, 32, channels, channels.peers.index(VICTIM))
    report(comm.synchronize)
    comm.close()


def killed_in_a_dispatch() -> None:
    comm = opened()
    tokens, ids = on_device(comm, np.ones((64, 32), np.float32)), on_device(comm, np.full((64, 2), VICTIM, np.int32))
    node = comm.local_world_size, comm.world_size
    layer = EPAll2AllLayer(comm, 64, 32, 2, rank, comm.world_size, *node, dtype="float32")
    rows, _, desc = layer.dispatch(tokens, ids)
    meet()
    if rank == VICTIM:
        die()
    report(lambda: layer.dispatch(tokens, ids))
    report(lambda: layer.combine(rows, desc))
    layer.finalize()
    comm.close()


def killed_before_the_communicator() -> None:
    if rank == VICTIM:
        die()
    report(lambda: Communicator(bootstrap, timeout=SHORT))


def killed_before_a_registration() -> None:
    comm = opened()
    meet()
    if rank == VICTIM:
        die()
    report(lambda: comm.register(comm.empty(16)))
    comm.close()


def killed_before_it_is_mapped(what: str) -> None:
    """Kills the victim after all ranks have exchanged memory handles, but before another rank maps the victim's
    memory.
    """
    comm = Communicator(bootstrap, timeout=TIMEOUT)
    pids = [int(data) for data in meet(str(os.getpid()).encode())]
    owner, name = (comm.runtime, "open_pinned") if what == "schedules" else (comm.group.mappings, "acquire")
    map_memory = getattr(owner, name)

    def mapped_late(handle: bytes) -> object:
        if rank == VICTIM:
            die()
        while not has_ended(pids[VICTIM]):
            time.sleep(0.001)
        return map_memory(handle)

    setattr(owner, name, mapped_late)
    report(lambda: all_reduce(comm, algorithm="proxy" if what == "schedules" else "ring"))
    comm.close()


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended, even if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError if the process ends during the read
        return True


def killed_before_close() -> None:
    comm = opened()
    meet()
    if rank == VICTIM:
        die()
    report(comm.close)
    say(repr(comm))


def stopped() -> None:
    pids = [int(data) for data in meet(str(os.getpid()).encode())]
    comm = opened()
    meet()
    comm.timeout = SHORT
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
    report(lambda: all_reduce(comm))
    comm.close()
    if rank == 0:
        os.kill(pids[VICTIM], signal.SIGCONT)


def raising_handler() -> None:
    comm = opened()

    def refuse(_: Trigger) -> None:
        raise LookupError("no such expert")

    kernel = comm.compile(CALL_HANDLER, "call_handler")
    channel = comm.handler_channel(refuse)
    meet()
    if rank == VICTIM:
        kernel(1, 1, channel)
        error = report(comm.synchronize)
        say(f"cause {error.__cause__!r}" if error is not None else "no cause")
    else:
        report(lambda: all_reduce(comm))
    comm.close()


def lost_context(noticed_by: str) -> None:
    comm = opened()
    kernel = comm.compile(ILLEGAL_ACCESS, "illegal_access")

    def notice() -> None:
        while noticed_by == "watcher":
            comm.check()
            time.sleep(0.01)
        comm.synchronize()

    meet()
    if rank == VICTIM:
        kernel(1, 1, comm.empty(1))
        report(notice)
    report(lambda: all_reduce(comm))
    comm.close()
    say(f"{comm}")


def exception_inside_with() -> None:
    try:
        with Communicator(bootstrap, timeout=TIMEOUT) as comm:
            if rank == VICTIM:
                int("not a number")
            report(lambda: all_reduce(comm))
    except ValueError:
        say("ValueError")


def exit_without_close() -> None:
    comm = opened()
    comm.register(comm.empty(16))
    say("leaves")
    kept.append(comm)


def exit_with_six(order: str) -> None:
    kept.extend(Communicator(bootstrap, timeout=TIMEOUT) for _ in range(6))
    for comm in kept:
        comm.all_reduce(on_device(comm, np.ones(4, np.float32)))
    if order == "reversed_on_odd_ranks" and rank % 2:
        group.open_groups.reverse()


def exit_of_one_rank() -> None:
    comm = Communicator(bootstrap, timeout=TIMEOUT)
    if rank == VICTIM:
        return
    report(lambda: all_reduce(comm))
    comm.close()


SCENARIOS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        killed_in_a_collective,
        killed_in_a_schedule,
        killed_in_a_kernel,
        killed_in_a_dispatch,
        killed_before_the_communicator,
        killed_before_a_registration,
        killed_before_it_is_mapped,
        killed_before_close,
        stopped,
        raising_handler,
        lost_context,
        exception_inside_with,
        exit_without_close,
        exit_with_six,
        exit_of_one_rank,
    )
}
name, *arguments = sys.argv[1].split(":")
meet()  # on busy machines, ranks may start more than SHORT seconds apart
SCENARIOS[name](*arguments)
