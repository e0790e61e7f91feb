"""Several arrays that another library's allocator places in one allocation."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import pytest

from proxyccl.device.memory import memory_pool
from proxyccl.device.memory.places import ALLOCATE, FREE, Places
from proxyccl.device.runtime import Runtime
from support.fakes.torch import PluggableAllocator

pytestmark = pytest.mark.hip

NBYTES, FIRST = 2 << 20, 512

_allocator = PluggableAllocator(memory_pool.library(), ALLOCATE, FREE)


def allocate(nbytes: int = NBYTES) -> int | None:
    ptr: int | None = _allocator.allocate(nbytes, 0, None)
    return ptr


def free(ptr: int | None) -> None:
    _allocator.free(ptr, NBYTES, 0, None)


@contextlib.contextmanager
def chosen(places: Places) -> Iterator[None]:
    places.choose()
    try:
        yield
    finally:
        places.leave()


@pytest.fixture
def places(runtime: Runtime) -> Iterator[Places]:
    opened = Places(runtime, runtime.allocate(FIRST + 2 * NBYTES), FIRST, NBYTES, 2)
    yield opened
    opened.close()


def test_allocations_come_from_the_chosen_places(places: Places) -> None:
    with chosen(places):
        taken = [allocate(), allocate(NBYTES // 2)]
        marks = [allocate(), allocate()]
        assert not allocate(NBYTES + 1)
    assert [places.number_at(ptr) for ptr in taken] == [0, 1]
    assert [places.number_at(ptr) for ptr in marks] == [None, None]
    assert len({*taken, *marks}) == 4, "torch counts two allocations at one address as one"
    assert places.number_at(taken[0] + 16) is None, "no place begins there"
    assert not allocate(), "the library no longer chooses places"
    for ptr in (*taken, *marks):
        free(ptr)


def test_a_freed_place_is_allocated_again_when_the_device_was_waited_for(places: Places) -> None:
    with chosen(places):
        first, second = allocate(), allocate()
        free(second)
        assert places.number_at(allocate()) is None, "kernels may still use the second place"
    with chosen(places):
        assert allocate() == second
    for ptr in (first, second):
        free(ptr)


def test_a_place_that_is_freed_during_the_wait_stays_idle(
    places: Places, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chosen(places):
        first, second = allocate(), allocate()
    free(first)
    synchronize = runtime.synchronize

    def free_meanwhile() -> None:
        synchronize()
        free(second)

    monkeypatch.setattr(runtime, "synchronize", free_meanwhile)
    with chosen(places):
        assert allocate() == first
        assert places.number_at(allocate()) is None
    free(first)


def test_a_thread_chooses_for_itself(places: Places) -> None:
    found: list[int | None] = []
    with chosen(places):
        thread = threading.Thread(target=lambda: found.append(allocate()))
        thread.start()
        thread.join()
    assert found == [None]


def test_places_keep_their_memory_until_they_are_freed(runtime: Runtime) -> None:
    memory = runtime.allocate(2 * NBYTES)
    ptr = memory.ptr
    closed = Places(runtime, memory, 0, NBYTES, 2)
    with chosen(closed):
        taken = allocate()
    closed.close()
    kept = weakref.ref(closed)
    del memory, closed
    assert kept() is not None
    assert taken == ptr
    runtime.fill(ptr, 7, NBYTES)
    free(taken)
    Places(runtime, runtime.allocate(NBYTES), 0, NBYTES, 1).close()
    assert kept() is None
