"""Proxied RDMA writes between two devices of this machine, compared with bare verbs and perftest: make bench-rdma

The rate of 8-byte writes is compared with a C loop that only calls ibv_post_send and ibv_poll_cq. The bandwidth of 64
KiB writes is compared with perftest's ib_write_bw.

One thread pushes triggers into a ring, and a ProxyService drains the ring onto a queue pair. Our time runs from the
first push until the pushing thread sees the flush word after the last write. The thread reads this word every 20 ms, so
our time may be up to 20 ms too long. The bare loop and the engine use queue pairs with the same options on the same
devices. ib_write_bw gets the same depth and number of messages. In each round every contender runs once; a ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aims
import bare_loops
from perftest import Perftest
from program import common_arguments, end_if_it_hangs
from proxied_writes import FIFO_SIZE, TIMEOUT, Place, ProxiedWrites

from proxyccl import RdmaOptions, open_runtime, rdma_devices
from proxyccl.device.errors import ProxyCCLError, TransportError
from proxyccl.device.runtime import Memory, Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.transports.verbs import TRANSPORT
from proxyccl.proxy.verbs.address import EndpointAddress
from proxyccl.proxy.verbs.devices import choose_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.registrations import Registration, Registrations
from proxyccl.tools import options
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

ffi, lib = _engine.ffi, _engine.lib

_LOOK = 0.02  # seconds between reads of the flush word; frequent reads would disturb a CPU that emulates the device
_SHORT, _LONG = 8, 64 << 10
_SMALL_FIFO_SIZE = 256  # The ring is small, so the producer often waits for room and spins.
_CALIBRATION = 200  # Number of writes in a calibration run.
_MOST_WRITES = 1_000_000  # Maximum number of writes in a run.
_LETTERS = "abcdefgh"
_SOFT_ROCE = "Soft-RoCE on an emulated CPU, which also does the device's work: ratios are meaningful, rates are not"


class Pair:
    """Two devices, each with registered memory. The first device writes from its memory to the second device's memory.

    Args:
        runtime: allocates the memory.
        names: names of the devices.
        gid_index: index of the GID, on both devices; None for ProxyCCL's choice.
        depth: the capacity of a send queue, in work requests.
    """

    def __init__(self, runtime: Runtime, names: tuple[str, str], gid_index: int | None, depth: int) -> None:
        self.runtime = runtime
        self._devices: list[VerbsDevice] = []
        self.memories: list[Memory] = []
        self.regions: list[Registration] = []
        found = rdma_devices()
        for name in names:
            wanted = RdmaOptions(device=name, gid_index=gid_index, send_depth=depth)
            self._devices.append(VerbsDevice(choose_devices(found, wanted)[0], wanted))
            self.memories.append(runtime.allocate(_LONG))
            registrations = Registrations(self._devices[-1])
            self.regions.append(registrations.register(self.memories[-1].ptr, _LONG))

    def describe(self) -> list[str]:
        """Returns a line of text for each device."""
        return [f"{device.name} port {device.choice.port}, {device.gid}" for device in self._devices]

    @property
    def gid_index(self) -> int:
        """The index of the first device's GID."""
        return self._devices[0].choice.gid_index

    def connect(self) -> Endpoint:
        """Returns a new queue pair of the first device, connected to a queue pair of the second device."""
        near, far = (device.endpoint() for device in self._devices)
        near.connect(far.address)
        far.connect(near.address)
        return near

    def refill(self, nbytes: int) -> None:
        """Fills the source with new bytes, and the destination with their complements."""
        sent = secrets.token_bytes(nbytes)
        for memory, data in zip(self.memories, (sent, bytes(byte ^ 0xFF for byte in sent)), strict=True):
            ffi.memmove(ffi.cast("char *", memory.ptr), data, nbytes)

    def wrong(self, nbytes: int) -> int:
        """Returns the number of bytes in which source and destination differ."""
        sent, received = (bytes(ffi.buffer(ffi.cast("char *", memory.ptr), nbytes)) for memory in self.memories)
        return sum(a != b for a, b in zip(sent, received, strict=True)) if sent != received else 0

    def close(self) -> None:
        """Closes devices and memory. The caller must first close everything that uses the devices or the memory."""
        for device in self._devices:
            device.close()
        for memory in self.memories:
            memory.close()


class Bare:
    """The bare loop in C, on its own queue pair.

    Args:
        pair: the devices and their memory.
        depth: maximum number of outstanding writes.
        chain: number of writes posted with one call.
        signal_every: every n-th write is signalled.
    """

    def __init__(self, pair: Pair, depth: int, chain: int, signal_every: int) -> None:
        near = pair.connect()
        qp = near.engine_options(0).qp
        found = ffi.new("ProxycclVerbsQp *")
        if lib.proxyccl_verbs_check_qp(qp, EndpointAddress.decode(near.address).qp_number, found):
            raise ProxyCCLError("could not find the queue pair's completion queue")
        local, remote = pair.regions
        self._options = {
            "qp": qp,
            "cq": found.send_cq,
            "local": local.address,
            "lkey": local.local_key,
            "remote": remote.address,
            "rkey": remote.key,
            "depth": depth,
            "chain": chain,
            "signal_every": signal_every,
            "timeout_ns": int(TIMEOUT * 1e9),
        }

    def __call__(self, nbytes: int, count: int) -> float:
        """Makes `count` writes of `nbytes` bytes. Returns the time that the writes take, in seconds."""
        taken = bare_loops.verbs_write(**self._options, bytes=nbytes, count=count)
        if taken < 0:
            raise TransportError(f"the bare loop: {TRANSPORT.status_text(-taken)}")
        return taken / 1e9


def proxied_writes(pair: Pair, fifo_size: int) -> ProxiedWrites:
    """Makes a proxy whose channel writes through the first device into the second device's memory.

    Args:
        pair: the devices and their memory.
        fifo_size: slots of the ring.
    """
    local, remote = pair.regions
    return ProxiedWrites(
        pair.runtime,
        TRANSPORT.name,
        pair.connect().engine_options(remote.key),
        Place(local.address, local.nbytes, local.local_key),
        Place(remote.address, remote.nbytes, remote.key),
        look=_LOOK,
        fifo_size=fifo_size,
    )


@dataclass(frozen=True)
class Contender:
    """A contender: a function that makes the writes.

    Attributes:
        name: the contender's name in tables.
        ours: whether it is ProxyCCL's.
        seconds: given the bytes of a write and a number of writes, makes the writes and returns the seconds that they
            take.
        checked: whether the contender writes the memory of the `Pair`, so that the result can be checked.
    """

    name: str
    ours: bool
    seconds: Callable[[int, int], float]
    checked: bool = True


class Comparison:
    """Measures contenders alternately.

    Args:
        pair: the devices and their memory.
        nbytes: bytes of a write.
        contenders: the contenders; our target is relative to the first.

    Attributes:
        wrong: the total number of wrong bytes after the runs.
        rounds: the number of rounds made.
    """

    def __init__(self, pair: Pair, nbytes: int, contenders: Sequence[Contender]) -> None:
        self._pair, self._nbytes, self._contenders = pair, nbytes, contenders
        self._seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        self._count = 0
        self.wrong = 0
        self.rounds = 0

    def _run(self, contender: Contender, count: int) -> float:
        self._pair.refill(self._nbytes)
        seconds = contender.seconds(self._nbytes, count)
        if contender.checked:
            self.wrong += self._pair.wrong(self._nbytes)
        return seconds

    def measure(self, rounds: int, seconds: float) -> None:
        """A short run of each contender determines the number of writes. Then measures `rounds` rounds, or fewer if the
        time is up, but at least one.
        """
        start = time.monotonic()
        rate = _CALIBRATION / min(self._run(contender, _CALIBRATION) for contender in self._contenders)
        share = seconds / (2 * (rounds + 1) * len(self._contenders))  # half of the time limit is left for other work
        self._count = max(_CALIBRATION, min(_MOST_WRITES, int(rate * share)))
        while self.rounds < rounds and (self.rounds == 0 or time.monotonic() - start < seconds):
            for contender in self._contenders:
                self._seconds[contender.name].append(self._run(contender, self._count))
            self.rounds += 1

    def rows(self) -> list[Fields]:
        """Returns a row for each contender. A row's field `over` holds, for every contender, the median ratio of this
        row's rate to that contender's rate.
        """
        found = []
        for contender in self._contenders:
            own = self._seconds[contender.name]
            over = {
                name: statistics.median(theirs / mine for theirs, mine in zip(others, own, strict=True))
                for name, others in self._seconds.items()
            }
            found.append(
                {
                    "name": contender.name,
                    "ours": contender.ours,
                    "bytes": self._nbytes,
                    "writes": self._count,
                    "rounds": self.rounds,
                    "median_per_s": self._count / statistics.median(own),
                    "best_per_s": self._count / min(own),
                    "median_gbs": self._nbytes * self._count / statistics.median(own) / 1e9,
                    "over": over,
                }
            )
        return found


def _show(title: str, rows: list[Fields], aim: float) -> None:
    print(f"\n{title}; {rows[0]['writes']} writes in each of {rows[0]['rounds']} rounds; aim {aim}")
    columns = (
        Column("", "", 44, left=True),
        Column("median", "(1/s)", 10, ",.0f"),
        Column("best", "(1/s)", 10, ",.0f"),
        Column("median", "(MB/s)", 10, ",.2f"),
        *(Column("over", f"({letter})", 6, ".2f") for letter in _LETTERS[: len(rows)]),
    )
    table = Table(columns)
    table.header()
    for letter, row in zip(_LETTERS, rows, strict=False):
        rates = (row["median_per_s"], row["best_per_s"], row["median_gbs"] * 1e3)
        table.row(f"{letter}  {row['name']}", *rates, *row["over"].values())


def _arguments() -> argparse.Namespace:
    parser = common_arguments(__doc__.splitlines()[0])
    here = os.environ.get("SOFT_ROCE_DEVICES", "").split(",")
    two = here if len(here) == 2 else None
    parser.add_argument(
        "--devices", nargs=2, default=two, required=two is None, help="two RDMA devices that reach each other"
    )
    parser.add_argument("--gid-index", type=int, help="GID index on both devices (default: ProxyCCL's choice)")
    parser.add_argument(
        "--short-depth", type=options.count, default=256, help="outstanding writes of 8 B (default %(default)s)"
    )
    parser.add_argument(
        "--long-depth", type=options.count, default=128, help="outstanding writes of 64 KiB (default %(default)s)"
    )
    parser.add_argument("-r", "--rounds", type=options.count, help="most rounds of each comparison")
    return parser.parse_args()


def main() -> int:
    parsed = _arguments()
    end_if_it_hangs(parsed.seconds)
    rounds = parsed.rounds or (3 if parsed.quick else 11)
    names = tuple(parsed.devices)
    program = shutil.which("ib_write_bw")
    facts = machine()
    print(f"# ProxyCCL {versions().get('proxyccl', '')} RDMA writes from {names[0]} to {names[1]}")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}, {facts['system']}")
    missing = [] if program else ["ib_write_bw, which is not installed"]
    runtime = open_runtime("host")
    with contextlib.ExitStack() as closing:
        short, long = (Pair(runtime, names, parsed.gid_index, n) for n in (parsed.short_depth, parsed.long_depth))
        for pair in (short, long):
            closing.callback(pair.close)
        for line in short.describe():
            print(f"# {line}", flush=True)

        def proxied(pair: Pair, fifo_size: int) -> Callable[[int, int], float]:
            return closing.enter_context(proxied_writes(pair, fifo_size))

        few, chain = max(1, parsed.short_depth // 8), min(lib.PROXYCCL_VERBS_CHAIN, parsed.short_depth // 2)
        rate = Comparison(
            short,
            _SHORT,
            [
                Contender("bare loop, one request a call", False, Bare(short, parsed.short_depth, 1, 1)),
                Contender(f"bare loop, one of {few} signalled", False, Bare(short, parsed.short_depth, 1, few)),
                Contender(f"bare loop, {chain} requests a call", False, Bare(short, parsed.short_depth, chain, chain)),
                Contender(f"proxied, ring of {FIFO_SIZE}", True, proxied(short, FIFO_SIZE)),
                Contender(f"proxied, ring of {_SMALL_FIFO_SIZE}", True, proxied(short, _SMALL_FIFO_SIZE)),
            ],
        )
        perftest = Perftest(program, names, long.gid_index, parsed.long_depth) if program else None
        peers = [Contender("ib_write_bw", False, perftest, checked=False)] if perftest else []
        bandwidth = Comparison(
            long,
            _LONG,
            [
                *peers,
                Contender("bare loop, one request a call", False, Bare(long, parsed.long_depth, 1, 1)),
                Contender(f"proxied, ring of {FIFO_SIZE}", True, proxied(long, FIFO_SIZE)),
            ],
        )
        parts = ((rate, aims.RDMA_RATE_RATIO, 0.4), (bandwidth, aims.RDMA_BANDWIDTH_RATIO, 0.6))
        for comparison, aim, share in parts:
            comparison.measure(rounds, share * parsed.seconds)
            rows = comparison.rows()
            _show(f"Writes of {show_size(rows[0]['bytes'])}", rows, aim)
            if comparison.rounds < rounds:
                missing.append(f"{rounds - comparison.rounds} of {rounds} rounds with {show_size(rows[0]['bytes'])}")
    wrong = sum(comparison.wrong for comparison, *_ in parts)
    if missing:
        print(f"# not measured: {', '.join(missing)}")
    print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}", flush=True)
    if parsed.json is not None:
        results = {
            "benchmark": "rdma_writes",
            "runtime": runtime.name,
            "device": f"{names[0]} to {names[1]}",
            "devices": short.describe(),
            "peers": {"perftest": perftest.version()} if perftest else {},
            "method": "the writers alternate in one process; medians over the rounds, ratios within a round",
            "note": _SOFT_ROCE if names[0].startswith("rxe") else "",
            "depth": {"short": parsed.short_depth, "long": parsed.long_depth},
            "rate": rate.rows(),
            "bandwidth": bandwidth.rows(),
            "not_measured": missing,
            "wrong": wrong,
        }
        write_json(parsed.json, results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
