"""CUDA graphs that the driver launches, and collective calls that are captured once and replayed on new values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from proxyccl import Communicator, Stream
from support.cases.reference import Call, poison


def checked(result: tuple[Any, ...]) -> Any:
    """Asserts that a call of the driver's binding succeeded, and returns its result without the status."""
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


class Graph:
    """A CUDA graph of the work that `issue` queues on a stream, to be launched repeatedly on that stream."""

    def __init__(self, stream: Stream, issue: Callable[[], None]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._stream = driver.CUstream(stream.handle)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            issue()
        finally:
            graph = checked(driver.cuStreamEndCapture(self._stream))
        self._executable = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))

    def launch(self) -> None:
        checked(self._driver.cuGraphLaunch(self._executable, self._stream))


class Replayed:
    """A collective call whose arrays stay alive, so that a graph can replay the call.

    Call `issue` once outside a capture, because a first call allocates memory, then inside a capture. Then for each
    replay call `load`, launch the graph, synchronise and call `check`.
    """

    def __init__(self, comm: Communicator, call: Call, stream: Stream) -> None:
        self._comm, self._call, self._stream = comm, call, stream
        size_in, size_out = call.sizes(comm.world_size)
        self._x = comm.empty(size_in, call.dtype)
        # If sizes differ, input and output are two arrays, because tests without graphs cover such calls in place.
        self._out = self._x if call.in_place and size_in == size_out else comm.empty(size_out, call.dtype)
        self.load(call.seed)

    def issue(self) -> None:
        self._call.issue(self._comm, self._x, None if self._out is self._x else self._out, self._stream)

    def load(self, seed: int) -> None:
        """Writes new input values and, if the call is not in place, poisons the output array."""
        self._call = replace(self._call, seed=seed)
        if self._out is not self._x:
            self._out.upload(poison(self._out.size, self._out.dtype.numpy()))
        self._x.upload(self._call.input(self._comm.rank, self._comm.world_size))

    def check(self) -> None:
        """Raises AssertionError unless the result is right for the values that were loaded."""
        self._call.check(self._out.numpy(), self._comm.rank, self._comm.world_size)

    @property
    def nbytes(self) -> int:
        """The size of this rank's input in bytes."""
        return self._x.nbytes
