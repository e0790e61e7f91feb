"""Measures the limits between rehearsed nodes: the rate of TCP over the loopback, and the rate of the bus to a GPU.
Rank 0 and the first rank of the next node measure TCP. All ranks measure the copies between their devices and pinned
memory concurrently.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from side_by_side import Job

from proxyccl.tools.results import Fields

STREAMS = (1, 2, 4, 8)
_MESSAGE = 1 << 20
_SECONDS = 0.3
_ROUND_TRIPS = 2000
_SHORT = 64
_COPY_BYTES, _COPIES = 1 << 20, 256
_ADDRESS = "127.0.0.1"


def limits(job: Job) -> Fields:
    """Measures all rates in GB/s, and half of the round-trip time of 64 bytes over TCP in µs. Returns the same values
    on all ranks.
    """
    ranks = (0, job.ranks // (job.nodes or 1))
    return {
        "tcp": [
            {"streams": streams, "one_way_gbs": _tcp(job, ranks, streams, both=False), "each_of_both_ways_gbs": both}
            for streams in STREAMS
            for both in [_tcp(job, ranks, streams, both=True)]
        ],
        "tcp_short_us": _round_trip(job, ranks),
        **_bus(job),
    }


def _connections(job: Job, ranks: tuple[int, int], count: int, undo: ExitStack) -> list[socket.socket]:
    first, second = ranks
    made: list[socket.socket] = []
    listener = undo.enter_context(socket.create_server((_ADDRESS, 0), backlog=count)) if job.rank == first else None
    port = job.world.bcast(listener.getsockname()[1] if listener else None, root=first)
    for _ in range(count):
        if listener is not None:
            made.append(undo.enter_context(closing(listener.accept()[0])))
        elif job.rank == second:
            made.append(undo.enter_context(closing(socket.create_connection((_ADDRESS, port)))))
        job.world.Barrier()
    for each in made:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _send(connection: socket.socket, until: float) -> None:
    message = bytes(_MESSAGE)
    while time.perf_counter() < until:
        connection.sendall(message)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, received: list[float]) -> None:
    buffer = bytearray(_MESSAGE)
    nbytes, start = 0, time.perf_counter()
    while taken := connection.recv_into(buffer):
        nbytes += taken
    received.append(nbytes / (time.perf_counter() - start) / 1e9)


def _tcp(job: Job, ranks: tuple[int, int], streams: int, *, both: bool) -> float:
    """Measures the rate in GB/s of all streams together, from the first rank to the second. With `both`, data flows in
    both directions, and the rate of the slower direction is returned.
    """
    rates: list[float] = []
    with ExitStack() as undo:
        connections = _connections(job, ranks, streams, undo)
        until = time.perf_counter() + _SECONDS
        threads: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        for each in connections:
            if both or job.rank == ranks[0]:
                threads.append((_send, (each, until)))
            if both or job.rank == ranks[1]:
                threads.append((_receive, (each, rates)))
        started = [threading.Thread(target=target, args=given) for target, given in threads]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        job.world.Barrier()
    rate = sum(rates)
    return min(filter(None, job.world.allgather(rate)))


def _round_trip(job: Job, ranks: tuple[int, int]) -> float:
    elapsed = 0.0
    with ExitStack() as undo:
        for each in _connections(job, ranks, 1, undo):
            message = bytes(_SHORT)
            start = time.perf_counter()
            for _ in range(_ROUND_TRIPS):
                if job.rank == ranks[0]:
                    each.sendall(message)
                each.recv(_SHORT, socket.MSG_WAITALL)
                if job.rank == ranks[1]:
                    each.sendall(message)
            elapsed = (time.perf_counter() - start) * 1e6 / _ROUND_TRIPS / 2
        job.world.Barrier()
    return job.slowest(elapsed)


def _bus(job: Job) -> Fields:
    runtime, found = job.comm.runtime, {}
    device = job.comm.empty(2 * _COPY_BYTES, "uint8")
    with closing(runtime.allocate_pinned(2 * _COPY_BYTES)) as pinned:
        out = (pinned.ptr, device.ptr)
        back = (device.ptr + _COPY_BYTES, pinned.ptr + _COPY_BYTES)
        for name, pairs in (("to_host", [out]), ("to_device", [back]), ("both", [out, back])):
            streams = [runtime.create_stream() for _ in pairs]
            for turn in range(2):  # the first run is a warm-up
                job.world.Barrier()
                start = time.perf_counter()
                for _ in range(_COPIES if turn else 1):
                    for stream, (target, source) in zip(streams, pairs, strict=True):
                        runtime.copy(target, source, _COPY_BYTES, stream)
                for stream in streams:
                    stream.synchronize()
            found[f"bus_{name}_gbs"] = _COPIES * _COPY_BYTES / job.slowest(time.perf_counter() - start) / 1e9
            for stream in streams:
                stream.close()
    return found
