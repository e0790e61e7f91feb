"""The account of a communicator's device memory, by purpose."""

from __future__ import annotations

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.tools.communicators import communicators, memory_text
from support.device_arrays import on_device
from support.ranks import Ranks, collect_garbage


def test_memory_is_counted_by_purpose_until_it_is_freed() -> None:
    def body(comm: Communicator) -> None:
        assert not any(comm.memory_usage().values())
        array = comm.empty(1000, "float32")
        assert comm.memory_usage()["arrays"] == 4000
        comm.all_reduce(on_device(comm, np.ones(8, np.float32)), algorithm="two_shot")
        comm.send(array, (comm.rank + 1) % 2)
        comm.recv(array, (comm.rank + 1) % 2)
        comm.synchronize()
        used = comm.memory_usage()
        assert used["scratch"] > 0
        assert used["transfers"] > 0
        assert used["channels"] > 0
        arrays = used["arrays"]
        array.free()
        collect_garbage()
        comm.all_gather_bytes(b"")  # the other rank may still map the array
        comm.group.symmetric.update(wait=True)
        comm.all_gather_bytes(b"")
        comm.group.symmetric.update(wait=True)
        collect_garbage()
        assert comm.memory_usage()["arrays"] <= arrays - 4000

    with Ranks(2) as ranks:
        ranks.run(body)


@pytest.mark.no_proxy
def test_observers_see_the_memory_of_each_rank() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(1000 * (comm.rank + 1), "uint8")
        comm.group.device_memory.publish()
        comm.all_gather_bytes(b"")
        views = {rank.rank: rank for each in communicators() if each.name == comm.job for rank in each.ranks}
        assert {rank: view.memory["arrays"] for rank, view in views.items()} == {0: 1000, 1: 2000}
        lines = memory_text(comm.job).splitlines()
        assert lines == [f"{comm.job}, rank {rank}: 0.0 MiB of device memory (arrays 0.0)" for rank in range(2)]
        assert memory_text("another") == ""
        comm.all_gather_bytes(b"")
        array.free()

    with Ranks(2) as ranks:
        ranks.run(body)
