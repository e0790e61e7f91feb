"""Random work on a communicator, the same on all ranks. Every rank verifies its results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import Communicator, EPAll2AllLayer
from proxyccl.channels.expert_parallel.members import node_size
from support.device_arrays import on_host

Values = NDArray[Any]
_KERNEL = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void around(DeviceHandle<ProxyChannel>* channels, int peers, int rank, unsigned long bytes) {
  for (int i = 0; i < peers; ++i) channels[i].putWithSignal(rank * bytes, rank * bytes, bytes);
  for (int i = 0; i < peers; ++i)
    if (!channels[i].wait()) return;
  for (int i = 0; i < peers; ++i) channels[i].flush();
}
"""


class WrongResultError(Exception):
    """Raised if a result is wrong."""


def _result(comm: Communicator, array: Any) -> Values:
    """Returns the contents of an array after a call. On a GPU, waits for the call first, and raises its errors."""
    if comm.runtime.name != "host":
        comm.synchronize()
    return on_host(array)


def _require(comm: Communicator, got: Any, expected: Values, what: str) -> None:
    """Raises WrongResultError unless `got` has the expected values, in any shape."""
    values = _result(comm, got).reshape(expected.shape)
    if not np.array_equal(values, expected):
        raise WrongResultError(f"{what}: {values.ravel()[:4]} instead of {expected.ravel()[:4]}")


class Work:
    """A communicator's work.

    Args:
        comm: the ranks' communicator.
        seed: seed of the work, the same on all ranks.
    """

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm = comm
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._layer: EPAll2AllLayer | None = None
        self._channels: Any = None
        self._repeated: dict[str, tuple[Any, Values]] = {}  # collective: (input, expected result)
        self._outputs: dict[str, Any] = {}
        self._other: Communicator | None = None
        self._kinds: list[Callable[[], None]] = [
            self._all_reduce,
            self._all_gather,
            self._all_to_all,
            self._broadcast,
            self._reduce_scatter,
            self._transfers,
            self._puts,
            self._experts,
            self._part,
            self._beside,
        ]

    def step(self) -> None:
        """Does a randomly chosen piece of work. Raises the library's errors, and WrongResultError."""
        self._rng.choice(self._kinds)()

    def repeat(self) -> None:
        """Makes collectives by proxy, always on the same arrays. The first calls give schedules to the proxy. Later
        calls reuse these schedules: a write by the stream starts a schedule.
        """
        comm, size, count = self.comm, self.comm.world_size, 3000
        if not self._repeated:
            values = self._everyone(size, count)
            self._repeated = {
                "all_gather": (self._array(values[comm.rank]), values),
                "all_to_all": (self._array(values[comm.rank]), values[:, comm.rank]),
                "reduce_scatter": (self._array(values[comm.rank]), values.sum(axis=0)[comm.rank]),
            }
        for name, (x, expected) in self._repeated.items():
            out = {"out": self._outputs[name]} if name in self._outputs else {}
            self._outputs[name] = getattr(comm, name)(x, algorithm="proxy", **out)
            _require(comm, self._outputs[name], expected, name)

    def agree(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank. All ranks must call this."""
        flags = self.comm.all_reduce(self._array(np.array([int(flag)], np.int32)))
        return bool(_result(self.comm, flags)[0])

    def close(self) -> None:
        if self._layer is not None:
            self._layer.finalize()

    def _everyone(self, *shape: int) -> Values:
        """Returns random integers for every rank, small enough that float32 sums are exact."""
        return self._numbers.integers(0, 50, (self.comm.world_size, *shape)).astype(np.float32)

    def _array(self, values: Values, *, reached: bool = False) -> Any:
        """Returns a new array of these values: on the host a numpy array, unless `reached` is set; else an array from
        `Communicator.empty`.
        """
        if reached or self.comm.runtime.name != "host":
            return self.comm.empty(values.shape, values.dtype).upload(values)
        return values.copy()

    def _own(self, values: Values) -> Any:
        """Returns an array of this rank's values, sometimes in memory that peers can access."""
        return self._array(values[self.comm.rank], reached=self._rng.random() < 0.5)

    def _algorithm(self) -> str | None:
        return self._rng.choice([None, None, "proxy"])

    def _count(self) -> int:
        return self._rng.choice([1, 7, 1000, 30_000])

    def _all_reduce(self) -> None:
        values = self._everyone(self._count())
        got = self.comm.all_reduce(self._own(values), algorithm=self._algorithm())
        _require(self.comm, got, values.sum(axis=0), "all_reduce")

    def _all_gather(self) -> None:
        values = self._everyone(self._count())
        got = self.comm.all_gather(self._own(values), algorithm=self._algorithm())
        _require(self.comm, got, values, "all_gather")

    def _all_to_all(self) -> None:
        values = self._everyone(self.comm.world_size, self._count())
        got = self.comm.all_to_all(self._own(values), algorithm=self._algorithm())
        _require(self.comm, got, values[:, self.comm.rank], "all_to_all")

    def _broadcast(self) -> None:
        values, root = self._everyone(self._count()), self._rng.randrange(self.comm.world_size)
        got = self.comm.broadcast(self._own(values), root)
        _require(self.comm, got, values[root], "broadcast")

    def _reduce_scatter(self) -> None:
        values = self._everyone(self.comm.world_size, self._count())
        got = self.comm.reduce_scatter(self._own(values))
        _require(self.comm, got, values.sum(axis=0)[self.comm.rank], "reduce_scatter")

    def _transfers(self) -> None:
        size, rank = self.comm.world_size, self.comm.rank
        values = self._everyone(self._count())
        out = self._array(np.zeros(values.shape[1:], np.float32))
        with self.comm.transfers() as transfers:
            transfers.send(self._array(values[rank]), (rank + 1) % size)
            transfers.recv(out, (rank - 1) % size)
        _require(self.comm, out, values[(rank - 1) % size], "transfers")

    def _puts(self) -> None:
        size, rank, count = self.comm.world_size, self.comm.rank, 2000
        if self._channels is None:
            self._memory = self.comm.empty((size, count), "float32")
            self._channels = self.comm.proxy_channels(self._memory)
            self._kernel = self.comm.compile(_KERNEL, "around")
        values = self._everyone(count)
        own = np.zeros((size, count), np.float32)
        own[rank] = values[rank]
        self._memory.upload(own)
        self.comm.barrier()
        self._kernel(1, 1, self._channels, size - 1, rank, 4 * count)
        self.comm.synchronize()
        _require(self.comm, self._memory, values, "puts")
        self.comm.barrier()

    def _experts(self) -> None:
        comm, tokens, hidden, topk, experts = self.comm, 6, 16, 2, 2 * self.comm.world_size
        if self._layer is None:
            sizes = (tokens, hidden, topk, comm.rank, experts, node_size(comm.group), comm.world_size)
            self._layer = EPAll2AllLayer(comm, *sizes, dtype="float32")
        values = self._everyone(tokens, hidden)[comm.rank]
        ids = self._numbers.integers(0, experts, (comm.world_size, tokens, topk)).astype(np.int32)
        rows, _, desc = self._layer.dispatch(self._array(values), self._array(ids[comm.rank]))
        counts = _result(comm, desc.counts)[:, 2 * comm.rank : 2 * comm.rank + 2].sum(axis=0)
        factors = np.repeat([2.0 * comm.rank + 1, 2.0 * comm.rank + 2], counts).astype(np.float32)
        got = self._layer.combine(self._array(_result(comm, rows) * factors[:, None]), desc)
        _require(comm, got, values * (ids[comm.rank] + 1).sum(axis=1, keepdims=True).astype(np.float32), "experts")

    def _part(self) -> None:
        """Makes a call on a communicator of some of the ranks, while the other ranks continue."""
        members = sorted(self._rng.sample(range(self.comm.world_size), self._rng.randint(1, self.comm.world_size)))
        values = self._everyone(self._count())
        algorithm = self._algorithm()
        if self.comm.rank not in members:
            return
        with self.comm.split(members) as part:
            got = part.all_reduce(self._array(values[self.comm.rank]), algorithm=algorithm)
            _require(part, got, values[members].sum(axis=0), "all_reduce of a part")

    def _beside(self) -> None:
        """Makes calls on two communicators of all ranks concurrently."""
        if self._other is None:
            self._other = self.comm.split(range(self.comm.world_size))
        values = [self._everyone(self._count()) for _ in range(2)]
        algorithms = [self._algorithm() for _ in range(2)]
        streams = [comm.runtime.create_stream() for comm in (self.comm, self._other)]
        arrays = [self._own(each) for each in values]
        for comm, x, algorithm, stream in zip((self.comm, self._other), arrays, algorithms, streams, strict=True):
            comm.all_reduce(x, algorithm=algorithm, stream=stream)
        for comm, x, expected, stream in zip((self.comm, self._other), arrays, values, streams, strict=True):
            comm.synchronize(stream)
            _require(comm, x, expected.sum(axis=0), "all_reduce of two communicators")
