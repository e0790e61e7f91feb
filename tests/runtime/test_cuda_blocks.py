"""Blocks of CUDA's virtual memory management that are suspended and resumed, on a driver that keeps books.

The driver records which physical memory is mapped where. A descriptor of physical memory is a memfd, whose inode
identifies the memory.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest

from proxyccl.device.base_runtime import Allocation
from proxyccl.device.errors import DriverError
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.process import forks
from proxyccl.device.runtimes import open_runtime

pytest.importorskip("cuda.bindings.driver")

from proxyccl.device.gpu.cuda_virtual_memory import VirtualMemory

STEP = 2 << 20
OUT_OF_MEMORY = 2


class Books:
    """The part of `Driver` that `VirtualMemory` calls, for a device of `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: VirtualMemory | None = None
        self.sizes: dict[int, int] = {}  # physical memory
        self.holds: dict[int, int] = {}  # handles and mappings of physical memory
        self.files: dict[int, int] = {}  # memfds of physical memory
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # by address: physical memory and size
        self.granted: set[int] = set()
        self._numbers = itertools.count(1)
        self._addresses = itertools.count(1 << 40, 1 << 30)

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    def allocation_id(self, ptr: int) -> int:
        word = None if self.blocks is None else self.blocks.word(ptr)  # as in CudaDriver
        return 100 + self._at(ptr)[1] if word is None else int(word[0])

    def _at(self, ptr: int) -> tuple[int, int, int]:
        for base, (memory, size) in self.mapped.items():
            if base <= ptr < base + size:
                return base, memory, size
        raise DriverError("cuMemGetAddressRange", 1, "nothing is mapped there")

    def _drop(self, memory: int) -> None:
        self.holds[memory] -= 1
        if not self.holds[memory]:
            del self.holds[memory], self.sizes[memory]
            if memory in self.files:
                os.close(self.files.pop(memory))

    def release(self, call: str, *args: Any) -> None:
        self.call(call, *args)

    def call(self, call: str, *args: Any) -> Any:
        return getattr(self, re.sub(r"(?<!^)([A-Z])", r"_\1", call).lower())(*args)

    def ctx_get_device(self) -> int:
        return 3

    def ctx_get_current(self) -> int:
        return 77

    def ctx_set_current(self, context: int) -> None:
        assert context == 77

    def ctx_synchronize(self) -> None: ...

    def device_get_attribute(self, _: Any, device: int) -> int:
        assert device == 3
        return 1

    def mem_get_allocation_granularity(self, *_: Any) -> int:
        return STEP

    def mem_create(self, size: int, properties: Any, _: int) -> int:
        assert properties.location.id == 3
        if self.used + size > self.room:
            raise DriverError("cuMemCreate", OUT_OF_MEMORY, "out of memory")
        memory = next(self._numbers)
        self.sizes[memory], self.holds[memory] = size, 1
        return memory

    def mem_release(self, memory: int) -> None:
        self._drop(memory)

    def mem_address_reserve(self, size: int, *_: int) -> int:
        base = next(self._addresses)
        self.reserved[base] = size
        return base

    def mem_address_free(self, base: int, size: int) -> None:
        assert self.reserved.pop(base) == size
        assert base not in self.mapped

    def mem_map(self, base: int, size: int, _: int, memory: int, __: int) -> None:
        assert self.reserved[base] == size == self.sizes[memory]
        assert base not in self.mapped
        self.mapped[base] = memory, size
        self.holds[memory] += 1

    def mem_unmap(self, base: int, size: int) -> None:
        memory, mapped = self.mapped.pop(base)
        assert mapped == size
        self.granted.discard(base)
        self._drop(memory)

    def mem_set_access(self, base: int, *_: Any) -> None:
        assert base in self.mapped
        self.granted.add(base)

    def mem_get_address_range(self, ptr: int) -> tuple[int, int]:
        base, _, size = self._at(ptr)
        return base, size

    def mem_retain_allocation_handle(self, ptr: int) -> int:
        memory = self._at(ptr)[1]
        self.holds[memory] += 1
        return memory

    def mem_export_to_shareable_handle(self, memory: int, *_: Any) -> int:
        if memory not in self.files:
            self.files[memory] = os.memfd_create("books")
        return os.dup(self.files[memory])

    def mem_import_from_shareable_handle(self, descriptor: int, _: Any) -> int:
        inode = os.fstat(descriptor).st_ino
        memory = next(each for each, file in self.files.items() if os.fstat(file).st_ino == inode)
        self.holds[memory] += 1
        return memory


def test_a_suspended_block_takes_no_memory_and_keeps_addresses_number_and_handle() -> None:
    driver = Books(4 * STEP)
    memory = driver.blocks = VirtualMemory(driver, lambda *_: 1)  # type: ignore[arg-type]
    own = forks.here().token
    base, other = memory.allocate(STEP + 1), memory.allocate(100)
    assert driver.used == 3 * STEP
    word, handle = memory.word(base + STEP), memory.export(base, 2 * STEP)
    guard = AllocationGuard(open_runtime("host").calls, (Allocation(base + STEP, word[0], word),))
    at_peer = memory.open(handle)
    for _ in range(2):
        memory.set_mapped(own, [base], False)
        memory.set_mapped(own, [base], False)  # another session of the proxies' process
        memory.suspend([base])
        assert driver.used == STEP, "the other block stays"
        assert {base, at_peer} <= driver.reserved.keys()
        assert guard.holds
        with pytest.raises(OSError, match="suspended"):
            memory.open(handle)
        memory.resume([base])
        memory.set_mapped(own, [base], True)
        assert driver.mapped[base] == driver.mapped[at_peer]
        assert {base, at_peer, other} <= driver.granted
        assert guard.holds
        assert memory.export(base, 2 * STEP) == handle
        memory.end_export(handle)
    memory.release(at_peer)
    memory.end_export(handle)
    assert memory.free(base)
    assert not guard.holds
    assert memory.free(other)
    assert (driver.used, driver.reserved, driver.holds) == (0, {}, {})


def test_without_room_for_all_blocks_all_stay_suspended() -> None:
    driver = Books(4 * STEP)
    memory = driver.blocks = VirtualMemory(driver, lambda *_: 1)  # type: ignore[arg-type]
    bases = [memory.allocate(STEP) for _ in range(3)]
    memory.suspend(bases)
    driver.room = 2 * STEP
    with pytest.raises(DriverError, match="cuMemCreate"):
        memory.resume(bases)
    assert (driver.used, driver.mapped) == (0, {})
    driver.room = 4 * STEP
    memory.resume(bases)
    assert driver.used == 3 * STEP


def test_suspended_blocks_and_mappings_are_freed() -> None:
    driver = Books(4 * STEP)
    memory = driver.blocks = VirtualMemory(driver, lambda *_: 1)  # type: ignore[arg-type]
    base = memory.allocate(STEP)
    handle = memory.export(base, STEP)
    at_peer = memory.open(handle)
    memory.set_mapped(forks.here().token, [base], False)
    memory.suspend([base])
    memory.end_export(handle)
    assert memory.release(at_peer)
    assert memory.free(base)
    assert (driver.used, driver.reserved, driver.holds) == (0, {}, {})


def test_a_device_without_room_for_a_block_reserves_no_addresses() -> None:
    driver = Books(STEP)
    memory = driver.blocks = VirtualMemory(driver, lambda *_: 1)  # type: ignore[arg-type]
    with pytest.raises(DriverError):
        memory.allocate(2 * STEP)
    assert driver.reserved == {}
