"""Shared memory in huge pages: where it lies, and what moves to them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.device._native import ffi, lib
from proxyccl.device.host import HostRuntime
from support.huge_pages import HUGE_PAGE, bytes_in_huge_pages, needs_huge_pages
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="the host runtime's memory")

MIB = 1 << 20


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("nbytes", [HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE - 4096])
def test_large_memory_begins_at_a_huge_page(nbytes: int) -> None:
    runtime = HostRuntime()
    memories = [runtime.allocate(nbytes) for _ in range(3)]
    assert [memory.ptr % HUGE_PAGE for memory in memories] == [0, 0, 0]


def test_no_address_space_is_kept() -> None:
    runtime, before = HostRuntime(), address_space()
    for _ in range(100):
        runtime.allocate(HUGE_PAGE + 4096).close()
    assert address_space() - before < 50 * MIB  # 100 times the room to align it would be 200 MiB


@needs_huge_pages
def test_the_whole_huge_pages_of_a_range_are_moved() -> None:
    runtime = HostRuntime()
    memory = runtime.allocate(8 * MIB)
    contents = np.arange(MIB, dtype=np.int64)
    runtime.copy(memory.ptr, contents.ctypes.data, 8 * MIB)
    runtime.expect_reuse(memory.ptr + MIB, 5 * MIB)
    assert bytes_in_huge_pages(memory.ptr) == 2 * HUGE_PAGE
    runtime.expect_reuse(memory.ptr, 9 * MIB)  # no farther than the memory goes
    assert bytes_in_huge_pages(memory.ptr) == 4 * HUGE_PAGE
    np.testing.assert_array_equal(
        np.frombuffer(ffi.buffer(ffi.cast("char *", memory.ptr), 8 * MIB), np.int64), contents
    )


@needs_huge_pages
def test_a_peer_maps_huge_pages_too() -> None:
    runtime = HostRuntime()
    memory = runtime.allocate(4 * MIB)
    address = ffi.new("void **")
    assert lib.proxyccl_host_memory_map(address, memory.descriptor, memory.nbytes) == 0
    theirs = int(ffi.cast("uintptr_t", address[0]))
    try:
        ctypes.memset(theirs, 7, memory.nbytes)
        runtime.expect_reuse(memory.ptr, memory.nbytes)
        ctypes.memset(theirs, 8, memory.nbytes)
        assert bytes_in_huge_pages(theirs) == memory.nbytes
        assert ctypes.string_at(memory.ptr, memory.nbytes) == bytes([8]) * memory.nbytes
    finally:
        lib.proxyccl_host_memory_unmap(address[0], memory.nbytes)


def test_memory_that_was_not_used_or_is_another_stays_as_it_is() -> None:
    runtime = HostRuntime()
    memory, private = runtime.allocate(4 * MIB), np.ones(4 * MIB, np.uint8)
    runtime.expect_reuse(memory.ptr, memory.nbytes)
    assert bytes_in_huge_pages(memory.ptr) == 0
    runtime.expect_reuse(private.ctypes.data, private.nbytes)
    runtime.expect_reuse(0, 4 * MIB)
    assert private.all()


@needs_huge_pages
def test_arrays_that_a_collective_uses_again_are_moved() -> None:
    """Not before: to move pages takes as long as to touch them first, in vain if they are never used again."""

    def body(comm: Communicator) -> None:
        x, out = comm.empty(MIB).upload(comm.rank + 1), comm.empty(MIB)
        found = []
        for _ in range(4):  # peers may not have mapped the arrays at the first
            comm.all_reduce(x, out=out)
            found.append([bytes_in_huge_pages(array.ptr) for array in (x, out)])
        assert (found[0], found[-1]) == ([0, 0], [4 * MIB, 4 * MIB])
        assert (out.numpy() == 3).all()

    run_ranks(2, body)
