"""Kills ranks before and during shrinks of the communicator. The survivors shrink until only survivors are members.

Arguments: each victim's rank and the step at which it is killed, as in "1=before 2=joined". Each survivor prints the
original ranks of the members, and the results of collectives.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from proxyccl import Communicator, CommunicatorError
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.joining import survivors
from proxyccl.channels.joining.survivors import Survivors

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.processes import FileBootstrap

PLACES: dict[str, tuple[object, str, bool]] = {
    "comes": (survivors, "wait_at_most", False),  # the victim has announced itself, and waits for other ranks
    "assembled": (Survivors, "assemble", True),
    "joined": (Survivors, "all_joined", True),
    "starts": (Collectives, "start", False),
}
"""For each step: a method, and whether the rank is killed after the method instead of before."""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place: str) -> None:
    owner, name, behind = PLACES[place]
    method: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (behind and method(*args, **options), die()))


comm = Communicator(FileBootstrap.from_environment(), timeout=60)
first_numbers = list(range(comm.world_size))
x = comm.empty(5000, "float32").fill(1)
comm.all_reduce(x)
comm.all_reduce(x, algorithm="proxy")
part = comm.split([rank for rank in range(comm.world_size) if rank != 1]) if comm.rank != 1 else None
place = dict(argument.split("=") for argument in sys.argv[1:]).get(str(comm.rank))
try:
    comm.barrier()
    while place != "before":
        comm.all_reduce(x)
except CommunicatorError:
    pass
if place == "before":
    die()
if place is not None:
    kill_at(place)
while True:
    shrunk = comm.shrink()
    first_numbers = [first_numbers[member] for member in shrunk.members]
    assert comm.closed
    comm = shrunk
    try:
        x.fill(comm.rank + 1)
        sums = [float(comm.all_reduce(x).numpy()[-1])]
        sums.append(float(comm.all_reduce(x, algorithm="proxy").numpy()[0]))
        sums.append(float(comm.all_reduce(np.ones(3, np.float32))[0]))
        comm.split(range(comm.world_size)).barrier()
        break
    except CommunicatorError:
        pass
print(first_numbers, sums)
comm.close()
