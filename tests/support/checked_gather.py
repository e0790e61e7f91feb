"""Collectives by proxy whose results are checked byte for byte, for tests in which adapters fail."""

from __future__ import annotations

import numpy as np

from proxyccl import Communicator


class CheckedGather:
    """Gathers a long array of two ranks by proxy, with other bytes in each call, and checks every byte. A signal that
    came too early or twice would let a later call read old bytes.
    """

    NBYTES = 300_003
    _SHIFTS = 4096

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._x, self._out = comm.empty((self.NBYTES,), "uint8"), comm.empty((2 * self.NBYTES,), "uint8")
        self._bytes = [
            np.random.default_rng(rank).integers(0, 256, self.NBYTES + self._SHIFTS, np.uint8) for rank in range(2)
        ]
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        shift = self._calls * 17 % self._SHIFTS
        expected = [each[shift : shift + self.NBYTES] for each in self._bytes]
        np.asarray(self._x)[:] = expected[self._comm.rank]
        self._comm.all_gather(self._x, out=self._out, algorithm="proxy")
        self._comm.synchronize()
        for got, sent in zip(np.split(np.asarray(self._out), 2), expected, strict=True):
            assert (got == sent).all(), self._calls
