"""Memory that another library allocates through C functions: segments, holds, and the identity of allocations."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.memory.memory_pool import MemoryPool, Segment
from proxyccl.device.runtime import DriverCalls, Runtime
from support.fakes.foreign_memory import ForeignMemory, allocate, free

pytestmark = pytest.mark.hip

NBYTES = 2 << 20


@pytest.fixture
def pool(runtime: Runtime) -> Iterator[MemoryPool]:
    opened = MemoryPool(runtime)
    before = opened.segments()
    yield opened
    assert opened.segments() == before, "the test has left segments"


def segment_at(pool: MemoryPool, ptr: int) -> Segment:
    (found,) = [segment for segment in pool.segments() if segment.ptr == ptr]
    return found


def write(runtime: Runtime, ptr: int, value: int, nbytes: int = NBYTES) -> None:
    runtime.fill(ptr, value, nbytes)


def read(runtime: Runtime, ptr: int, nbytes: int = NBYTES) -> set[int]:
    values = np.empty(nbytes, np.uint8)
    runtime.copy(values.ctypes.data, ptr, nbytes)
    return set(np.unique(values).tolist())


def test_segments_come_and_go_as_the_library_says(runtime: Runtime, pool: MemoryPool) -> None:
    before, seen = pool.segments(), pool.changes
    ptr = allocate(NBYTES, 0)
    assert pool.changes > seen
    (new,) = [segment for segment in pool.segments() if segment not in before]
    assert (new.ptr, new.nbytes, new.freed) == (ptr, NBYTES, False)
    write(runtime, ptr, 7)
    assert read(runtime, ptr) == {7}
    seen = pool.changes
    free(ptr, NBYTES, 0)
    assert pool.changes > seen
    assert pool.segments() == before
    assert runtime.allocations(ptr, NBYTES) == ()


def test_a_held_segment_outlives_its_freeing(runtime: Runtime, pool: MemoryPool) -> None:
    ptr = allocate(NBYTES, 0)
    write(runtime, ptr, 7)
    number = segment_at(pool, ptr).number
    first, second = pool.hold(number), pool.hold(number)
    assert first is not None
    assert second is not None
    free(ptr, NBYTES, 0)
    first.close()
    first.close()
    assert segment_at(pool, ptr).freed
    assert read(runtime, ptr) == {7}
    assert pool.hold(number) is None, "freed memory can't be held"
    second.close()
    runtime.synchronize()  # a GPU's memory is freed at the next wait for the device
    assert runtime.allocations(ptr, NBYTES) == ()


def test_a_hold_ends_with_its_last_reference(pool: MemoryPool) -> None:
    ptr = allocate(NBYTES, 0)
    hold = pool.hold(segment_at(pool, ptr).number)
    free(ptr, NBYTES, 0)
    assert hold is not None
    assert segment_at(pool, ptr).freed
    del hold
    assert not [segment for segment in pool.segments() if segment.ptr == ptr]


def test_a_segment_that_is_not_freed_outlives_its_holds(runtime: Runtime, pool: MemoryPool) -> None:
    ptr = allocate(NBYTES, 0)
    hold = pool.hold(segment_at(pool, ptr).number)
    assert hold is not None
    hold.close()
    runtime.synchronize()
    write(runtime, ptr, 3)
    assert read(runtime, ptr) == {3}
    free(ptr, NBYTES, 0)


@pytest.mark.parametrize(("nbytes", "device"), [(0, 0), (-1, 0), (NBYTES, -1), (NBYTES, 63), (NBYTES, 64)])
def test_no_memory_for_no_bytes_or_for_a_device_without_a_pool(pool: MemoryPool, nbytes: int, device: int) -> None:
    assert allocate(nbytes, device) == 0


def test_memory_that_runs_out_is_null_and_leaves_nothing(pool: MemoryPool) -> None:
    assert allocate(1 << 60, 0) == 0


def test_what_is_not_of_the_pool_is_not_freed(runtime: Runtime, pool: MemoryPool) -> None:
    memory = runtime.allocate(NBYTES)
    free(memory.ptr, NBYTES, 0)
    write(runtime, memory.ptr, 5)
    assert read(runtime, memory.ptr) == {5}


def test_threads_allocate_and_free_at_once(pool: MemoryPool) -> None:
    start = threading.Barrier(4)

    def work(_: int) -> None:
        start.wait(30)
        for _ in range(50):
            ptr = allocate(4096, 0)
            hold = pool.hold(segment_at(pool, ptr).number)
            free(ptr, 4096, 0)
            assert hold is not None
            hold.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_a_device_has_the_pool_of_one_runtime(runtime: Runtime, pool: MemoryPool) -> None:
    class Other:
        name, device = "other", runtime.device
        calls = DriverCalls(free=1, pointer_attribute=1, buffer_id=1, allocate=1)

    with pytest.raises(ArgumentError, match="device 0 can't have a memory pool of other: another runtime has it"):
        MemoryPool(Other())  # type: ignore[arg-type]


class RecordedDriver:
    """A fake driver with contexts, capture modes and flags of allocations. No other test uses this device number."""

    name, device = "recorded", 62
    OWN, BEFORE, RELAXED, STRICT, FLAGS, PTR = 111, 222, 2, 0, 3, 1 << 40

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.context, self.mode = self.BEFORE, self.STRICT
        self.refuses = self.keeps_mode = False
        self.addresses = [
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_uint)(
                self.allocate
            ),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(self.free),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))(self.current),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(self.make_current),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self.exchange),
        ]

    def noted(self, call: str, *args: int) -> None:
        self.seen.append((call, *args, self.context, self.mode))

    def allocate(self, ptr: Any, nbytes: int, flags: int) -> int:
        self.noted("allocate", nbytes, flags)
        if not self.refuses:
            ptr[0] = self.PTR
        return int(self.refuses)

    def free(self, ptr: int) -> int:
        self.noted("free", ptr)
        return 0

    def current(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def make_current(self, context: int) -> int:
        self.context = context
        return 0

    def exchange(self, mode: Any) -> int:
        if not self.keeps_mode:
            self.mode, mode[0] = mode[0], self.mode
        return int(self.keeps_mode)

    @property
    def calls(self) -> DriverCalls:
        allocate, free, current, make_current, exchange = (
            ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self.addresses
        )
        return DriverCalls(
            free=free,
            allocate_with_flags=allocate,
            flags=self.FLAGS,
            current=current,
            make_current=make_current,
            exchange_capture_mode=exchange,
            relaxed=self.RELAXED,
            context=self.OWN,
        )


recorded = RecordedDriver()  # global, because the library keeps pointers to this fake driver's functions


@pytest.mark.parametrize("before", [RecordedDriver.BEFORE, RecordedDriver.OWN, 0])
def test_the_threads_context_and_capture_mode_are_put_back(before: int) -> None:
    driver: Any = recorded
    driver.seen, driver.context, driver.refuses, driver.keeps_mode = [], before, False, False
    MemoryPool(driver)
    ptr = allocate(100, driver.device)
    assert ptr == driver.PTR
    assert (driver.context, driver.mode) == (before, driver.STRICT)
    free(ptr, 100, driver.device)
    assert (driver.context, driver.mode) == (before, driver.STRICT)
    driver.refuses = True
    assert allocate(100, driver.device) == 0
    assert (driver.context, driver.mode) == (before, driver.STRICT)
    driver.keeps_mode = True
    assert allocate(100, driver.device) == 0
    assert (driver.context, driver.mode) == (before, driver.STRICT)
    meanwhile = (driver.OWN, driver.RELAXED)
    attempt = ("allocate", 100, driver.FLAGS, *meanwhile)
    assert driver.seen == [attempt, ("free", ptr, *meanwhile), attempt]


OPEN = """
import sys
from proxyccl import open_runtime
runtime = open_runtime(local_rank=0)
memory = runtime.open(bytes.fromhex(sys.argv[1]))
runtime.fill(memory.ptr, 9, memory.nbytes)
memory.close()
"""


def test_other_processes_open_any_part_of_a_segment(runtime: Runtime, pool: MemoryPool) -> None:
    ptr = allocate(NBYTES, 0)
    write(runtime, ptr, 1)
    handle = runtime.export(ptr + 4096, 8192)
    subprocess.run([sys.executable, "-c", OPEN, handle.hex()], check=True, timeout=120)
    assert read(runtime, ptr + 4096, 8192) == {9}
    assert read(runtime, ptr, 4096) == {1}
    assert read(runtime, ptr + 3 * 4096, NBYTES - 3 * 4096) == {1}
    with pytest.raises(ArgumentError):
        runtime.export(ptr + NBYTES - 1, 2)
    free(ptr, NBYTES, 0)


def test_a_guard_holds_while_the_allocation_does(runtime: Runtime, pool: MemoryPool) -> None:
    first, second = ForeignMemory(runtime, NBYTES), ForeignMemory(runtime, NBYTES)
    known = [runtime.allocations(memory.ptr + 4096, 8192) for memory in (first, second)]
    assert all(ptr == memory.ptr + 4096 for ((ptr, *_),), memory in zip(known, (first, second), strict=True))
    guard = AllocationGuard(runtime.calls, known[0] + known[1])
    assert guard.holds
    second.close()
    assert not guard.holds
    again = second.replaced()
    assert not guard.holds, "another allocation lies at the address"
    assert AllocationGuard(runtime.calls, known[0]).holds
    first.close()
    again.close()


@pytest.mark.host_only("memory of no device is private on the host alone")
def test_private_memory_is_in_no_allocation(runtime: Runtime) -> None:
    values = np.zeros(16)
    assert runtime.allocations(values.ctypes.data, values.nbytes) == ()
