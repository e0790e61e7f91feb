"""Compares proxied writes through libfabric with a bare C loop of fi_writemsg on the same provider.

The rate is measured with writes of 8 bytes, and the bandwidth with writes of 1 MiB. The target of the writes is another
process, which only polls. The bare loop and the engine each have an endpoint, of the same provider and interface and
with the same window. The loop and the engine send the same memory, request equally many completions, and run
alternately; a ratio is the median over rounds. First, if they are installed, iperf3 (one TCP stream) and fi_pingpong
(round trips) measure the same interface.

    make bare-loops                                       the bare loop
    python benchmarks/fabric_writes.py --interface lo      both processes on one host, over its loopback
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aims
import bare_loops
import numpy as np
from network_peers import NetworkPeers
from program import common_arguments, end_if_it_hangs
from proxied_writes import TIMEOUT, Place, ProxiedWrites

from proxyccl import FabricOptions, open_runtime
from proxyccl.device.errors import TransportError
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.fabric.library import FabricOffer, choose_offers, fabric_offers, load
from proxyccl.proxy.registrations import Registration
from proxyccl.tools.results import Fields, machine, versions, write_json

_LOOK = 0.002  # Seconds between two reads of the flush word.
_FIFO_SIZE = 1 << 18  # The ring has room for all writes of a run, so the pushing thread never spins.
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_BYTES = 1 << 20
_SHORT, _LONG = 8, _BYTES
_AIMS = {_SHORT: aims.FABRIC_RATE_RATIO, _LONG: aims.FABRIC_BANDWIDTH_RATIO}
_RUN_SECONDS = 0.5
_CALIBRATION = {_SHORT: 5000, _LONG: 20}
_RUNS_OF_A_WINDOW = 4  # completions that the loop requests per window, as many as the engine requests


def _endpoint(options: FabricOptions, memory: np.ndarray) -> tuple[FabricEndpoint, Registration]:
    endpoint = FabricEndpoint(choose_offers(fabric_offers(), options)[0], options)
    return endpoint, endpoint.register(memory.ctypes.data, memory.nbytes)


def serve(pipe: Connection, options: FabricOptions) -> None:
    """Runs in the target process: sends its endpoint's address, receives the senders' addresses, and polls until a
    message arrives in the pipe.
    """
    memory = np.zeros(_BYTES, np.uint8)
    endpoint, registration = _endpoint(options, memory)
    pipe.send((endpoint.address, registration.address, registration.key))
    queue = endpoint.connect(pipe.recv(), 0).queue
    while not pipe.poll():
        if bare_loops.fabric_serve(queue, 0.05):
            break
    pipe.send(memory.tobytes())
    endpoint.close()


class Bare:
    """Runs the bare loop on an endpoint."""

    def __init__(self, to: Any, local: int, remote: int, key: int) -> None:
        self._options: dict[str, Any] = {
            "endpoint": to.endpoint,
            "queue": to.queue,
            "peer": to.peer,
            "local": local,
            "remote": remote,
            "key": key,
            "depth": to.depth,
            "complete_every": max(1, to.depth // _RUNS_OF_A_WINDOW),
            "timeout_ns": int(TIMEOUT * 1e9),
        }

    def __call__(self, nbytes: int, count: int) -> float:
        """Returns the seconds that a number of writes takes."""
        taken = bare_loops.fabric_write(**self._options, bytes=nbytes, count=count)
        if taken < 0:
            raise TransportError(f"the bare loop: {load().words(-taken)}")
        return taken / 1e9


def compare(nbytes: int, rounds: int, bare: Callable[[int, int], float], ours: Callable[[int, int], float]) -> Fields:
    """Measures the bare loop and the engine alternately. Returns the row."""
    calibration = _CALIBRATION[nbytes]
    count = int(calibration * _RUN_SECONDS / bare(nbytes, calibration))
    count = min(max(calibration, count), _FIFO_SIZE)
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


def beside(offer: FabricOffer, peers: NetworkPeers) -> Fields:
    """Measures the rates of iperf3 and fi_pingpong on an offer's network interface. The result has no entry for a
    program that is not installed.
    """
    found: Fields = {}
    for program in peers.missing:
        print(f"# not measured: {program}, which is not installed")
    if offer.address is None:
        return found
    if "iperf3" not in peers.missing:
        found["iperf3_bytes_per_second"] = rate = peers.iperf3_bytes_per_second(str(offer.address))
        print(f"# iperf3, one stream: {rate / 1e6:,.0f} MB/s")
    if "fi_pingpong" not in peers.missing:
        for nbytes in (_SHORT, _LONG):
            found[f"fi_pingpong_{nbytes}_us"] = taken = peers.pingpong_seconds(str(offer.address), "tcp", nbytes) * 1e6
            print(f"# fi_pingpong over tcp, {nbytes} bytes one way: {taken:,.1f} µs, {nbytes / taken:,.0f} MB/s")
    return found


def main() -> int:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--provider", help="libfabric's provider (default PROXYCCL_FABRIC, or the preferred)")
    parser.add_argument("--interface", help="libfabric's interface (default PROXYCCL_FABRIC, or any)")
    parser.add_argument("--peers", type=Path, help="where iperf3 and fi_pingpong are unpacked, if not installed")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    options = FabricOptions.from_environment(provider=parsed.provider, interface=parsed.interface)
    rounds = 3 if parsed.quick else 31
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    target = context.Process(target=serve, args=(theirs, options), daemon=True)
    target.start()
    address, remote, key = pipe.recv()
    memory = np.random.default_rng(0).integers(0, 256, _BYTES, np.uint8)
    (endpoint, own), (second, proxied) = _endpoint(options, memory), _endpoint(options, memory)
    facts = machine()
    print(f"# ProxyCCL {versions().get('proxyccl', '')} writes through libfabric {load().version}: {endpoint.offer}")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    peers = beside(endpoint.offer, NetworkPeers(parsed.peers))
    pipe.send(endpoint.address)  # from this message on, the target polls
    to = endpoint.connect(address, key)
    rows = []
    with contextlib.ExitStack() as closing:
        closing.callback(endpoint.close)
        closing.callback(second.close)
        bare = Bare(to, own.ptr, remote, key)
        options_of_ours = second.connect(address, key)
        places = (Place(proxied.ptr, _BYTES, proxied.local_key), Place(remote, _BYTES, key))
        ours = closing.enter_context(
            ProxiedWrites(open_runtime("host"), "fabric", options_of_ours, *places, look=_LOOK, fifo_size=_FIFO_SIZE)
        )
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
        wrong = int((np.frombuffer(pipe.recv(), np.uint8) != memory).sum())
    target.join(TIMEOUT)
    print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}", flush=True)
    if parsed.json is not None:
        write_json(
            parsed.json,
            {
                "benchmark": "fabric_writes",
                "runtime": "host",
                "device": f"libfabric {load().version}: {endpoint.offer}",
                "method": "in turns, between two processes of one machine; medians over the rounds; TCP's congestion "
                f"control: {_CONGESTION_CONTROL.read_text().strip()}",
                "depth": to.depth,
                "beside": peers,
                "rows": rows,
                "wrong": wrong,
            },
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
