"""Makes and checks collectives by proxy on slices of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from proxyccl import Communicator
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.arrays.view import ArrayView

COLLECTIVES = ("all_gather", "all_to_all", "broadcast")
SLACK = 200
POISON = 0xA5

Kind = Literal["registered", "empty", "private"]
KINDS: tuple[Kind, ...] = ("registered", "empty", "private")


def values(seed: int, rank: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng((seed, rank)).integers(0, 256, nbytes, np.uint8)


def allocate(comm: Communicator, nbytes: int, kind: Kind) -> ArrayView:
    """Returns a new array of bytes. If `kind` is "private", peers do not know about the array."""
    if kind == "private":
        memory = comm.runtime.allocate(nbytes)
        return ArrayView(
            memory.ptr, (nbytes,), as_dtype("uint8"), (comm.runtime.name, comm.runtime.device), True, memory
        )
    array = comm.empty(nbytes, "uint8")
    if kind == "registered":
        comm.register(array)
    return array.view()


class SpanCalls:
    """Two arrays per rank, and calls on slices of these arrays at offsets that differ between ranks.

    Args:
        comm: the communicator; all its ranks must construct this object.
        most: number of bytes of the longest input or output.
        kinds: kind of the input array, and kind of the output array; calls in place use the output array.
        allocate: makes an array of a kind.
    """

    def __init__(
        self,
        comm: Communicator,
        most: int,
        kinds: tuple[Kind, Kind] = ("empty", "empty"),
        allocate: Callable[[Communicator, int, Kind], ArrayView] = allocate,
    ) -> None:
        self.comm = comm
        self.arrays = [allocate(comm, most + SLACK, kind) for kind in kinds]

    def span(self, number: int, offset: int, nbytes: int) -> ArrayView:
        """Returns a view of `nbytes` bytes of array `number`."""
        whole = self.arrays[number]
        assert 0 <= offset <= whole.nbytes - nbytes
        return replace(whole, ptr=whole.ptr + offset, shape=(nbytes,))

    def spans(self, collective: str, share: int, seed: int, *, in_place: bool) -> tuple[ArrayView, ArrayView]:
        """Returns the input and the output of a call on this rank. `share` is the number of bytes that one rank sends
        to one other rank.
        """
        comm = self.comm
        whole = share * comm.world_size
        size_in = whole if collective == "all_to_all" else share
        size_out = share if collective == "broadcast" else whole
        begin = (11 * comm.rank + 3 * seed) % SLACK
        out = self.span(1, begin, size_out)
        if not in_place:
            return self.span(0, (5 * comm.rank + seed) % SLACK, size_in), out
        at = comm.rank * share if collective == "all_gather" else 0
        return self.span(1, begin + at, size_in), out

    def expected(self, collective: str, share: int, seed: int, root: int) -> NDArray[np.uint8]:
        """Returns the expected output of a call on this rank."""
        comm = self.comm
        ranks = range(comm.world_size)
        if collective == "broadcast":
            return values(seed, root, share)
        if collective == "all_gather":
            return np.concatenate([values(seed, rank, share) for rank in ranks])
        own = slice(comm.rank * share, (comm.rank + 1) * share)
        return np.concatenate([values(seed, rank, share * comm.world_size)[own] for rank in ranks])

    def issue(self, collective: str, x: ArrayView, out: ArrayView, root: int = 0, stream: Any = None) -> None:
        """Makes a call."""
        options = {"root": root} if collective == "broadcast" else {}
        getattr(self.comm, collective)(x, out=out, algorithm="proxy", stream=stream, **options)

    def load(self, x: ArrayView, out: ArrayView, seed: int) -> None:
        """Writes a call's input, and poison into the rest of both arrays."""
        for array in self.arrays:
            found = np.full(array.nbytes, POISON, np.uint8)
            if array.owner is x.owner:
                at = x.ptr - array.ptr
                found[at : at + x.nbytes] = values(seed, self.comm.rank, x.nbytes)
            self.comm.runtime.copy(array.ptr, found.ctypes.data, found.nbytes)

    def read(self, number: int) -> NDArray[np.uint8]:
        found = np.empty(self.arrays[number].nbytes, np.uint8)
        self.comm.runtime.copy(found.ctypes.data, self.arrays[number].ptr, found.nbytes)
        return found

    def check(self, collective: str, share: int, x: ArrayView, out: ArrayView, seed: int, root: int = 0) -> None:
        """Raises AssertionError unless the output is right and nothing around it was touched."""
        found, begin = self.read(1), out.ptr - self.arrays[1].ptr
        end = begin + out.nbytes
        assert (found[begin:end] == self.expected(collective, share, seed, root)).all(), (collective, share, seed)
        assert (found[:begin] == POISON).all()
        assert (found[end:] == POISON).all()
        if x.owner is not out.owner:
            at = x.ptr - self.arrays[0].ptr
            assert (self.read(0)[at : at + x.nbytes] == values(seed, self.comm.rank, x.nbytes)).all()

    def run(self, collective: str, share: int, seed: int, *, in_place: bool = False, root: int = 0) -> None:
        """Writes the input of a call, makes the call, and checks its output."""
        x, out = self.spans(collective, share, seed, in_place=in_place)
        self.load(x, out, seed)
        stream = None if self.comm.runtime.name == "host" else self.comm.runtime.create_stream()
        self.issue(collective, x, out, root, stream)
        if share == 0 and in_place:
            return
        self.comm.synchronize(stream)
        self.check(collective, share, x, out, seed, root)
