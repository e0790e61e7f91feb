"""Puts between pinned memories: the CPU copies short puts, the driver copies long puts, and puts keep their order."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ClosedError, Communicator, Operation, ProxyService, Trigger
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device.host import HostRuntime
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy._engine import lib
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.trigger import WINDOW_BYTES
from support.device_arrays import barrier
from support.fakes.staging import OtherCalls, seen_as
from support.fakes.verbs import Producer, value_trigger
from support.running import TIMEOUT, run_ranks, wait_for

LIMIT = int(lib.PROXYCCL_CPU_COPY_BYTES)
SIZE = LIMIT + 4096
PUT, SIGNAL, FLUSH = Operation.DATA, Operation.SIGNAL, Operation.FLUSH
ALL = PUT | SIGNAL | FLUSH
NOT_READY = 600

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void put(ProxyChannelDeviceHandle channel, uint8_t* outbox, uint32_t source, uint32_t destination,
                               int bytes, int seed) {
  for (int i = 0; i < bytes; ++i) outbox[i] = static_cast<uint8_t>(i + seed);
  channel.putWithSignal(destination, 0, source, 0, bytes);
  channel.flush();
}
extern "C" __global__ void take(ProxyChannelDeviceHandle channel, const uint8_t* inbox, int bytes, int* sum) {
  if (!channel.wait()) return;
  *sum = 0;
  for (int i = 0; i < bytes; ++i) *sum += inbox[i];
}
"""


def pattern(nbytes: int, seed: int) -> NDArray[np.uint8]:
    return (np.arange(nbytes) + seed).astype(np.uint8)


@pytest.mark.daemon
@pytest.mark.hip
def test_a_rank_puts_its_pinned_memory_to_its_peers() -> None:
    def body(comm: Communicator) -> None:
        runtime, proxy, peer = comm.runtime, comm.proxy, 1 - comm.rank
        outbox, inbox = (runtime.allocate_pinned(SIZE) for _ in range(2))
        theirs = runtime.open_pinned(comm.all_gather_bytes(inbox.handle)[peer])
        source, destination = proxy.add_pinned_memory(outbox), proxy.add_pinned_memory(theirs)
        (channel,) = comm.proxy_channels(comm.empty(16, "uint8"))
        kernels, total = comm.compile(KERNELS), comm.empty(1, "int32")
        for seed, nbytes in enumerate((1, 1000, LIMIT, SIZE, 24)):
            seen_as(inbox, np.uint8)[:] = 0
            barrier(comm)
            kernels["put"](1, 1, channel, outbox.ptr, source, destination, nbytes, seed + comm.rank)
            kernels["take"](1, 1, channel, inbox.ptr, nbytes, total)
            comm.synchronize()
            expected = pattern(nbytes, seed + peer)
            assert int(total.numpy()[0]) == int(expected.sum(dtype=np.int64))
            found = seen_as(inbox, np.uint8)
            assert np.array_equal(found[:nbytes], expected)
            assert not found[nbytes:].any()
            barrier(comm)
        for first in (source, destination):
            proxy.remove_memory(first, SIZE)
        for memory in (outbox, inbox, theirs):
            memory.close()

    run_ranks(2, body)


# -- copies by the CPU and by a fake driver ---


class FakeDriver:
    """A fake driver that queues copies and stores on one stream. A query of the stream's event executes the queued
    operations, unless `held` is set.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held = threading.Event()
        self._queue: deque[Callable[[], Any]] = deque()
        pointer, size, word, status = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int
        functions = {
            "copy": ctypes.CFUNCTYPE(status, pointer, pointer, size, pointer)(self._copy),
            "write64": ctypes.CFUNCTYPE(status, pointer, pointer, word, ctypes.c_uint)(self._write64),
            "write32": ctypes.CFUNCTYPE(status, pointer, pointer, ctypes.c_uint32, ctypes.c_uint)(self._write32),
            "event_record": ctypes.CFUNCTYPE(status, pointer, pointer)(self._event_record),
            "event_query": ctypes.CFUNCTYPE(status, pointer)(self._event_query),
        }
        self._functions = functions
        self.addresses = {name: ctypes.cast(call, pointer).value or 0 for name, call in functions.items()}

    def _copy(self, dst: int, src: int, nbytes: int, stream: int) -> int:
        self.calls.append(f"copy {nbytes}")
        self._queue.append(lambda: ctypes.memmove(dst, src, nbytes))
        return 0

    def _write64(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append("write")
        self._queue.append(lambda: setattr(ctypes.c_uint64.from_address(address), "value", value))
        return 0

    def _write32(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append("write32")
        self._queue.append(lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))
        return 0

    def _event_record(self, event: int, stream: int) -> int:
        self.calls.append("record")
        return 0

    def _event_query(self, event: int) -> int:
        if self.held.is_set():
            return NOT_READY
        while self._queue:
            self._queue.popleft()()
        return 0

    @property
    def moves(self) -> list[str]:
        return [call for call in self.calls if call != "record"]


@dataclass(frozen=True)
class TwoAddresses:
    """Pinned memory with different addresses for the device and the CPU, and different bytes at the two addresses."""

    device: SharedMemory
    host: SharedMemory
    closed: bool = False

    @property
    def ptr(self) -> int:
        return self.device.ptr

    @property
    def host_ptr(self) -> int:
        return self.host.ptr

    @property
    def nbytes(self) -> int:
        return self.host.nbytes


class Rank:
    """A service with one channel to itself, over a fake driver."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        runtime: Any = OtherCalls(HostRuntime(), **self.driver.addresses)
        self.failures: list[ProxyFailure] = []
        self._segment = create_segment(runtime, 0, TIMEOUT)
        self.service = ProxyService(
            runtime,
            self._segment.host_pointer,
            self._segment.memory,
            shared_offset=ControlSegment.service_offset,
            on_failure=self.failures.append,
        )
        connection = self.service.connect_copy()
        self._channel = self.service.reserve_channel(connection)
        self.service.set_channel(self._channel, connection, self._segment.semaphore_host(self._channel))
        self._producer = Producer(self.service)

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.held.clear()
        assert self.service.close(TIMEOUT)
        self._segment.close()

    def pinned(self, nbytes: int = SIZE, seed: int = 0) -> tuple[int, TwoAddresses]:
        """Adds pinned memory to the service. Returns the memory's id, and the memory. The bytes at the device's address
        hold the pattern of `seed`, the bytes at the CPU's address hold the pattern of `seed` + 1.
        """
        memory = TwoAddresses(SharedMemory.allocate(nbytes), SharedMemory.allocate(nbytes))
        for i, side in enumerate((memory.device, memory.host)):
            seen_as(side, np.uint8)[:SIZE] = pattern(SIZE, seed + i)
        return self.service.add_pinned_memory(memory), memory  # type: ignore[arg-type]

    def put(
        self, operation: Operation, nbytes: int, source: int, destination: int, *, at: int = 0, to: int = 0
    ) -> None:
        self._producer.push(Trigger(operation, self._channel, nbytes, source, at, destination, to))

    def push(self, operation: Operation, *, value: int, size: int, destination: int, to: int = 0) -> None:
        self._producer.push(value_trigger(operation, self._channel, value, size, destination, to))

    @property
    def signalled(self) -> int:
        return int(ctypes.c_uint64.from_address(self._segment.semaphore_host(self._channel)).value)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(lambda: condition() or bool(self.failures), what)
        assert not self.failures

    def wait_flushed(self, pushed: int) -> None:
        self.wait(lambda: self.service.flushed(self._channel) >= pushed, "a flush")


@pytest.fixture
def rank() -> Iterator[Rank]:
    with Rank() as made:
        yield made


own_proxy = pytest.mark.own_proxy(reason="its own service")


@own_proxy
@pytest.mark.parametrize("nbytes", [1, 1023, LIMIT])
def test_a_short_put_between_pinned_memories_makes_no_driver_call(rank: Rank, nbytes: int) -> None:
    source, outbox = rank.pinned(seed=10)
    destination, inbox = rank.pinned(seed=50)
    rank.put(ALL, nbytes, source, destination, at=100, to=200)
    rank.wait_flushed(1)
    assert rank.signalled == 1
    found, sent = (seen_as(memory.host, np.uint8) for memory in (inbox, outbox))
    assert np.array_equal(found[200 : 200 + nbytes], sent[100 : 100 + nbytes])
    assert np.array_equal(found[:200], pattern(200, 51))
    assert np.array_equal(found[200 + nbytes : SIZE], pattern(SIZE, 51)[200 + nbytes :])
    assert np.array_equal(seen_as(inbox.device, np.uint8)[:SIZE], pattern(SIZE, 50))
    assert not rank.driver.calls


@own_proxy
@pytest.mark.parametrize("which", ["a long put", "the source is not pinned", "the destination is not pinned"])
def test_the_driver_copies_all_else_by_the_devices_addresses(rank: Rank, which: str) -> None:
    nbytes = LIMIT + 1 if which == "a long put" else 64
    device = SharedMemory.allocate(SIZE)
    other = rank.service.add_memory(device.ptr, SIZE)
    source, outbox = rank.pinned(seed=10)
    destination, inbox = rank.pinned(seed=50)
    if which == "the source is not pinned":
        seen_as(device, np.uint8)[:] = pattern(SIZE, 10)
        source = other
    elif which == "the destination is not pinned":
        destination = other
    rank.put(ALL, nbytes, source, destination)
    rank.wait_flushed(1)
    assert rank.driver.moves == [f"copy {nbytes}", "write", "write"]
    target = device if destination == other else inbox.device
    assert np.array_equal(seen_as(target, np.uint8)[:nbytes], pattern(nbytes, 10))
    for memory, seed in ((outbox, 11), (inbox, 51)):
        assert np.array_equal(seen_as(memory.host, np.uint8)[:SIZE], pattern(SIZE, seed))


@own_proxy
def test_a_short_put_behind_an_outstanding_copy_keeps_its_place(rank: Rank) -> None:
    source, outbox = rank.pinned(seed=10)
    destination, inbox = rank.pinned(seed=50)
    rank.driver.held.set()
    rank.put(PUT, SIZE, source, destination)
    rank.put(ALL, 24, source, destination, at=64)
    expected = [f"copy {SIZE}", "copy 24", "write", "write"]
    rank.wait(lambda: rank.driver.moves == expected, "the driver has both")
    rank.wait(lambda: "record" in rank.driver.calls, "their end is asked for")
    assert rank.signalled == 0
    rank.driver.held.clear()
    rank.wait_flushed(2)
    assert rank.signalled == 1
    assert np.array_equal(seen_as(inbox.device, np.uint8)[:24], pattern(SIZE, 10)[64:88])
    assert np.array_equal(seen_as(inbox.device, np.uint8)[24:SIZE], pattern(SIZE, 10)[24:])

    assert rank.service.drain(TIMEOUT)
    before = list(rank.driver.calls)
    rank.put(ALL, 24, source, destination)
    rank.wait_flushed(3)
    assert rank.signalled == 2
    assert np.array_equal(seen_as(inbox.host, np.uint8)[:24], seen_as(outbox.host, np.uint8)[:24])
    assert rank.driver.calls == before


@own_proxy
def test_a_value_for_pinned_memory_is_stored_by_the_cpu_if_nothing_is_outstanding(rank: Rank) -> None:
    source, _ = rank.pinned(seed=10)
    destination, inbox = rank.pinned(seed=50)
    rank.push(PUT | FLUSH, value=0x1122334455667788, size=4, destination=destination, to=6)
    rank.wait_flushed(1)
    assert not rank.driver.calls
    assert seen_as(inbox.host, np.uint8)[5:11].tolist() == [56, 0x88, 0x77, 0x66, 0x55, 61]
    rank.driver.held.set()
    rank.put(PUT, SIZE, source, destination)
    rank.push(ALL, value=7, size=2, destination=destination)
    rank.wait(lambda: rank.driver.moves == [f"copy {SIZE}", "copy 2", "write", "write"], "the driver has both")
    rank.driver.held.clear()
    rank.wait_flushed(3)
    assert seen_as(inbox.device, np.uint8)[:3].tolist() == [7, 0, 12]


@own_proxy
def test_a_stream_writes_a_value_in_aligned_parts(rank: Rank) -> None:
    device = SharedMemory.allocate(SIZE)
    destination = rank.service.add_memory(device.ptr, SIZE)
    expected = bytearray(49)
    for size, to in ((8, 0), (4, 12), (2, 16), (1, 19), (8, 20), (4, 30), (8, 41)):
        value = 0x1122334455667788 & ((1 << 8 * size) - 1)
        rank.push(PUT | FLUSH if to == 41 else PUT, value=value, size=size, destination=destination, to=to)
        expected[to : to + size] = value.to_bytes(size, "little")
    rank.wait_flushed(7)
    assert rank.driver.moves == [
        *["write", "write32", "copy 2", "copy 1"],
        *["write32", "write32"],  # 8 bytes at offset 20
        *["copy 2", "copy 2"],  # 4 bytes at offset 30
        *["copy 1", "copy 2", "write32", "copy 1"],  # 8 bytes at offset 41
        "write",
    ]
    assert seen_as(device, np.uint8)[:49].tobytes() == bytes(expected)


@own_proxy
def test_the_last_window_of_a_long_memory_has_its_own_address_for_the_cpu(rank: Rank) -> None:
    source, outbox = rank.pinned(seed=10)
    destination, inbox = rank.pinned(WINDOW_BYTES + SIZE)
    rank.put(ALL, 24, source, destination + 1, to=8)
    rank.wait_flushed(1)
    found = (ctypes.c_char * 24).from_address(inbox.host_ptr + WINDOW_BYTES + 8).raw
    assert found == seen_as(outbox.host, np.uint8)[:24].tobytes()
    assert not rank.driver.calls


@own_proxy
def test_the_next_memory_of_an_id_is_not_taken_for_pinned(rank: Rank) -> None:
    source, _ = rank.pinned(seed=10)
    destination, inbox = rank.pinned(seed=50)
    rank.service.remove_memory(destination, SIZE)
    device = SharedMemory.allocate(SIZE)
    assert rank.service.add_memory(device.ptr, SIZE) == destination
    rank.put(ALL, 24, source, destination)
    rank.wait_flushed(1)
    assert rank.driver.moves == ["copy 24", "write", "write"]
    assert np.array_equal(seen_as(device, np.uint8)[:24], pattern(24, 10))
    assert np.array_equal(seen_as(inbox.host, np.uint8)[:SIZE], pattern(SIZE, 51))


@pytest.mark.daemon
@pytest.mark.hip
def test_pinned_memory_that_is_closed_is_refused() -> None:
    def body(comm: Communicator) -> None:
        memory = comm.runtime.allocate_pinned(64)
        memory.close()
        with pytest.raises(ClosedError, match="the memory is closed"):
            comm.proxy.add_pinned_memory(memory)

    run_ranks(1, body)
