"""Proxied writes through libfabric, beside a bare C loop of fi_writemsg on the same provider.

Writes of 8 bytes give a rate, writes of 1 MiB a bandwidth. They go to a process of their own, which only polls. The
bare loop and the engine have an endpoint each, of the same provider and interface, with the same window, and ask for as
many completions. They take turns; a ratio is the median of the ratios of the rounds.

    python benchmarks/fabric_writes.py --interface lo      both processes on one host, over its loopback
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from program import common_arguments, end_if_it_hangs

from proxyccl import FabricOptions, open_runtime
from proxyccl.channels.control import ControlSegment, create_segment
from proxyccl.channels.tools.results import Fields, machine, versions, write_json
from proxyccl.device.errors import ProxyCCLError, TransportError, WaitTimeoutError
from proxyccl.proxy import _engine, bare_loops
from proxyccl.proxy.fabric.endpoint import FabricConnectionOptions, FabricEndpoint, FabricRegistration
from proxyccl.proxy.fabric.library import fabric_offers, load
from proxyccl.proxy.fabric.providers import choose_offer
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.trigger import Operation, Trigger

ffi = _engine.ffi

_TIMEOUT = 60.0  # seconds, of each wait
_LOOK = 0.002  # seconds between two reads of the flush word
_FIFO_SIZE = 8192
_BYTES = 1 << 20
_SHORT, _LONG = 8, _BYTES
_AIMS = {_SHORT: 0.9, _LONG: 0.95}
_RUN_SECONDS = 0.3
_CALIBRATION = {_SHORT: 5000, _LONG: 20}
_RUNS_OF_A_WINDOW = 4  # completions that a window asks for, as the engine does


def _endpoint(options: FabricOptions) -> tuple[FabricEndpoint, np.ndarray, FabricRegistration]:
    endpoint = FabricEndpoint(choose_offer(fabric_offers(), options), options)
    memory = np.zeros(_BYTES, np.uint8)
    return endpoint, memory, endpoint.register(memory.ctypes.data, memory.nbytes)


def serve(pipe: Connection, options: FabricOptions) -> None:
    """The target: tells where it is, learns of the senders, and polls until the pipe has something to say."""
    endpoint, memory, registration = _endpoint(options)
    pipe.send((endpoint.address, registration.address, registration.key))
    queue = endpoint.connect(pipe.recv(), 0).queue
    while not pipe.poll():
        if bare_loops.fabric_serve(queue, 0.05):
            break
    pipe.send(memory.tobytes())
    endpoint.close()


class Bare:
    """The bare loop, on an endpoint."""

    def __init__(self, to: FabricConnectionOptions, local: int, remote: int, key: int) -> None:
        self._options: dict[str, Any] = {
            "endpoint": to.endpoint,
            "queue": to.queue,
            "peer": to.peer,
            "local": local,
            "remote": remote,
            "key": key,
            "depth": to.depth,
            "complete_every": max(1, to.depth // _RUNS_OF_A_WINDOW),
            "timeout_ns": int(_TIMEOUT * 1e9),
        }

    def __call__(self, nbytes: int, count: int) -> float:
        """Seconds that so many writes take."""
        taken = bare_loops.fabric_write(**self._options, bytes=nbytes, count=count)
        if taken < 0:
            raise TransportError(f"the bare loop: {load().words(-taken)}")
        return taken / 1e9


class Proxied:
    """A proxy with one channel to the same target."""

    def __init__(self, to: FabricConnectionOptions, local: int, remote: int, key: int) -> None:
        runtime = open_runtime("host")
        self._segment = create_segment(runtime, 0, _TIMEOUT)
        self._failures: list[ProxyFailure] = []
        self._service = service = ProxyService(
            runtime,
            self._segment.host_pointer,
            self._segment.memory,
            shared_offset=ControlSegment.service_offset,
            fifo_size=_FIFO_SIZE,
            on_failure=self._failures.append,
        )
        connection = service.connect("fabric", replace(to, signal_key=key))
        self._channel = service.reserve_channel(connection)
        service.set_channel(self._channel, connection, remote)
        self._source = service.add_memory(local, _BYTES)
        self._destination = service.add_rdma_memory(remote, _BYTES, key)
        self._fifo = service.fifo_for(self._channel)
        self._flushed = ffi.cast("uint64_t *", service.flushed_pointer(self._channel))
        self._pushed = 0

    def __call__(self, nbytes: int, count: int) -> float:
        """Seconds from the first push until the flush behind the last of so many writes."""
        start = time.perf_counter()
        for operation, pushes in ((Operation.DATA, count - 1), (Operation.DATA | Operation.FLUSH, 1)):
            trigger = Trigger(operation, self._channel, nbytes, self._source, 0, self._destination, 0).encode()
            self._pushed += bare_loops.produce(self._fifo, self._pushed, trigger, pushes, _TIMEOUT)
        while self._flushed[0] < self._pushed:
            if self._failures:
                raise ProxyCCLError(f"the proxy failed: {self._failures[0].reason}")
            if time.perf_counter() - start > _TIMEOUT:
                raise WaitTimeoutError(f"{count} writes of {nbytes} bytes were not complete in time")
            time.sleep(_LOOK)
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends the proxy."""
        self._service.close()
        self._segment.close()


def compare(nbytes: int, rounds: int, bare: Callable[[int, int], float], ours: Callable[[int, int], float]) -> Fields:
    """Both in turns."""
    calibration = _CALIBRATION[nbytes]
    count = max(calibration, int(calibration * _RUN_SECONDS / bare(nbytes, calibration)))
    times = [(bare(nbytes, count), ours(nbytes, count)) for _ in range(rounds)]
    fields: Fields = {
        "bytes": nbytes,
        "writes": count,
        "rounds": rounds,
        "bare_per_second": count / statistics.median(bare for bare, _ in times),
        "ours_per_second": count / statistics.median(ours for _, ours in times),
        "ratio": statistics.median(bare / ours for bare, ours in times),
        "aim": _AIMS[nbytes],
    }
    return fields


def main() -> int:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--provider", help="libfabric's provider (default PROXYCCL_FABRIC_PROVIDER, or the preferred)")
    parser.add_argument("--interface", help="libfabric's interface (default PROXYCCL_FABRIC_INTERFACE, or any)")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    options = FabricOptions.from_environment(provider=parsed.provider, interface=parsed.interface)
    rounds = 3 if parsed.quick else 11
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    target = context.Process(target=serve, args=(theirs, options), daemon=True)
    target.start()
    address, remote, key = pipe.recv()
    (endpoint, *own), (second, *seconds) = _endpoint(options), _endpoint(options)  # a proxy takes all completions
    pipe.send(endpoint.address)
    for memory in (own[0], seconds[0]):
        memory[:] = np.random.default_rng(0).integers(0, 256, _BYTES)
    facts = machine()
    print(f"# ProxyCCL {versions().get('proxyccl', '')} writes through libfabric {load().version}: {endpoint.offer}")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    to = endpoint.connect(address, key)
    rows = []
    with contextlib.ExitStack() as closing:
        closing.callback(endpoint.close)
        closing.callback(second.close)
        bare = Bare(to, own[1].ptr, remote, key)
        ours = Proxied(second.connect(address, key), seconds[1].ptr, remote, key)
        closing.callback(ours.close)
        for contender in (bare, ours):
            contender(_SHORT, 1)  # makes the connection
        for nbytes in (_SHORT, _LONG):
            rows.append(row := compare(nbytes, rounds, bare, ours))
            print(
                f"{nbytes:>8} bytes: bare {row['bare_per_second']:>12,.0f}/s, "
                f"proxied {row['ours_per_second']:>12,.0f}/s, ratio {row['ratio']:.2f} (aim {row['aim']})",
                flush=True,
            )
        pipe.send(None)
        wrong = int((np.frombuffer(pipe.recv(), np.uint8) != own[0]).sum())
    target.join(_TIMEOUT)
    print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}", flush=True)
    if parsed.json is not None:
        write_json(
            parsed.json,
            {
                "benchmark": "fabric_writes",
                "offer": str(endpoint.offer),
                "depth": to.depth,
                "rows": rows,
                "wrong": wrong,
            },
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
