"""Runs all_reduce in place, out of place, asynchronously on a stream, and by every algorithm.

Rank 0 prints each algorithm's time on this machine.

    mpiexec -n 4 python -m mpi4py examples/all_reduce.py
"""

from __future__ import annotations

import time

import numpy as np

from proxyccl import Communicator

COUNT = 100_003  # a prime number, so that no algorithm can divide the array evenly
REPEATS = 20


def main() -> None:
    with Communicator() as comm:
        ranks = range(comm.world_size)
        own = np.arange(COUNT, dtype=np.float32) % 1000 + comm.rank
        expected = sum(np.arange(COUNT, dtype=np.float32) % 1000 + rank for rank in ranks)

        x = comm.empty(COUNT, "float32").upload(own)
        comm.all_reduce(x)
        assert np.array_equal(x.numpy(), expected)

        # Both calls write to other arrays, and run in order on one stream.
        x.upload(own)
        largest, average = comm.empty(COUNT, "float32"), comm.empty(COUNT, "float32")
        stream = comm.runtime.create_stream()
        comm.all_reduce(x, "max", out=largest, stream=stream)
        comm.all_reduce(x, "avg", out=average, stream=stream)
        comm.synchronize(stream)
        assert np.array_equal(x.numpy(), own)
        assert np.array_equal(largest.numpy(), own - comm.rank + comm.world_size - 1)
        assert np.allclose(average.numpy(), expected / comm.world_size)

        if comm.rank == 0:
            print(f"{comm.world_size} ranks on the {comm.runtime.name} runtime, {x.nbytes} bytes of float32")
        algorithms = ["two_shot", "ring", "proxy"]
        if comm.topology.all_accessible():  # packet algorithms need peers whose memory is mapped
            algorithms += ["one_shot", "recursive_doubling", "two_shot_packets"]
        for algorithm in algorithms:
            comm.all_reduce(x.upload(own), algorithm=algorithm)
            assert np.array_equal(x.numpy(), expected), algorithm
            x.upload(0)
            began = time.perf_counter()
            for _ in range(REPEATS):
                comm.all_reduce(x, algorithm=algorithm, stream=stream)
            comm.synchronize(stream)
            seconds = (time.perf_counter() - began) / REPEATS
            if comm.rank == 0:
                print(f"  {algorithm:18s} {seconds * 1e6:9.1f} us")
        stream.close()
        if comm.rank == 0:
            print("OK: sum, max and avg are right on all ranks, and so is the sum by every algorithm")


if __name__ == "__main__":
    main()
