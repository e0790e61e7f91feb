"""Runs one rank of a fault-injection case: works, possibly with a fault, then shrinks and continues with the remaining
ranks. Prints events in JSON.

Usage: rank.py SEED FAULT [hosts] [brief], with the environment that `run_processes` sets. The exit status is 0 if the
rank saw only errors of the library, and no wrong result.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator, ProxyCCLError
from proxyccl.proxy.codec import Codec
from support.faults.case import LASTING_DESCRIPTORS, Case
from support.faults.work import Work, WrongResultError
from support.processes import FileBootstrap, address_space

_AFTER_SHRINK_STEPS = 5
_SHRINKS = 4
_EXIT_STATUS = 7
_START_SECONDS = 60.0
"""The time within which all ranks must have started. It does not count towards a case's time-out, because busy machines
start ranks seconds apart.
"""
_LETS_GO_SECONDS = 5.0
_LEFT_MIB = (12, 64)
"""Upper limits of the remaining memory in MiB. Below 8 MiB, a stack's size, no thread can be started."""


class PlannedError(Exception):
    """The exception that the victim raises in a case with the fault "exception"."""


def say(event: str, **fields: Any) -> None:
    """Prints an event as a line, in one unbuffered write."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def descriptors() -> int:
    """Returns the number of this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def show_descriptor(number: int) -> str:
    """Returns the target of one of this process's descriptors, or "" if there is none."""
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


# -- faults in the process itself ---


def fork_children(rng: random.Random) -> None:
    """Forks three children: one ends by `os._exit`, one by `sys.exit` and one by a signal."""
    for ending in rng.sample(["quiet", "exit", "kill"], 3):
        child = os.fork()
        if child == 0:
            if ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if ending == "exit":
                sys.exit(3)  # runs the exit handlers of libraries
            os._exit(0)
        os.waitpid(child, 0)


def write_garbage(rng: random.Random, number: int) -> None:
    """Corrupts the message that this process sends after `number` other messages."""
    encode, sent = Codec.encode, iter(range(number + 1))

    def mutated(self: Any, value: Any, **options: Any) -> bytes:
        data = encode(self, value, **options)
        if next(sent, None) != number or not data:
            return data
        kind = rng.randrange(4)
        if kind == 0:
            return rng.randbytes(rng.randrange(200))
        if kind == 1:
            return data[: rng.randrange(len(data))]
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + (kind == 2) :]

    Codec.encode = mutated  # type: ignore[method-assign,assignment]


def limit(kind: int, value: int) -> None:
    """Lowers a limit of this process."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))


def timed_faults(rng: random.Random) -> dict[str, Callable[[], None]]:
    """Returns the faults that a timer thread applies, by name."""
    return {
        "exit": lambda: os._exit(_EXIT_STATUS),
        "fork": lambda: fork_children(rng),
        "few descriptors": lambda: limit(resource.RLIMIT_NOFILE, descriptors() + rng.randrange(6)),
        "little memory": lambda: limit(
            resource.RLIMIT_AS, address_space() + rng.randrange(rng.choice(_LEFT_MIB)) * (1 << 20)
        ),
    }


def begin_fault(case: Case, rng: random.Random) -> None:
    """Applies the case's fault if it is one that begins before the work."""
    if case.fault == "garbage":
        write_garbage(rng, rng.randrange(80))
    if case.fault == "no directory":
        for name in ("PROXYCCL_CACHE", "PROXYCCL_REPORT_DIR"):
            os.environ[name] = "/dev/null/nowhere"
    if case.fault == "signals":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def in_step_fault(case: Case, comm: Communicator, rng: random.Random) -> None:
    """Applies the case's fault if it is one that happens between calls."""
    if case.fault == "slow":
        time.sleep(rng.uniform(0, 0.05))
    if case.fault == "exception":
        raise PlannedError
    if case.fault == "wrong arguments":
        comm.all_reduce(np.ones(rng.randrange(100_000, 200_000), np.float32))


# -- the rank ---


def work_until_the_end(case: Case, comm: Communicator, work: Work, rng: random.Random, *, victim: bool) -> int:
    """Works for `case.work` seconds. Returns the number of steps."""
    began, steps = time.monotonic(), 0
    timed = timed_faults(rng).get(case.fault) if victim else None
    timer = threading.Timer(case.delay, timed) if timed is not None else None
    if timer is not None:
        timer.start()
    while not work.agree(time.monotonic() - began > case.work):
        if victim and time.monotonic() - began > case.delay:
            in_step_fault(case, comm, rng)
        (work.repeat if case.repeats else work.step)()
        steps += 1
    if timer is not None:
        timer.join()
    return steps


def shrink(comm: Communicator) -> Communicator:
    """Shrinks a communicator, and closes the old one."""
    try:
        return comm.shrink()
    finally:
        try:
            comm.close()
        except ProxyCCLError as error:
            say("error", kind=type(error).__name__, message=str(error))


def go_on(case: Case, comm: Communicator) -> None:
    """Shrinks, and works with the remaining ranks."""
    numbers = list(range(case.ranks))
    for attempt in range(_SHRINKS):
        comm = shrink(comm)
        numbers = [numbers[member] for member in comm.members]
        work = Work(comm, case.seed + 1000 * attempt + sum(1 << number for number in numbers))
        try:
            for _ in range(_AFTER_SHRINK_STEPS):
                work.step()
            work.close()
            comm.close()
        except ProxyCCLError as error:
            say("error", kind=type(error).__name__, message=str(error))
            if attempt == _SHRINKS - 1:
                comm.close()
        else:
            say("went on", members=numbers)
            return


def run(case: Case, rng: random.Random, *, victim: bool) -> int:
    """Makes the communicator, works, and continues with the remaining ranks after a failure. Returns the exit
    status.
    """
    comm: Communicator | None = None
    try:
        bootstrap = FileBootstrap.from_environment()
        bootstrap.all_gather(b"", _START_SECONDS, lambda: None)
        comm = Communicator(bootstrap, timeout=case.timeout, proxy=case.place, local_world_size=case.nodes)
        work = Work(comm, case.seed)
        say("ready", daemon=getattr(comm.proxy, "daemon", None))
        steps = work_until_the_end(case, comm, work, rng, victim=victim)
        work.close()
        comm.close()
        say("done", steps=steps)
    except ProxyCCLError as error:
        say("error", kind=type(error).__name__, message=str(error))
        if comm is not None:
            try:
                go_on(case, comm)
            except ProxyCCLError as later:
                say("ended", kind=type(later).__name__, message=str(later))
            comm.close()
    except WrongResultError as error:
        say("wrong", message=str(error))
        return 3
    return 0


def main(case: Case) -> int:
    """Runs the rank, then prints how many descriptors are open. Returns the exit status."""
    rank, before = int(os.environ["RANK"]), descriptors()
    victim, rng = rank == case.victim, random.Random(1000 * case.seed + rank)
    if victim:
        begin_fault(case, rng)
    status = run(case, rng, victim=victim)
    # An alarm after the handler's removal at exit would kill this process.
    signal.setitimer(signal.ITIMER_REAL, 0)
    # Arrays may live until cycles are collected, and shared memory lives until the peers have closed the failed
    # communicator.
    deadline = time.monotonic() + case.timeout + _LETS_GO_SECONDS
    gc.collect()
    while (after := descriptors()) > before + LASTING_DESCRIPTORS and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    say("descriptors", before=before, after=after, open=[show_descriptor(number) for number in range(64)])
    return status


if __name__ == "__main__":
    flags = dict.fromkeys(sys.argv[3:], True)
    sys.exit(main(Case.of(int(sys.argv[1]), sys.argv[2], **flags)))
