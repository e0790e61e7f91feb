"""A proxy that writes into memory by RDMA, for `rdma_writes.py` and `fabric_writes.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import bare_loops

from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device.errors import ProxyCCLError, WaitTimeoutError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.trigger import Operation, Trigger

ffi = _engine.ffi

TIMEOUT = 60.0
"""Longest wait, in seconds."""

FIFO_SIZE = 8192


@dataclass(frozen=True)
class Place:
    """Source or destination of the writes: the address that the transport uses, the size and the key."""

    address: int
    nbytes: int
    key: int


class ProxiedWrites:
    """A proxy with one channel, which writes through a transport to the destination memory. The source and the
    destination are in the same process.

    Args:
        runtime: the runtime of the proxy.
        transport: the transport's name.
        options: the transport's options.
        source: the memory to read.
        destination: the memory to write.
        look: seconds between two reads of the flush word.
        fifo_size: slots of the ring.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: str,
        options: Any,
        source: Place,
        destination: Place,
        *,
        look: float,
        fifo_size: int = FIFO_SIZE,
    ) -> None:
        self._look = look
        self._segment = create_segment(runtime, 0, TIMEOUT)
        self._failures: list[ProxyFailure] = []
        self._service = service = ProxyService(
            runtime,
            self._segment.host_pointer,
            self._segment.memory,
            shared_offset=ControlSegment.service_offset,
            fifo_size=fifo_size,
            on_failure=self._failures.append,
        )
        connection = service.connect(transport, options)
        self._channel = service.reserve_channel(connection)
        service.set_channel(self._channel, connection, destination.address)
        self._source = service.add_memory(source.address, source.nbytes, [source.key])
        self._destination = service.add_remote_memory(destination.address, destination.nbytes, [destination.key])
        self._fifo = service.fifo_for(self._channel)
        self._flushed = ffi.cast("uint64_t *", service.flushed_pointer(self._channel))
        self._pushed = 0

    def __enter__(self) -> ProxiedWrites:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.close()
        self._segment.close()

    def _trigger(self, operation: Operation, nbytes: int) -> tuple[int, int]:
        return Trigger(operation, self._channel, nbytes, self._source, 0, self._destination, 0).encode()

    def __call__(self, nbytes: int, count: int) -> float:
        """Makes `count` writes of `nbytes` bytes. Returns the seconds from the first push until the flush after the
        last write.
        """
        parts = ((Operation.DATA, count - 1), (Operation.DATA | Operation.FLUSH, 1))
        triggers = [(self._trigger(operation, nbytes), pushes) for operation, pushes in parts]
        start = time.perf_counter()
        for trigger, pushes in triggers:
            self._pushed += bare_loops.produce(self._fifo, self._pushed, trigger, pushes, TIMEOUT)
        while self._flushed[0] < self._pushed:
            if self._failures:
                raise ProxyCCLError(f"the proxy failed: {self._failures[0].reason}")
            if time.perf_counter() - start > TIMEOUT:
                raise WaitTimeoutError(f"{count} writes of {nbytes} bytes were not complete in time")
            time.sleep(self._look)
        return time.perf_counter() - start
