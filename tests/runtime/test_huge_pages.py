"""Shared memory in huge pages: its alignment, and which ranges of memory are moved to huge pages."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import numpy as np
import pytest

from proxyccl import Communicator
from proxyccl.device._native import ffi, lib
from proxyccl.device.host import HostRuntime
from support.processes import address_space
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="the host runtime's memory")

MIB = 1 << 20
HUGE_PAGE = 2 << 20

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _can_be_asked_for() -> bool:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return (
        release is not None
        and tuple(map(int, release.groups())) >= (6, 1)
        and _SIZE.exists()
        and int(_SIZE.read_text()) == HUGE_PAGE
    )


needs_huge_pages = pytest.mark.skipif(
    not _can_be_asked_for(), reason="needs Linux 6.1 with transparent huge pages of 2 MiB"
)


def bytes_in_huge_pages(address: int) -> int:
    """Returns how many bytes of the mapping that begins at `address` are in huge pages."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (mapping,) = (found for found in mappings if found.startswith(f"{address:x}-"))
    mapped = re.search(r"^ShmemPmdMapped: *(\d+) kB", mapping, re.MULTILINE)
    assert mapped is not None
    return int(mapped[1]) * 1024


@pytest.mark.parametrize("nbytes", [HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE - 4096])
def test_large_memory_begins_at_a_huge_page(nbytes: int) -> None:
    runtime = HostRuntime()
    memories = [runtime.allocate(nbytes) for _ in range(3)]
    assert [memory.ptr % HUGE_PAGE for memory in memories] == [0, 0, 0]


def test_no_address_space_is_kept() -> None:
    runtime, before = HostRuntime(), address_space()
    for _ in range(100):
        runtime.allocate(HUGE_PAGE + 4096).close()
    assert address_space() - before < 50 * MIB  # leaking each allocation's alignment padding would take 200 MiB


def move(runtime: HostRuntime, ptr: int, nbytes: int) -> None:
    """Requests huge pages several times, because the kernel does not move a page while another process examines it."""
    for _ in range(5):
        runtime.expect_reuse(ptr, nbytes)


@needs_huge_pages
def test_the_whole_huge_pages_of_a_range_are_moved() -> None:
    runtime = HostRuntime()
    memory = runtime.allocate(8 * MIB)
    contents = np.arange(MIB, dtype=np.int64)
    runtime.copy(memory.ptr, contents.ctypes.data, 8 * MIB)
    move(runtime, memory.ptr + MIB, 5 * MIB)
    assert bytes_in_huge_pages(memory.ptr) == 2 * HUGE_PAGE
    move(runtime, memory.ptr, 9 * MIB)  # the call moves no pages past the end of the memory
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
        move(runtime, memory.ptr, memory.nbytes)
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


def test_a_collective_expects_reuse_of_the_arrays_with_which_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call moves pages: for arrays that are used once, a move would not pay."""
    expected: list[tuple[int, int]] = []
    monkeypatch.setattr(HostRuntime, "expect_reuse", lambda _, ptr, nbytes: expected.append((ptr, nbytes)))

    def body(comm: Communicator) -> None:
        arrays = [(np.ones(MIB, np.float32), np.empty(MIB, np.float32)) for _ in range(4)]
        for x, out in arrays:
            comm.all_reduce(x, out=out)
        assert expected == [(each.ctypes.data, each.nbytes) for each in arrays[0]]

    run_ranks(1, body)
