"""Makes collectives between processes, on pool segments that are allocated and freed, and on registered arrays that are
freed. Each rank checks its results, and prints a line.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxyccl import Communicator
from proxyccl.device.memory.memory_pool import MemoryPool
from support.cases.memory import make_call, registered, room_for
from support.cases.reference import Call
from support.device_arrays import barrier
from support.fakes.foreign_memory import ForeignMemory
from support.running import wait_for


def freed_arrays(comm: Communicator, call: Call) -> None:
    """Frees registered arrays while no communicator follows the memory pool, so that memory is freed immediately."""
    room = room_for(call, comm.world_size)
    source = comm.empty(room, "uint8")
    for seed in range(3):
        memory = ForeignMemory(comm.runtime, room)
        registration = comm.register(memory.array())
        assert registered(comm, memory.array().view())
        make_call(comm, replace(call, seed=seed), source, memory.array())
        barrier(comm)
        memory.close()
        again = memory.replaced()
        make_call(comm, replace(call, seed=seed + 10), source, again.array())
        assert not registered(comm, again.array().view())
        comm.deregister(registration)
        barrier(comm)
        again.close()


def segments(comm: Communicator, call: Call) -> None:
    """Frees segments of a pool that a communicator follows. The peers must unmap each segment before its memory is
    freed. A rank whose kernel waits for other ranks does not reply to them, so each rank waits until all have replies.
    """
    pool, room = MemoryPool(comm.runtime), room_for(call, comm.world_size)
    comm.group.symmetric.follow(pool)
    for seed in range(5):
        source, target = (ForeignMemory(comm.runtime, room) for _ in range(2))
        make_call(comm, replace(call, seed=seed), source.array(), target.array())
        wait_for(functools.partial(registered, comm, target.array().view()), "the peers have replied")
        comm.all_gather_bytes(b"")
        make_call(comm, replace(call, seed=seed + 10), source.array(), target.array())
        barrier(comm)
        source.close()
        target.close()
        wait_for(lambda: not pool.segments(), "the pool's memory is freed")
        comm.all_gather_bytes(b"")


with Communicator() as comm:
    count = comm.runtime.launch_defaults.meeting_bytes // 4
    for collective in ("all_gather", "all_reduce"):
        call = Call(
            collective, algorithm="two_shot" if collective == "all_reduce" else None, count=count, in_place=False
        )
        freed_arrays(comm, call)
    segments(comm, call)
    sys.stdout.write(f"rank {comm.rank}: correct\n")
    sys.stdout.flush()
