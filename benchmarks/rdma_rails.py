"""Puts over several RDMA devices (rails) for each rank, compared with one, between two ranks of this machine.

    python benchmarks/rdma_rails.py rxe0,rxe2 rxe1,rxe3

The arguments are the devices of rank 0 and of rank 1. In a call by proxy, rank 0 broadcasts an array with one put and
one signal, or both ranks gather an array of each rank with one put and one signal in each direction. The cases take
turns; a figure is the median over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from program import common_arguments, end_if_it_hangs

from proxyccl import Communicator, RdmaOptions, ThreadBootstrap
from proxyccl.tools.options import show_size
from proxyccl.tools.results import machine, versions, write_json

_CALLS, _ROUNDS = 10, 5


def _open(rank: int, bootstrap: ThreadBootstrap, devices: list[str]) -> Communicator:
    # The time-out is long, because packets wait in the queue of a link whose rate is limited.
    names = {"device": devices[0]} if len(devices) == 1 else {"devices": devices, "rails": len(devices)}
    rdma = RdmaOptions(**names, timeout=18)
    return Communicator(bootstrap, rdma=rdma, local_world_size=1, transport={(0, 1): "verbs"}, timeout=120)


def _seconds_of_a_call(comm: Communicator, collective: str, nbytes: int) -> float:
    x, gathered = comm.empty((nbytes,), "uint8"), comm.empty((2 * nbytes,), "uint8")

    def call() -> None:
        if collective == "broadcast":
            comm.broadcast(x, 0, algorithm="proxy")
        else:
            comm.all_gather(x, out=gathered, algorithm="proxy")

    call()
    comm.synchronize()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    comm.synchronize()
    return (time.perf_counter() - began) / _CALLS


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("devices", nargs=2, help="the devices of a rank, separated by commas")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    of_ranks = [text.split(",") for text in parsed.devices]
    sizes = (1 << 20,) if parsed.quick else (4 << 10, 64 << 10, 256 << 10, 1 << 20)
    with ThreadPoolExecutor(2) as ranks:
        pairs = []
        for count in (1, len(of_ranks[0])):
            bootstraps = ThreadBootstrap.create(2)
            pairs.append(list(ranks.map(_open, range(2), bootstraps, [devices[:count] for devices in of_ranks])))
        rows = []
        for collective, size in itertools.product(("broadcast", "all_gather"), sizes):
            measured: list[list[float]] = [[], []]
            for _ in range(_ROUNDS):
                for times, pair in zip(measured, pairs, strict=True):
                    times.append(max(ranks.map(_seconds_of_a_call, pair, [collective] * 2, [size] * 2)))
            one, all_rails = (statistics.median(times) for times in measured)
            rows.append(
                {
                    "collective": collective,
                    "bytes": size,
                    "rails": len(of_ranks[0]),
                    "one_rail_s": one,
                    "all_rails_s": all_rails,
                    "ratio": one / all_rails,
                }
            )
            times_ms = f"one rail {1e3 * one:8.2f} ms  {len(of_ranks[0])} rails {1e3 * all_rails:8.2f} ms"
            print(f"{collective:>10} {show_size(size):>8}  {times_ms}  {one / all_rails:.2f} x", flush=True)
        for pair in pairs:
            list(ranks.map(Communicator.close, pair))
    if parsed.json:
        write_json(parsed.json, {"machine": machine(), "versions": versions(), "rails": rows})


if __name__ == "__main__":
    main()
