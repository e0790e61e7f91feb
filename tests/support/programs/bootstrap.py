"""Opens three communicators: from MPI's world, from a part of the world, and from the world in reverse order. Then
tests bootstraps of subsets.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from mpi4py import MPI

from proxyccl import Communicator, MpiBootstrap, WaitTimeoutError
from support.device_arrays import on_device, on_host

world = MPI.COMM_WORLD
half = world.Split(world.rank % 2, world.rank)
reverse = world.Split(0, -world.rank)
with (
    Communicator(timeout=60) as everyone,
    Communicator.from_mpi(half, timeout=60) as mine,
    Communicator(reverse, timeout=60) as backwards,
):
    assert (everyone.rank, everyone.world_size) == (world.rank, world.size)
    assert (mine.rank, mine.world_size) == (half.rank, half.size)
    assert backwards.rank == world.size - 1 - world.rank
    for comm, members in ((mine, half), (everyone, world), (backwards, reverse)):
        x = on_device(comm, np.full(100, world.rank, np.int64))
        comm.all_reduce(x)
        assert (on_host(x) == members.allreduce(world.rank)).all()
        assert comm.all_gather_bytes(b"x" * comm.rank) == [b"x" * rank for rank in range(comm.world_size)]
# Use two subsets alternately, so that a long message of one subset is in flight when a rank probes for a message of the
# other subset.
bootstrap = MpiBootstrap()
bootstrap.all_gather(b"", 20, lambda: None)
members = [world.size - 1, 0]
if world.size > 1 and world.rank in members:
    subsets = [bootstrap.subset(members, key) for key in (7, 8)]
    for turn, subset in enumerate([*subsets, *reversed(subsets)]):
        assert (subset.rank, subset.world_size) == (members.index(world.rank), 2)
        found = subset.all_gather(bytes([turn, world.rank]) * 100_000, 20, lambda: None)
        assert found == [bytes([turn, rank]) * 100_000 for rank in members]
# A rank whose all_gather timed out withdraws its message, so that the other rank's all_gather can't receive it later.
if world.size > 1 and world.rank in members:
    late = bootstrap.subset(members, 9)
    if world.rank == 0:
        with contextlib.suppress(WaitTimeoutError):
            late.all_gather(b"withdrawn", 0, lambda: None)
        late.withdraw()
world.Barrier()
if world.size > 1 and world.rank in members:
    late = bootstrap.subset(members, 9)
    if world.rank == members[0]:
        with contextlib.suppress(WaitTimeoutError):
            late.all_gather(b"withdrawn too", 0, lambda: None)
            raise AssertionError("the rank took a message that was withdrawn")
        late.withdraw()
world.Barrier()
if world.size > 1 and world.rank in members:
    late = bootstrap.subset(members, 9)
    assert late.all_gather(b"%d" % world.rank, 20, lambda: None) == [b"%d" % rank for rank in members]
bootstrap.close()
sys.stdout.write(f"rank {world.rank}: correct\n")
