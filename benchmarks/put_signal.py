"""Puts, gets and signals between two GPUs, by proxy and by the kernel: mpiexec -n 2 python -m mpi4py put_signal.py

- Latency is half of a ping-pong's round trip between two kernels of one thread, one on each rank. The kernel of rank 0
  times each round; the result is the median over rounds, without the warm-up rounds. A second, untimed run of the same
  kernel checks that each put's data arrives before the put's signal.
- The time to complete a put or get is measured by one thread of rank 0, which pushes the trigger, then waits for a
  flush or for the ticket. The result is the median over rounds.
- The bandwidth of puts or gets is measured over many transfers, from the first push until a final flush returns.
- The bandwidth of an SmChannel is the bandwidth of a kernel's stores, for several numbers of blocks, timed by two
  events.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import aims
import numpy as np
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_TIMEOUT = 20.0  # seconds

_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

// One round is there and back. If `wrong` is given, the sender writes the round's number to the first and to the last
// word, and the receiver counts the words that differ.
template <class Send, class Wait>
PROXYCCL_DEVICE void pingPong(int first, int rounds, uint64_t* ns, Send send, Wait wait) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t start = nanoseconds();
    if (first) send(round);
    if (!wait(round)) return;
    if (!first) send(round);
    ns[round] = nanoseconds() - start;
  }
}

extern "C" __global__ void proxy_ping_pong(DeviceHandle<ProxyChannel> channel, char* memory, uint64_t dst,
                                           uint64_t bytes, int first, int rounds, uint64_t* ns, int* wrong) {
  const uint64_t last = bytes - sizeof(int);
  pingPong(
      first, rounds, ns,
      [&](int round) {
        if (bytes == 0) return channel.signal();
        if (wrong != nullptr) {
          *reinterpret_cast<volatile int*>(memory) = round;
          *reinterpret_cast<volatile int*>(memory + last) = round;
        }
        channel.putWithSignal(dst, 0, bytes);
      },
      [&](int round) {
        if (!channel.wait()) return false;
        if (wrong != nullptr)
          *wrong += (*reinterpret_cast<volatile int*>(memory + dst) != round) +
                    (*reinterpret_cast<volatile int*>(memory + dst + last) != round);
        return true;
      });
}

// `kind`: 0 signal(); 1 signal(value), with the count; 2 putWithSignal() of eight bytes; 3 to 6 putValueWithSignal() of
// 1, 2, 4 or 8 bytes, which the receiver compares. `signals` counts the signals of each way.
template <class Value>
PROXYCCL_DEVICE void putRound(DeviceHandle<ProxyChannel>& channel, uint64_t dst, uint64_t round) {
  channel.putValueWithSignal(dst, static_cast<Value>(round));
}
template <class Value>
PROXYCCL_DEVICE bool isRound(const char* address, uint64_t round) {
  return *reinterpret_cast<const volatile Value*>(address) == static_cast<Value>(round);
}

extern "C" __global__ void value_ping_pong(DeviceHandle<ProxyChannel> channel, char* memory, uint64_t dst, int kind,
                                           int* wrong, uint64_t* signals, int first, int rounds, uint64_t* ns) {
  const uint64_t count = *signals;
  pingPong(
      first, rounds, ns,
      [&](int round) {
        if (kind == 1)
          channel.signal(count + round + 1);
        else if (kind == 2)
          channel.putWithSignal(dst, 0, 8);
        else if (kind == 3)
          putRound<uint8_t>(channel, dst, count + round);
        else if (kind == 4)
          putRound<uint16_t>(channel, dst, count + round);
        else if (kind == 5)
          putRound<uint32_t>(channel, dst, count + round);
        else if (kind == 6)
          putRound<uint64_t>(channel, dst, count + round);
        else
          channel.signal();
      },
      [&](int round) {
        if (!(kind == 1 ? channel.waitUntil(count + round + 1) : channel.wait())) return false;
        const char* const arrived = memory + dst;
        if (kind == 3) *wrong += !isRound<uint8_t>(arrived, count + round);
        if (kind == 4) *wrong += !isRound<uint16_t>(arrived, count + round);
        if (kind == 5) *wrong += !isRound<uint32_t>(arrived, count + round);
        if (kind == 6) *wrong += !isRound<uint64_t>(arrived, count + round);
        return true;
      });
  *signals = count + rounds;
}

extern "C" __global__ void sm_ping_pong(DeviceHandle<SmChannel> channel, int relaxed, int first, int rounds,
                                        uint64_t* ns) {
  pingPong(
      first, rounds, ns, [&](int) { return relaxed ? channel.relaxedSignal() : channel.signal(); },
      [&](int) { return channel.wait(); });
}

extern "C" __global__ void proxy_puts(DeviceHandle<ProxyChannel> channel, uint64_t dst, uint64_t bytes, int puts,
                                      uint64_t* ns) {
  const uint64_t start = nanoseconds();
  for (int i = 0; i < puts; ++i) channel.put(dst, 0, bytes);
  if (channel.flush()) ns[0] = nanoseconds() - start;
}

extern "C" __global__ void proxy_gets(DeviceHandle<ProxyChannel> channel, uint64_t dst, uint64_t bytes, int gets,
                                      uint64_t* ns) {
  const uint64_t start = nanoseconds();
  for (int i = 0; i < gets; ++i) channel.get(dst, 0, bytes);
  if (channel.flush()) ns[0] = nanoseconds() - start;
}

extern "C" __global__ void until_complete(DeviceHandle<ProxyChannel> channel, uint64_t dst, uint64_t bytes, int get,
                                          int by_ticket, int rounds, uint64_t* ns) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t start = nanoseconds();
    const uint64_t ticket = get ? channel.get(dst, 0, bytes) : channel.put(dst, 0, bytes);
    if (!(by_ticket ? channel.waitComplete(ticket) : channel.flush())) return;
    ns[round] = nanoseconds() - start;
  }
}

extern "C" __global__ void sm_copy(DeviceHandle<SmChannel> channel, uint64_t dst, uint64_t bytes, int get, int times) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (int i = 0; i < times; ++i) {
    if (get)
      channel.get(dst, 0, bytes, thread, threads);
    else
      channel.put(dst, 0, bytes, thread, threads);
  }
}

// Measures the smallest step of the clock that times the kernels above.
extern "C" __global__ void clock_step(uint64_t* ns) {
  uint64_t least = ~0ull, before = nanoseconds();
  for (int i = 0; i < 1 << 16; ++i) {
    const uint64_t now = nanoseconds();
    if (now != before && now - before < least) least = now - before;
    before = now;
  }
  ns[0] = least;
}
"""


_VALUES = (
    "signal()",
    "signal(value)",
    "putWithSignal, 8 B",
    *(f"putValueWithSignal, {size} B" for size in (1, 2, 4, 8)),
)


class Bench:
    """This rank's memory, channels and kernels. A rank sends from the first half of its memory, and receives in the
    second half.

    Args:
        comm: a communicator of two ranks.
        largest: bytes of each half of the memory.
        rounds: rounds of a ping-pong.
        threads: threads in a block of the kernel that copies over an SmChannel.
    """

    def __init__(self, comm: Communicator, largest: int, rounds: int, threads: int) -> None:
        self.comm = comm
        self.largest, self.rounds, self.threads = largest, rounds, threads
        self.peer = 1 - comm.rank
        self.first = comm.rank == 0
        self.memory = comm.empty(2 * largest, "uint8")
        # Keeps the channels alive, because they own the semaphores.
        self._channel_sets = (
            comm.proxy_channels(self.memory),
            comm.sm_channels(self.memory),
            comm.proxy_channels(self.memory),
        )
        self.proxied, self.mapped, self.valued = (channels.to(self.peer) for channels in self._channel_sets)
        self._signals = comm.empty(1, "int64").fill(0)  # number of signals that each rank has sent on `valued`
        self.kernels = comm.compile(_SOURCE)
        self.stream = comm.runtime.create_stream()
        self.ns = comm.empty(rounds, "int64")
        self.wrong = 0
        self.rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))

    def launch(self, name: str, blocks: int, threads: int, *args: Any, alone: bool = False) -> float:
        """Runs a kernel after a barrier, on both ranks or only on rank 0. Returns its time in milliseconds."""
        start, end = self.comm.runtime.create_event(), self.comm.runtime.create_event()
        self.comm.barrier(stream=self.stream)
        start.record(self.stream)
        if self.first or not alone:
            self.kernels[name](blocks, threads, *args, stream=self.stream)
        end.record(self.stream)
        self.comm.synchronize(self.stream)
        return end.elapsed(start)

    def clock_step(self) -> int:
        """Returns the resolution of the kernels' clock in nanoseconds."""
        self.launch("clock_step", 1, 1, self.ns)
        return int(self.ns.numpy()[0])

    def one_way(self, name: str, *args: Any, after: tuple[Any, ...] = ()) -> Fields:
        """Runs a ping-pong kernel. Returns rank 0's one-way times in µs, on both ranks."""
        times: list[float] = []
        for _ in range(5):
            self.launch(name, 1, 1, *args, int(self.first), self.rounds, self.ns, *after)
            times += (self.ns.numpy()[self.rounds // 10 :] / 2e3).tolist()
        mine = json.dumps([statistics.median(times), min(times), statistics.fmean(times)]).encode()
        median, best, mean = json.loads(self.comm.all_gather_bytes(mine)[0])
        return {"one_way_us": median, "best_us": best, "mean_us": mean}

    def fresh(self, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Fills the first half of the memory with random bytes, and poisons the second half. Returns the random bytes
        of this rank and of the peer.
        """
        seed = self.rng.bytes(8)
        own, theirs = (
            np.random.default_rng(int.from_bytes(each, "little")).integers(0, 255, nbytes, np.uint8)
            for each in (seed, self.comm.all_gather_bytes(seed)[self.peer])
        )
        content = np.full(2 * self.largest, 0xFF, np.uint8)
        content[:nbytes] = own
        self.memory.upload(content)
        self.comm.all_gather_bytes(b"")  # the second half is poisoned before the peer writes to it
        return own, theirs

    def count_wrong(self, nbytes: int, expected: np.ndarray) -> None:
        """Adds the number of wrong bytes in the memory's second half to `wrong`."""
        self.comm.all_gather_bytes(b"")  # after this call, the peer's data has arrived
        arrived = self.memory.numpy()[self.largest : self.largest + nbytes]
        self.wrong += int(np.count_nonzero(arrived != expected))

    def latency(self, nbytes: int) -> Fields:
        """Measures the latency of a put of `nbytes` bytes with its signal; if `nbytes` is 0, of the signal alone."""
        args = (self.proxied, self.memory, self.largest, nbytes)
        if nbytes:
            wrong = self.comm.empty(1, "int32").fill(0)
            own, theirs = self.fresh(nbytes)
            self.launch("proxy_ping_pong", 1, 1, *args, int(self.first), self.rounds, self.ns, wrong)
            self.wrong += int(wrong.numpy()[0])
            for each in (own, theirs):  # the kernel has stored the last round's number in the first and the last word
                each[:4] = each[-4:] = np.frombuffer(np.int32(self.rounds - 1).tobytes(), np.uint8)
            self.count_wrong(nbytes, theirs)
        limit, aim = aims.PUT_SIGNAL_US.get(nbytes, (None, None))
        if nbytes == 0:
            limit, aim = aims.SIGNAL_US["limit"], aims.SIGNAL_US["aim"]
        timing = self.one_way("proxy_ping_pong", *args, after=(None,))
        return {"bytes": nbytes, **timing, "limit_us": limit, "aim_us": aim}

    def value_latency(self, kind: int) -> Fields:
        """Measures the latency of values and signals that triggers carry, and of a put of 8 bytes from memory."""
        wrong = self.comm.empty(1, "int32").fill(0)
        given = (self.valued, self.memory, self.largest, kind, wrong, self._signals)
        timing = self.one_way("value_ping_pong", *given)
        self.wrong += int(wrong.numpy()[0])
        return {"operation": _VALUES[kind], **timing}

    def completion(self, nbytes: int, *, get: bool) -> Fields:
        """Measures the time from a put or get by rank 0 until a flush returns, and until the put's or get's ticket is
        complete.
        """
        _, theirs = self.fresh(nbytes)
        medians = []
        for by_ticket in (0, 1):
            given = (self.proxied, self.largest, nbytes, int(get), by_ticket, self.rounds, self.ns)
            times: list[float] = []
            for _ in range(3):
                self.launch("until_complete", 1, 1, *given, alone=True)
                times += (self.ns.numpy()[self.rounds // 10 :] / 1e3).tolist()
            medians.append(self._slowest([statistics.median(times)], both=False)[0])
        self._count_wrong_of_first(nbytes, theirs, get=get)
        return {
            "bytes": nbytes,
            "operation": "get" if get else "put",
            "flush_us": medians[0],
            "ticket_us": medians[1],
        }

    def _count_wrong_of_first(self, nbytes: int, theirs: np.ndarray, *, get: bool) -> None:
        if self.first == get:
            self.count_wrong(nbytes, theirs)
        else:
            self.comm.all_gather_bytes(b"")  # the peer's count_wrong

    def sm_latency(self, *, relaxed: bool) -> Fields:
        """Measures the latency of an SmChannel's signal."""
        timing = self.one_way("sm_ping_pong", self.mapped, int(relaxed))
        return {"signal": "relaxedSignal" if relaxed else "signal", **timing, "limit_us": aims.SM_SIGNAL_US}

    def put_bandwidth(self, nbytes: int, total: int, *, both: bool) -> Fields:
        """Measures the bandwidth of puts of `nbytes` bytes each and about `total` bytes in all, in one direction or in
        both.
        """
        puts = max(4, min(400, total // nbytes))
        _, theirs = self.fresh(nbytes)
        times = []
        for _ in range(5):
            self.launch("proxy_puts", 1, 1, self.proxied, self.largest, nbytes, puts, self.ns, alone=not both)
            times.append(float(self.ns.numpy()[0]))
        if both or not self.first:
            self.count_wrong(nbytes, theirs)
        else:
            self.comm.all_gather_bytes(b"")  # the peer's count_wrong
        ns = statistics.median(self._slowest(times, both=both))
        way = "both ways" if both else "one way"
        return {
            "bytes": nbytes,
            "direction": way,
            "puts": puts,
            "gbs": nbytes * puts / ns,
            "us_per_put": ns / puts / 1e3,
            "limit_gbs": aims.COPY_ENGINE_GBS[way],
        }

    def get_bandwidth(self, nbytes: int, total: int) -> Fields:
        """Measures the bandwidths of rank 0's gets and puts, each of about `total` bytes."""
        transfers = max(4, min(400, total // nbytes))
        rates = []
        for get in (False, True):
            _, theirs = self.fresh(nbytes)
            times = []
            for _ in range(5):
                kernel = "proxy_gets" if get else "proxy_puts"
                self.launch(kernel, 1, 1, self.proxied, self.largest, nbytes, transfers, self.ns, alone=True)
                times.append(float(self.ns.numpy()[0]))
            rates.append(nbytes * transfers / statistics.median(self._slowest(times, both=False)))
            self._count_wrong_of_first(nbytes, theirs, get=get)
        return {"bytes": nbytes, "transfers": transfers, "put_gbs": rates[0], "get_gbs": rates[1]}

    def _slowest(self, times: list[float], *, both: bool) -> list[float]:
        everyone = [np.frombuffer(data) for data in self.comm.all_gather_bytes(np.array(times).tobytes())]
        return (np.maximum(*everyone) if both else everyone[0]).tolist()

    def sm_bandwidth(self, blocks: int, *, get: bool) -> Fields:
        """Measures the bandwidth at which `blocks` blocks of rank 0 copy half of the memory."""
        own, theirs = self.fresh(self.largest)
        args = (self.mapped, self.largest, self.largest, int(get))

        def run(times: int) -> float:
            took = self.launch("sm_copy", blocks, self.threads, *args, times, alone=True)
            return self._slowest([took], both=False)[0]

        run(1)
        times = max(1, min(50, int(4.0 / run(1))))
        took = statistics.median(run(times) for _ in range(5))
        del own
        self._count_wrong_of_first(self.largest, theirs, get=get)
        return {
            "blocks": blocks,
            "operation": "get" if get else "put",
            "bytes": self.largest,
            "gbs": self.largest * times / took / 1e6,
            "limit_gbs": None if get else aims.SM_PUT_GBS.get(blocks),
        }


def _latency_columns(name: str) -> tuple[Column, ...]:
    return (
        Column(name, "", 24, left=True),
        Column("one way", "(µs)", 8, ".2f"),
        Column("best", "(µs)", 8, ".2f"),
        Column("mean", "(µs)", 8, ".2f"),
        Column("limit", "(µs)", 8, ".2f"),
        Column("aim", "(µs)", 8, ".2f"),
    )


_PUT_COLUMNS = (
    Column("size", "", 12, left=True),
    Column("direction", "", 10),
    Column("puts", "", 6, "d"),
    Column("busbw", "(GB/s)", 8, ".2f"),
    Column("a put", "(µs)", 9, ".2f"),
    Column("limit", "(GB/s)", 8, ".0f"),
)
_COMPLETION_COLUMNS = (
    Column("size", "", 12, left=True),
    Column("operation", "", 10),
    Column("by flush", "(µs)", 9, ".2f"),
    Column("by ticket", "(µs)", 9, ".2f"),
)
_GET_COLUMNS = (
    Column("size", "", 12, left=True),
    Column("transfers", "", 9, "d"),
    Column("puts", "(GB/s)", 8, ".2f"),
    Column("gets", "(GB/s)", 8, ".2f"),
)
_SM_COLUMNS = (
    Column("blocks", "", 8, "d"),
    Column("operation", "", 10),
    Column("size", "", 10),
    Column("busbw", "(GB/s)", 8, ".2f"),
    Column("limit", "(GB/s)", 8, ".0f"),
)


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(parsed.seconds)
    started = time.monotonic()
    with Communicator.from_mpi(timeout=_TIMEOUT) as comm:
        if comm.world_size != 2:
            raise SystemExit(f"put_signal.py needs 2 ranks, not {comm.world_size}: mpiexec -n 2 python -m mpi4py …")
        gpu = comm.runtime.name != "host"
        largest = 64 * aims.MIB if gpu else 256 * aims.KIB
        bench = Bench(comm, largest, rounds=1000 if gpu else 50, threads=1024 if gpu else 64)
        first = bench.first
        step = bench.clock_step()
        heading(comm, "put and signal", f"kernels' clock steps by {step} ns; medians; limits and aims: aims.py")
        skipped: list[str] = []

        def collect(name: str, columns: tuple[Column, ...], makers: list[Callable[[], Fields]]) -> list[Fields]:
            table = Table(columns)
            if first:
                print(f"\n{name}")
                table.header()
            rows = []
            for make in makers:
                over = comm.all_gather_bytes(b"1" if time.monotonic() - started > parsed.seconds else b"")[0]
                if over:
                    skipped.append(name)
                    break
                row = make()
                if not gpu:  # the limits and targets apply only to GPUs
                    row = {key: None if key.startswith(("limit", "aim")) else value for key, value in row.items()}
                rows.append(row)
                if first:
                    shown = dict(row)
                    if "bytes" in shown:
                        shown["bytes"] = show_size(shown["bytes"]) if shown["bytes"] else "signal alone"
                    table.row(*list(shown.values())[: len(columns)], *[None] * (len(columns) - len(shown)))
            return rows

        by_four = [8, *(nbytes for shift in range(6, 28, 2) if (nbytes := 1 << shift) <= largest)]
        sizes = sorted({1 * aims.KIB, 64 * aims.KIB, min(largest, aims.MIB)}) if parsed.quick else by_four
        latency_sizes = [0, *(nbytes for nbytes in sizes if nbytes <= 4 * aims.MIB)]
        total = 512 * aims.MIB if gpu else aims.MIB
        blocks = (1, 2, 4, 8, 16, 32, 64, 132) if gpu else (1, 4)
        results = {
            "benchmark": "put_signal",
            "clock_step_ns": step,
            "latency": collect(
                "ProxyChannel: put with signal, one way",
                _latency_columns("size"),
                [lambda n=n: bench.latency(n) for n in latency_sizes],
            ),
            "value_latency": collect(
                "ProxyChannel: what travels in the trigger, one way",
                _latency_columns("operation")[:4],
                [lambda k=k: bench.value_latency(k) for k in range(len(_VALUES))],
            ),
            "sm_latency": collect(
                "SmChannel: signal, one way",
                _latency_columns("signal"),
                [lambda r=r: bench.sm_latency(relaxed=r) for r in (False, True)],
            ),
            "bandwidth": collect(
                "ProxyChannel: puts, then a flush",
                _PUT_COLUMNS,
                [lambda n=n, b=b: bench.put_bandwidth(n, total, both=b) for b in (False, True) for n in sizes],
            ),
            "completion": collect(
                "ProxyChannel: a put or get until it is complete",
                _COMPLETION_COLUMNS,
                [lambda n=n, g=g: bench.completion(n, get=g) for n in sizes[:6] for g in (False, True)],
            ),
            "get_bandwidth": collect(
                "ProxyChannel: puts beside gets of one rank, then a flush",
                _GET_COLUMNS,
                [lambda n=n: bench.get_bandwidth(n, total) for n in sizes],
            ),
            "sm_bandwidth": collect(
                f"SmChannel: copies by blocks of {bench.threads} threads",
                _SM_COLUMNS,
                [lambda n=n, g=g: bench.sm_bandwidth(n, get=g) for g in (False, True) for n in blocks],
            ),
            "not_measured": skipped,
        }
        wrong = sum(int(data) for data in comm.all_gather_bytes(str(bench.wrong).encode()))
        if first:
            if skipped:
                print(f"# cut short, because the {parsed.seconds} s were up: {', '.join(skipped)}")
            print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
            if parsed.json is not None:
                write_json(parsed.json, {**describe(comm), **results, "wrong": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
