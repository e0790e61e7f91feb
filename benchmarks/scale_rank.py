"""One rank of `scale.py`: python scale_rank.py DIRECTORY RANK RANKS NODE SECONDS KIND

KIND is "nodes" for nodes of one host, or "hosts" for nodes that share no memory and communicate through libfabric.

The rank joins the job, and writes its resources and the time of each step to a file in the directory.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from proxyccl import Bootstrap, Communicator, FileBootstrap
from proxyccl.channels.segment.control import ControlSegment
from proxyccl.proxy.observe.publications import find
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.trigger import MAX_MEMORIES

Fields = dict[str, float]

_PHASES = {"hosts": "bootstrap", "topology": "exchange", "control segments": "exchange", "job": "exchange"}
"""Phases of the start-up by the purposes of its exchanges; time between two exchanges counts as part of the earlier
one.
"""
_COUNT, _TURNS, _REST_SECONDS = 256, 5, 1.0


class Timed:
    """A bootstrap that records the begin, the end and the received bytes of each exchange."""

    def __init__(self, bootstrap: FileBootstrap) -> None:
        self._bootstrap = bootstrap
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self.rounds: list[tuple[str, float, float, int]] = []

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """Calls the inner bootstrap's `all_gather`, and records the exchange."""
        began = time.perf_counter()
        everyone = self._bootstrap.all_gather(data, timeout, give_up)
        purpose = data.partition(b"\0")[0].decode()
        self.rounds.append((purpose, began, time.perf_counter(), sum(map(len, everyone))))
        return everyone

    def subset(self, members: Sequence[int], key: int) -> Bootstrap:
        """Implements `Bootstrap`."""
        return self._bootstrap.subset(members, key)

    def close(self) -> None:
        """See `Bootstrap.close`."""
        self._bootstrap.close()


def held() -> Fields:
    """Returns the number of this process's resources of each kind, and the process's memory in KiB."""
    descriptors = sockets = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.stat(f"/proc/self/fd/{name}").st_mode
        except OSError:  # skips the descriptor that lists the directory
            continue
        descriptors += 1
        sockets += stat.S_ISSOCK(mode)
    memory = dict.fromkeys(("Rss", "Pss", "Private_Dirty", "Private_Clean"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in memory:
            memory[name] = int(value.split()[0])
    return {
        "descriptors": descriptors,
        "sockets": sockets,
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kib": memory["Rss"],
        "pss_kib": memory["Pss"],
        "private_kib": memory["Private_Dirty"] + memory["Private_Clean"],
    }


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def phases_of(rounds: list[tuple[str, float, float, int]], began: float, ended: float) -> Fields:
    """Returns the seconds of each phase of the start-up, from the times of its exchanges."""
    found = dict.fromkeys(("bootstrap_s", "exchange_s", "segment_s", "connect_s"), 0.0)
    at = began
    for purpose, start, end, _ in rounds:
        # The segments are mapped between the exchanges "control segments" and "job".
        found["segment_s" if purpose == "job" else "connect_s" if purpose not in _PHASES else "exchange_s"] += (
            start - at
        )
        found[f"{_PHASES.get(purpose, 'connect')}_s"] += end - start
        at = end
    found["connect_s"] += ended - at
    return found


def timed(call: Callable[[], object], turns: int = _TURNS) -> list[float]:
    """Makes a call several times. Returns the seconds of each call."""
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    place, rank, ranks, node, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    if sys.argv[6] == "hosts":
        os.environ["PROXYCCL_HOSTS"] = "name"
        platform.node = lambda: f"host{rank // node}"
    result: dict[str, object] = {"rank": rank, "before": held(), "imports_processor_s": _processor()}
    bootstrap = Timed(FileBootstrap(place / "meeting", rank, ranks))
    bootstrap.all_gather(b"start", seconds, lambda: None)  # waits until all processes have started
    bootstrap.rounds.clear()
    began, before = time.perf_counter(), _processor()
    comm = Communicator(bootstrap, "host", local_world_size=node, timeout=seconds)
    ended = time.perf_counter()
    rounds = list(bootstrap.rounds)
    result |= phases_of(rounds, began, ended)
    result |= {"made_s": ended - began, "made_processor_s": _processor() - before}
    result["exchanged_bytes"] = sum(nbytes for *_, nbytes in rounds)
    result["made"] = held()

    def synchronized(call: Callable[[], object]) -> Callable[[], None]:
        def both() -> None:
            call()
            comm.synchronize()

        return both

    exchange = comm.group.exchange
    exchange.barrier("rest")
    idle, at = _processor(), time.perf_counter()
    time.sleep(_REST_SECONDS)
    result["rest_cores"] = (_processor() - idle) / (time.perf_counter() - at)
    exchange.barrier("rested")
    result["round_s"] = min(timed(lambda: exchange.barrier("round")))

    before = _processor()
    x = np.ones(_COUNT, np.float32)
    exchange.barrier("barrier")
    first, *others = timed(synchronized(comm.barrier))
    result |= {"first_barrier_s": first, "barrier_s": min(others), "barrier_processor_s": _processor() - before}
    before = _processor()
    first, *others = timed(synchronized(lambda: comm.all_reduce(x, op="max")))
    result |= {"first_all_reduce_s": first, "all_reduce_s": min(others)}
    result["all_reduce_processor_s"] = _processor() - before
    assert np.all(x == 1)
    result["used"] = held()
    result |= proxy_of(comm)

    exchange.barrier("split")
    own_node = range(rank - rank % node, rank - rank % node + node)
    began = time.perf_counter()
    part = comm.split(own_node)
    result["split_node_s"] = time.perf_counter() - began
    part.close()
    exchange.barrier("split evenly")
    began = time.perf_counter()
    with comm.split(range(rank % 2, ranks, 2)):
        result["split_half_s"] = time.perf_counter() - began
    exchange.barrier("close")
    began = time.perf_counter()
    comm.close()
    result["close_s"] = time.perf_counter() - began
    (place / f"rank{rank}.json").write_text(json.dumps(result))


def proxy_of(comm: Communicator) -> Fields:
    """Returns the numbers of connections, channels and memory ids of this rank's proxy, or nothing if the proxy was
    never used.
    """
    found = find(comm.job, [comm.rank], os.getpid())
    if not found:
        return {"connections": 0, "channels": 0, "memory_ids": 0}
    with Observer(found[0][1]) as observer:
        service = observer.snapshot()
    limits = SharedWords(comm.group.control.memory, ControlSegment.service_offset).memory_limits
    return {
        "connections": len(service.connections),
        "channels": len(service.channels),
        "memory_ids": sum(limits[memory] > 0 for memory in range(MAX_MEMORIES)),
    }


if __name__ == "__main__":
    main()
