"""The `Job` on the host runtime, for trying the programs without a GPU. Arrays are numpy's. No other
library is measured. The CPU's clock times bursts of calls, including the time to issue them.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from side_by_side import WAIT_TIMEOUT, Burst, Job, Peer

from proxyccl import Communicator
from proxyccl.tools.results import Fields

_NO_PEER = "it needs GPUs"
_PEERS = {
    "all_reduce": ("NCCL", "NCCL, symmetric", "torch one-shot", "torch two-shot"),
    "all_gather": ("NCCL", "NCCL, symmetric", "NCCL, copy engines"),
    "all_to_all": ("NCCL", "NCCL, symmetric", "NCCL, copy engines"),
}


class Calls(Burst):
    """A burst of calls that are made one after another."""

    def __init__(self, call: Callable[[], object], calls: int) -> None:
        self.call, self.calls = call, calls

    def queue(self) -> None:
        """Makes the calls."""
        for _ in range(self.calls):
            self.call()

    def close(self) -> None:
        """Does nothing, because the burst holds no resources."""


class Products(Burst):
    """A burst of matrix products, which numpy computes in a thread."""

    def __init__(self, size: int, calls: int) -> None:
        self.calls, self._ended = calls, 0.0
        self._a = np.ones((size, size), np.float32)
        self._out = np.empty_like(self._a)
        self._enough = threading.Event()
        self._thread: threading.Thread | None = None

    def _multiply(self) -> None:
        made = 0
        while made < self.calls or not self._enough.is_set():
            np.matmul(self._a, self._a, out=self._out)
            made += 1
        self._ended = time.perf_counter()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._multiply)
        self._thread.start()

    def queue(self) -> None:
        """Starts a thread that computes `calls` matrix products."""
        self._enough.set()
        self._start()

    def keep_on(self) -> None:
        """Starts a thread that computes matrix products until `wait` is called."""
        self._enough.clear()
        self._start()

    def wait(self) -> float:
        """Waits for the thread. Returns the time at which the last matrix product was finished."""
        assert self._thread is not None
        self._enough.set()
        self._thread.join()
        return self._ended

    def close(self) -> None:
        """Does nothing, because the burst holds only memory."""


class HostJob(Job):
    """A `Job` on the host runtime."""

    dtypes = ("float32", "float16")
    device = "cpu"
    timing = "bursts of calls by the CPU's clock, time of one call"

    def __init__(self, seconds: float, *, growth_limit: float = 36.0, nodes: int | None = None) -> None:
        super().__init__(seconds, growth_limit=growth_limit, nodes=nodes)
        self.comm = Communicator.from_mpi(runtime="host", timeout=WAIT_TIMEOUT, **self.placement())
        self.handle = self.comm.runtime.create_stream()

    def empty(self, count: int, dtype: str) -> Any:
        """Returns an array of numpy's own memory."""
        return np.empty(count, dtype)

    def registered(self, count: int, dtype: str) -> Any:
        """Returns an array on memory of `Communicator.empty`."""
        array = self.comm.empty(count, dtype)
        self.comm.register(array)
        return np.asarray(array)

    def random(self, count: int, dtype: str, seed: int) -> Any:
        """Returns whole numbers from -8 to 8."""
        return np.random.default_rng(seed).integers(-8, 9, count, np.int8).astype(dtype)

    def poison(self, x: Any) -> None:
        x.view(np.uint8)[:] = 0xA5

    def peers(self, collective: str, count: int, dtype: str) -> list[Peer]:
        """Returns gloo between rehearsed nodes if torch is installed. Otherwise returns the libraries without calls,
        each with the reason why it is not measured.
        """
        if self.nodes is not None and importlib.util.find_spec("torch") is not None:
            from torch_peer import join_gloo, torch_peer

            join_gloo(self.world)
            return [torch_peer("gloo", collective)]
        return [Peer(name, missing=_NO_PEER) for name in _PEERS[collective]]

    def peer_versions(self) -> Fields:
        """Returns no versions, because no other library is measured on the host runtime."""
        return {}

    def current(self) -> AbstractContextManager[object]:
        """Returns a context that does nothing, because numpy does not have streams."""
        return nullcontext()

    def synchronize(self) -> None:
        self.handle.synchronize()
        self.comm.check()

    def time_now(self, call: Callable[[], object], calls: int) -> float:
        """Times the calls as a burst."""
        return self.time_burst(Calls(call, calls))[0]

    def burst(self, call: Callable[[], object], calls: int) -> Burst:
        """Returns a burst of the calls."""
        return Calls(call, calls)

    def time_burst(self, timed: Burst, *, beside: Burst | None = None, beside_bursts: int = 0) -> tuple[float, bool]:
        """Times the burst by the CPU's clock, after a barrier of the ranks. Matrix products run concurrently until the
        burst has ended.
        """
        self.synchronize()
        self.world.Barrier()
        if isinstance(beside, Products):
            beside.keep_on()
        elif beside is not None:
            for _ in range(beside_bursts):
                beside.queue()
        start = time.perf_counter()
        timed.queue()
        self.synchronize()
        stream_ended = time.perf_counter()
        ended, beside_ended = (
            burst.wait() if isinstance(burst, Products) else stream_ended for burst in (timed, beside)
        )
        return (ended - start) * 1e6 / timed.calls, beside_ended >= ended

    def product(self, size: int, calls: int) -> Burst:
        """Returns a burst of products of float32 matrices, which a thread computes."""
        return Products(size, calls)
