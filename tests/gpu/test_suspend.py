"""Communicators on GPUs that give their memory back for a while: the device's free memory, and captured graphs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.processes import start_of
from support.cases.graphs import Graph, Replayed
from support.cases.memory import registered
from support.cases.reference import Call
from support.devices import RUNTIME, world_sizes
from support.ranks import Ranks
from support.running import wait_for

pytestmark = pytest.mark.skipif(RUNTIME != "cuda", reason="only NVIDIA's driver suspends memory")
MIB = 1 << 20
CALLS = [
    *(Call("all_reduce", "float32", "sum", algorithm, 300_001) for algorithm in ("one_shot", "two_shot", "proxy")),
    Call("all_reduce", "float32", "sum", "one_shot", 100),
    Call("all_gather", "int32", "sum", None, 100_001, in_place=False),
]


def wait_for_end(process: int) -> None:
    wait_for(lambda: start_of(process) is None, "the proxies' process ends")


@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_memory_goes_back_to_the_device_and_graphs_stay_valid(proxy: str) -> None:
    def body(comm: Communicator) -> None:
        def free() -> float:
            return comm.runtime.memory_left()[0] / MIB

        stream = comm.runtime.create_stream()
        array = comm.empty(512 * MIB, "uint8").upload(np.full(512 * MIB, comm.rank, np.uint8))
        graphs: list[tuple[Replayed, Any]] = []
        for call in CALLS:
            replayed = Replayed(comm, call, stream)
            replayed.issue()
            comm.synchronize(stream)
            graphs.append((replayed, Graph(stream, replayed.issue)))
        for save in (True, False):
            comm.all_gather_bytes(b"")  # all ranks have made their allocations
            used, before = comm.memory_usage(), free()
            given_back, of_process = 0.9 * sum(used.values()) / MIB, 0
            served = comm.proxy.daemon if isinstance(comm.proxy, DaemonClient) else None
            comm.suspend(save=save)
            if served is not None:
                wait_for_end(served)
                of_process = 64  # less than the proxies' process takes on any device
            asleep = free()
            assert asleep - before > given_back + of_process, (before, asleep, used)
            comm.resume()
            assert asleep - free() > given_back
            assert comm.memory_usage() == used
            assert set(np.unique(array.numpy())) == ({comm.rank} if save else {0})
            array.fill(comm.rank)
            for seed, (replayed, graph) in enumerate(graphs):
                replayed.load(seed)
                graph.launch()
                comm.synchronize(stream)
                replayed.check()

    for ranks in world_sizes(2, 4):
        with Ranks(ranks, suspendable=True, proxy=proxy) as group:
            group.run(body)


def test_arrays_stay_registered_with_another_communicator() -> None:
    def body(comm: Communicator) -> None:
        other = comm.split(range(comm.world_size))
        array = comm.empty(MIB, "float32").fill(1)
        registration = other.register(array)
        for _ in range(2):
            comm.suspend()
            time.sleep(0.2)  # the watcher's thread would withdraw freed memory
            comm.resume()
            assert registered(other, array.view())
            array.fill(1)
            other.all_reduce(array, algorithm="two_shot")
            assert set(array.numpy()) == {comm.world_size}
        other.deregister(registration)
        assert not registered(other, array.view())
        other.close()

    for ranks in world_sizes(2, 4):
        with Ranks(ranks, suspendable=True) as group:
            group.run(body)
