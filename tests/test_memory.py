"""Registered memory: exchange, ids, what can't be shared, and handles that are no handles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks

from proxyccl import ArgumentError, ClosedError, Communicator, ResourceError
from proxyccl.channels.memory import HandleCache
from proxyccl.device.host import HostRuntime


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as group:
        yield group


def test_ranks_may_register_different_sizes(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(100 * (comm.rank + 1), "uint8"))
        assert memory.nbytes == 100 * (comm.rank + 1)
        assert memory.peer_nbytes(1 - comm.rank) == 100 * (2 - comm.rank)
        assert "bytes" in repr(memory)
        assert comm.register(memory) is memory

    ranks.run(body)


def test_a_view_into_an_array_is_registered_where_it_lies(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(1000, "int32").fill(comm.rank)
        part = np.asarray(array)[100:200]
        memory = comm.register(part)
        assert memory.ptr == array.ptr + 400
        peer = np.ctypeslib.as_array(  # what the peer's address holds, seen from here
            (np.ctypeslib.ctypes.c_int32 * 100).from_address(memory.peer_ptr(1 - comm.rank))
        )
        assert (peer == 1 - comm.rank).all()
        comm.barrier()

    ranks.run(body)


def test_private_memory_is_refused_by_name_where_a_peer_wants_it(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(np.ones(16))
        assert memory.peer_ptr(comm.rank) == memory.ptr
        assert memory.peer_id(comm.rank) == memory.id
        with pytest.raises(ArgumentError, match=r"private to its process; allocate with Communicator.empty"):
            memory.peer_ptr(1 - comm.rank)
        with pytest.raises(ArgumentError, match="memory"):
            memory.peer_id(1 - comm.rank)

    ranks.run(body)


def test_empty_memory_has_nothing_to_share(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(0))
        assert memory.nbytes == 0
        with pytest.raises(ArgumentError, match="it is empty"):
            memory.peer_ptr(1 - comm.rank)

    ranks.run(body)


def test_closed_memory_is_refused(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(16))
        first = memory.id
        memory.peer_id(1 - comm.rank)
        comm.barrier()
        memory.close()
        memory.close()
        for use in (lambda: memory.id, lambda: memory.device_pointer, lambda: memory.peer_ptr(1 - comm.rank)):
            with pytest.raises(ClosedError):
                use()
        again = comm.register(comm.empty(16))
        assert again.id == first

    ranks.run(body)


def test_a_memory_longer_than_4_gib_takes_consecutive_ids(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        before = comm.register(comm.empty(16))
        large = comm.register(comm.empty((8 << 30) + 1, "uint8"))
        after = comm.register(comm.empty(16))
        first = before.id  # ids are taken when they are first asked for
        assert (large.id, after.id) == (first + 1, first + 4)
        large.close()
        small = [comm.register(comm.empty(16)) for _ in range(4)]
        assert [memory.id for memory in small] == [first + 1, first + 2, first + 3, first + 5]
        for memory in (before, after, *small):
            memory.close()

    ranks.run(body)


def test_ids_that_are_free_but_not_consecutive_do_not_do(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        service, base = comm.proxy, comm.empty(16).ptr
        ids = [service.add_memory(base, 16) for _ in range(512)]
        for first in ids[::2]:
            service.remove_memory(first, 16)
        with pytest.raises(ResourceError, match="2 consecutive"):
            service.add_memory(base, 5 << 30)
        for first in ids[1::2]:
            service.remove_memory(first, 16)
        assert service.add_memory(base, 5 << 30) == ids[0]
        service.remove_memory(ids[0], 5 << 30)

    with Ranks(1) as one:
        one.run(body)
    assert ranks.world_size == 2


# -- handles ---

RUNTIME = HostRuntime()
MEMORY = RUNTIME.allocate(8192)
HANDLE = RUNTIME.export(MEMORY.ptr + 100, 200)


def test_an_exported_range_is_opened_where_it_lies() -> None:
    opened = RUNTIME.open(HANDLE)
    assert opened.nbytes == 200
    RUNTIME.fill(MEMORY.ptr + 100, 7, 200)
    assert bytes((np.ctypeslib.ctypes.c_uint8 * 200).from_address(opened.ptr)) == b"\7" * 200
    opened.close()
    opened.close()
    assert opened.closed
    assert not MEMORY.closed


@given(st.binary(max_size=128))
def test_foreign_bytes_are_no_handle(data: bytes) -> None:
    with pytest.raises(ArgumentError, match="handle"):
        RUNTIME.open(data)


@given(st.integers(0, len(HANDLE) - 1))
def test_a_truncated_handle_is_refused(length: int) -> None:
    with pytest.raises(ArgumentError, match="handle"):
        RUNTIME.open(HANDLE[:length])


@settings(deadline=None)
@given(st.integers(0, len(HANDLE) - 1), st.integers(1, 255))
def test_a_damaged_handle_is_refused_or_names_a_part_of_the_same_memory(position: int, change: int) -> None:
    damaged = bytearray(HANDLE)
    damaged[position] ^= change
    with contextlib.suppress(ArgumentError):
        opened = RUNTIME.open(bytes(damaged))
        assert 0 <= opened.nbytes <= 8192
        opened.close()


def test_a_handle_of_memory_that_is_gone_is_refused() -> None:
    memory = RUNTIME.allocate(4096)
    handle = RUNTIME.export(memory.ptr, 4096)
    memory.close()
    with pytest.raises(ArgumentError, match="handle"):
        RUNTIME.open(handle)


def test_a_descriptor_that_was_used_again_for_something_else_is_refused() -> None:
    memory = RUNTIME.allocate(4096)
    handle, descriptor = RUNTIME.export(memory.ptr, 4096), memory.descriptor
    memory.close()
    other = os.open("/dev/null", os.O_RDWR)
    os.dup2(other, descriptor)
    try:
        with pytest.raises(ArgumentError, match="closed the memory"):
            RUNTIME.open(handle)
    finally:
        os.close(descriptor)
        if other != descriptor:
            os.close(other)


def test_memory_that_was_not_allocated_here_is_not_exported() -> None:
    array = np.ones(100)
    with pytest.raises(ArgumentError, match="private to its process"):
        RUNTIME.export(array.ctypes.data, array.nbytes)
    with pytest.raises(ArgumentError, match="private to its process"):
        RUNTIME.export(MEMORY.ptr + 8000, 400)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_has_a_positive_size(nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="nbytes"):
        RUNTIME.allocate(nbytes)


class Opened:
    def __init__(self) -> None:
        self.ptr, self.nbytes, self.closed = 0, 0, False

    def close(self) -> None:
        self.closed = True


def test_the_cache_maps_a_handle_once_and_keeps_what_was_used_last() -> None:
    made: dict[bytes, Opened] = {}

    def open_handle(handle: bytes) -> Opened:
        assert handle not in made or made[handle].closed
        made[handle] = Opened()
        return made[handle]

    cache = HandleCache(open_handle, keep=2)
    assert cache.acquire(b"a") is cache.acquire(b"a")
    cache.release(b"a")
    assert not made[b"a"].closed
    for handle in (b"b", b"c"):
        cache.acquire(handle)
        cache.release(handle)
    cache.release(b"a")  # idle now: b, c, a
    assert [made[handle].closed for handle in (b"a", b"b", b"c")] == [False, True, False]
    assert cache.acquire(b"c") is made[b"c"]
    cache.close()
    assert all(memory.closed for memory in made.values())
