"""Two ends of a staged connection in this process, each with its own proxy service and wire (wires.py)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from proxyccl import Array, ProxyService, Runtime
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.device._native import lib as native
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.ffi_types import fill
from proxyccl.device.runtime import DriverCalls, PinnedMemory
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.registrations import RemoteWriteTargets
from proxyccl.proxy.transports.staged_connection import StagedOptions, StagedWire, staged_area_bytes
from proxyccl.proxy.trigger import Operation
from support.devices import rank_runtime
from support.fakes.verbs import OwnTriggers, Producer
from support.fakes.wires import FakeWire, VerbsWire
from support.running import TIMEOUT, wait_for


def seen_as(memory: PinnedMemory, kind: type[np.generic]) -> NDArray[Any]:
    """Returns pinned memory as an array."""
    raw = (ctypes.c_char * memory.nbytes).from_address(memory.host_ptr)
    return np.frombuffer(raw, kind)


class OtherCalls:
    """A runtime that replaces some of the engine's driver calls."""

    def __init__(self, runtime: Runtime, **calls: int) -> None:
        self._runtime = runtime
        self.calls: DriverCalls = replace(runtime.calls, **calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class End(OwnTriggers):
    """One end of the connection, with source memory for its puts, and destination memory for the other end's puts.

    Args:
        number: 0 or 1; end n is rank 7 + n.
        nbytes: size of each of the two memories.
        channels: number of channels to the other end.
        ring_bytes: size of the rings in the staging area.
        chunk_bytes: maximum size of a staged piece of a put, in bytes.
        depth: depth of the wire's queues.
        max_message: maximum size of a request of the wire, in bytes.
        wire: makes a wire from its depth and max_message.
        runtime: makes memory and copies; None for a new runtime on the tests' device.
        calls: replacements of the engine's driver calls.
        service: options of the service.
        credits_tell: see `StagedOptions`.
        wires: number of wires.

    Attributes:
        devices: the wires' devices.
        device: the first wire's device.
    """

    def __init__(
        self,
        number: int,
        nbytes: int,
        *,
        channels: int = 1,
        ring_bytes: int = 4096,
        chunk_bytes: int = 1024,
        depth: int = 64,
        max_message: int = 4096,
        wire: Callable[[int, int], FakeWire] = VerbsWire,
        runtime: Runtime | None = None,
        calls: dict[str, int] | None = None,
        service: dict[str, Any] | None = None,
        credits_tell: bool = False,
        wires: int = 1,
    ) -> None:
        self.rank, self.credits_tell = 7 + number, credits_tell
        self.runtime = OtherCalls(runtime or rank_runtime(0), **(calls or {}))
        self.wires = [wire(depth, max_message) for _ in range(wires)]
        self.devices = [each.device for each in self.wires]
        self.device = self.devices[0]
        self.failures: list[ProxyFailure] = []
        self.segment = create_segment(self.runtime, 0, TIMEOUT)  # type: ignore[arg-type]
        self.word_memory = self.runtime.allocate_pinned(8 * channels)
        self.words = seen_as(self.word_memory, np.uint64)
        self.service = ProxyService(
            self.runtime,  # type: ignore[arg-type]
            self.segment.host_pointer,
            self.segment.memory,
            shared_offset=ControlSegment.service_offset,
            semaphores_offset=self.word_memory.host_ptr - self.segment.memory.host_ptr,
            on_failure=self.failures.append,
            **(service or {}),
        )
        self.producer = Producer(self.service)
        self.source = self._array(np.random.default_rng(number).integers(0, 256, nbytes, np.uint8))
        self.destination = self._array(np.zeros(nbytes, np.uint8))
        self.area = self.runtime.allocate_pinned(staged_area_bytes(ring_bytes))
        self.write_targets = RemoteWriteTargets()
        self.key = self.write_targets.add(self.destination.ptr, nbytes)
        self._ring_bytes, self._chunk_bytes = ring_bytes, chunk_bytes
        self.channels: list[int] = []

    def _array(self, values: NDArray[np.uint8]) -> Array:
        return Array(
            self.runtime,  # type: ignore[arg-type]
            self.runtime.allocate(max(1, values.nbytes)),
            values.shape,
            as_dtype("uint8"),
        ).upload(values)

    def options(self, other: End, *, wires: int = 1, link: dict[str, Any] | None = None, **wrong: Any) -> StagedOptions:
        """Returns the options of the connection to the other end.

        Args:
            other: the other end.
            wires: how many times the options list each wire.
            link: changed fields in the options of the first wire's transport.
            wrong: changed fields in the connection's options, or in its first `StagedWire`.
        """
        named = [
            StagedWire(wire.options(), [wire.area_key], other.area.host_ptr, [wire.peer_key], number)
            for number, wire in enumerate(self.wires)
        ]
        of_wire = {name: wrong.pop(name) for name in [*wrong] if hasattr(named[0], name)}
        named[0] = replace(named[0], **of_wire)
        fill(named[0].options, **(link or {}))
        fields = {
            "credits_tell": self.credits_tell,
            "area": self.area.host_ptr,
            "device_area": self.area.ptr,
            "ring_bytes": self._ring_bytes,
            "chunk_bytes": self._chunk_bytes,
            "write_targets": self.write_targets.table,
            "signals": self.word_memory.host_ptr,
            "signals_bytes": self.words.nbytes,
        }
        return StagedOptions.of(named * wires, len(self.wires), **{**fields, **wrong})

    def connect(self, other: End) -> None:
        """Connects this end to the other end. The other end must also be connected to this one."""
        for wire in self.wires:
            wire.register(seen_as(self.area, np.uint8), seen_as(other.area, np.uint8))
        self.connection = self.service.connect(self.wires[0].transport, self.options(other), peer=other.rank)
        self.source_id = self.service.add_memory(self.source.ptr, self.source.nbytes)
        self.destination_id = self.service.add_memory(other.destination.ptr, other.destination.nbytes, [other.key])
        for i in range(len(self.words)):
            channel = self.service.reserve_channel(self.connection)
            self.service.set_channel(channel, self.connection, other.word_memory.host_ptr + 8 * i)
            self.channels.append(channel)

    def push(self, operation: Operation, size: int = 0, *, count: int = 1, **where: Any) -> int:
        """Pushes triggers; see `OwnTriggers.trigger`. Returns the ticket of the last trigger."""
        return self.producer.push(self.trigger(operation, size, **where), count)

    def taken(self, channel: int = 0) -> int:
        """Returns the number of triggers taken out of a channel's ring so far."""
        return self.producer.taken(self.channels[channel])

    def fails(self) -> ProxyFailure:
        """Waits until this end's proxy has failed, and returns the failure."""
        wait_for(lambda: bool(self.failures), f"a failure of rank {self.rank}'s proxy")
        return self.failures[0]

    def abort(self) -> None:
        """Sets this end's abort word, so that its workers return even if requests are outstanding."""
        if not self.area.closed:
            self.segment.raise_abort(ErrorRecord(native.PROXYCCL_ERROR_LOCAL, 0))

    def close(self) -> None:
        """Closes the service, asserts that it ends in time, and frees the memory."""
        assert self.service.close(TIMEOUT), "the proxy does not end"
        self.area.close()
        self.segment.close()


class Ends:
    """Two connected ends. Leaving the `with` block aborts both ends, and asserts that no request violated a device's
    limit.

    Args:
        nbytes: size of each end's memories.
        options: options of both ends.
        first: further options of the first end.
        second: further options of the second end.
    """

    def __init__(
        self,
        nbytes: int = 4096,
        *,
        first: dict[str, Any] | None = None,
        second: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.ends = [End(number, nbytes, **{**options, **(own or {})}) for number, own in enumerate((first, second))]
        for number, end in enumerate(self.ends):
            end.connect(self.ends[1 - number])

    def __enter__(self) -> Ends:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self.ends:
            end.abort()
        for end in self.ends:
            end.close()
        for end in self.ends:
            for device in end.devices:
                device.__exit__(kind, error, trace)

    def __iter__(self) -> Any:
        return iter(self.ends)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds, and asserts that no proxy has failed."""
        wait_for(lambda: condition() or any(end.failures for end in self.ends), what)
        assert not any(end.failures for end in self.ends), [end.failures for end in self.ends]

    def flush(self, end: End, channel: int = 0) -> None:
        """Flushes a channel, and waits until the flush is complete."""
        ticket = end.push(Operation.FLUSH, channel=channel)
        self.wait(lambda: end.flushed(channel) > ticket, "a flush")

    def let_poll(self, end: End) -> None:
        """Waits until an end's worker has polled its device a few more times. The worker polls only while a request is
        outstanding.
        """
        polls = end.device.counts.polls
        self.wait(lambda: end.device.counts.polls >= polls + 5, "polls")


COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
EVENT_QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
WRITE64 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint)
WRITE32 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint)
EVENT_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_NOT_READY = 600


class LateStreams:
    """Driver calls that delay the work of streams: queued work is executed only by a query of an event, which executes
    a few items of the event's stream. So one stream can overtake another, as on a GPU.

    Attributes:
        calls: addresses of the driver calls, by name, to pass to `End`.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._work: dict[int, list[Callable[[], object]]] = {}  # by stream
        self._done: dict[int, int] = {}
        self._events: dict[int, tuple[int, int]] = {}  # event: (stream, number of items queued before the event)
        self._kept = (
            COPY(self._copy),
            WRITE64(self._write64),
            WRITE32(self._write32),
            EVENT_RECORD(self._record),
            EVENT_QUERY(self._query),
        )
        names = ("copy", "write64", "write32", "event_record", "event_query")
        self.calls = {
            name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in zip(names, self._kept, strict=True)
        }

    def _add(self, stream: int, work: Callable[[], object]) -> int:
        self._work.setdefault(stream, []).append(work)
        return 0

    def _copy(self, dst: int, src: int, nbytes: int, stream: int) -> int:
        return self._add(stream, lambda: ctypes.memmove(dst, src, nbytes))

    def _write64(self, stream: int, address: int, value: int, _: int) -> int:
        return self._add(stream, lambda: ctypes.memmove(address, value.to_bytes(8, "little"), 8))

    def _write32(self, stream: int, address: int, value: int, _: int) -> int:
        return self._add(stream, lambda: ctypes.memmove(address, value.to_bytes(4, "little"), 4))

    def _record(self, event: int, stream: int) -> int:
        self._events[event] = stream, len(self._work.get(stream, []))
        return 0

    def _query(self, event: int) -> int:
        stream, behind = self._events[event]
        for _ in range(self._random.randrange(3)):
            done = self._done.get(stream, 0)
            if done < len(self._work[stream]):
                self._work[stream][done]()
                self._done[stream] = done + 1
        return 0 if self._done.get(stream, 0) >= behind else _NOT_READY
