"""The device memory that one rank of a group allocates, by purpose, and what is saved while the group is suspended."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

from msgspec import Struct

from proxyccl.channels.segment.control import MEMORY_PURPOSES, ControlSegment, MemoryPurpose
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import Array
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.host_copies import Copy, allocate_host, copy_with_host
from proxyccl.device.runtime import Memory, Runtime

_LEAST_BLOCK = 1 << 20
"""Bytes of the shortest allocation that is given back while a group is suspended. A driver would round a block up to 2
MiB, but packs short allocations.
"""
_DEAD: frozenset[MemoryPurpose] = frozenset({"scratch", "staging"})
"""The purposes of memory whose contents no call reads once all ranks' calls have ended (channels/DESIGN.md)."""

_STAYING: frozenset[MemoryPurpose] = frozenset({"channels", "results"})
"""The purposes of memory that is never given back: reports read the words of channels, and a call that returns a result
must not wait for a block.
"""

_OF_PROGRAMS: frozenset[MemoryPurpose] = frozenset({"arrays", "experts"})
"""The purposes of memory whose arrays programs use directly."""

claims: list[Callable[[int, int, set[bytes]], str]] = []
"""Functions claim(start, end, tokens) that return the reason why memory can't be suspended, or "". `tokens` identify
the processes whose ranks take part in `suspend`. Modules that let other processes use memory by handle add functions to
this list, because this module must not import these modules.
"""

Ranges = Sequence[tuple[int, int]]
"""Offset and bytes of each part of an allocation."""


class _Piece(Struct, eq=False):
    """An allocation."""

    purpose: MemoryPurpose
    block: bool  # whether the runtime can suspend the memory
    # Returns the parts that kernels need after they were suspended, even if the contents of arrays are dropped, or None
    # for the whole allocation. If the field is None, the whole allocation is kept.
    control: Callable[[], Ranges | None] | None


class _Chosen(Struct, eq=False):
    """A block that is suspended, and its saved contents: offsets, and the bytes there."""

    memory: Memory
    piece: _Piece
    saved: list[tuple[int, mmap.mmap]] = []

    def copies(self, *, to_host: bool) -> list[Copy]:
        """Returns the copies of the contents to or from host memory."""
        found = [(_address(part), self.memory.ptr + offset, len(part)) for offset, part in self.saved]
        return found if to_host else [(source, to, nbytes) for to, source, nbytes in found]


class DeviceMemory:
    """Allocates a group's device memory on one rank, and keeps an account of the allocations that are alive.

    Args:
        runtime: allocates the memory.
        control: this rank's segment, in which `publish` stores the account.
        suspendable: whether `suspend` will be called, so that memory consists of blocks that can be suspended.
    """

    def __init__(self, runtime: Runtime, control: ControlSegment, *, suspendable: bool = False) -> None:
        self._runtime, self._control, self.suspendable = runtime, control, suspendable
        self._pieces: weakref.WeakKeyDictionary[Memory, _Piece] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # guards insertions against iterations; no finalizer takes it
        self._arrays: weakref.WeakSet[Array] = weakref.WeakSet()
        self._chosen: list[_Chosen] = []
        self._suspended = False

    def allocate(
        self, nbytes: int, purpose: MemoryPurpose, control: Callable[[], Ranges | None] | None = None
    ) -> Memory:
        """Allocates zeroed device memory that peers can map.

        Args:
            control: returns the parts that `suspend` must keep even if it drops the contents of arrays, or None for
                all parts. If `control` is None, `suspend` keeps all parts.

        Raises:
            ResourceError: too little memory is left.
        """
        block = self.suspendable and nbytes >= _LEAST_BLOCK and purpose not in _STAYING
        memory = self._runtime.allocate_block(nbytes) if block else self._runtime.allocate(nbytes)
        self._add(memory, _Piece(purpose, block, control))
        return memory

    def add(self, memory: Memory, purpose: MemoryPurpose) -> None:
        """Adds memory that another module has allocated to the account."""
        self._add(memory, _Piece(purpose, False, None))

    def _add(self, memory: Memory, piece: _Piece) -> None:
        with self._lock:
            self._pieces[memory] = piece

    def add_array(self, array: Array, purpose: MemoryPurpose) -> None:
        """Notes an array in memory from `allocate`, so that it refuses use while its memory is suspended."""
        if self.suspendable and purpose in _OF_PROGRAMS:
            with self._lock:
                self._arrays.add(array)

    def _live(self) -> list[tuple[Memory, _Piece]]:
        with self._lock:
            pieces = list(self._pieces.items())
        return [(memory, piece) for memory, piece in pieces if not memory.closed]

    def usage(self) -> dict[str, int]:
        """Returns the bytes of the live allocations for each of MEMORY_PURPOSES."""
        found: dict[str, int] = dict.fromkeys(MEMORY_PURPOSES, 0)
        suspended = {each.memory for each in self._chosen} if self._suspended else set()
        for memory, piece in self._live():
            if memory not in suspended:
                found[piece.purpose] += memory.nbytes
        return found

    def nbytes(self, *, blocks: bool) -> int:
        """Returns the bytes of the allocations that `suspend` frees (`blocks`), or of the other allocations."""
        return sum(memory.nbytes for memory, piece in self._live() if piece.block == blocks)

    def publish(self) -> None:
        """Stores the account in the rank's segment, where observers read it."""
        self._control.set_memory_usage(self.usage())

    # -- while the group is suspended ---

    def choose(self) -> None:
        """Chooses the blocks for `suspend`, and keeps them alive until `finish`. Until then, the arrays in the blocks
        refuse use.
        """
        self._chosen = [_Chosen(memory, piece) for memory, piece in self._live() if piece.block]
        self._set_arrays(suspended=True)

    def open_blocks(self) -> list[int]:
        """Returns the addresses of the chosen blocks that were not freed."""
        return [each.memory.ptr for each in self._open()]

    def claim(self, processes: set[bytes]) -> str:
        """Returns why a chosen block can't be suspended (`claims`), or ""."""
        ranges = [(each.memory.ptr, each.memory.ptr + each.memory.nbytes) for each in self._open()]
        return next(filter(None, (claim(*each, processes) for each in ranges for claim in claims)), "")

    def _set_arrays(self, *, suspended: bool) -> None:
        with self._lock:
            arrays = list(self._arrays)
        for array in arrays:
            if self.has_chosen(array.memory.ptr):
                array.set_suspended(suspended)

    def has_chosen(self, ptr: int) -> bool:
        """Returns whether an address lies in a chosen block."""
        return any(0 <= ptr - each.memory.ptr < each.memory.nbytes for each in self._chosen)

    def saved_bytes(self, *, arrays: bool) -> int:
        """Returns the number of bytes of host memory that `save` needs."""
        return sum(nbytes for each in self._chosen for _, nbytes in _kept(each.memory, each.piece, arrays))

    def save(self, *, arrays: bool, of_host: int, left: int) -> None:
        """Copies what must survive `suspend` to host memory. Raises ResourceError if too little host memory is free, or
        can be pinned for the copies.

        Args:
            arrays: whether to copy the contents of arrays and of experts' outputs too.
            of_host: the sum of the `saved_bytes` of all ranks, which share the host.
            left: the bytes that the host had left before any rank began to save.
        """
        if of_host > left:  # Linux would kill a process instead of refusing pages
            raise ResourceError(f"the ranks' contents have {of_host} bytes, and the host has {left} bytes left")
        for each in self._chosen:
            parts = _kept(each.memory, each.piece, arrays)
            each.saved = [(offset, allocate_host(nbytes)) for offset, nbytes in parts]
        self._copy_saved(self._chosen, to_host=True)

    def _copy_saved(self, blocks: list[_Chosen], *, to_host: bool) -> None:
        copies = [copy for each in blocks for copy in each.copies(to_host=to_host)]
        copy_with_host(self._runtime, copies, to_host=to_host)

    def suspend(self) -> None:
        """Gives the chosen blocks back to the device. All peers must have unmapped them."""
        self._runtime.suspend([each.memory for each in self._open()])
        self._suspended = True

    def resume(self) -> None:
        """Allocates the blocks again, and copies the saved contents back. Raises ResourceError if too little memory is
        left, or can be pinned for the copies; the blocks then stay suspended.
        """
        blocks = self._open()
        memories = [each.memory for each in blocks]
        self._runtime.resume(memories)
        try:
            self._copy_saved(blocks, to_host=False)
        except ResourceError:
            self._runtime.suspend(memories)
            raise
        self._suspended = False

    def finish(self) -> None:
        """Drops the saved contents, and makes the arrays usable, after all ranks have resumed."""
        self._set_arrays(suspended=False)
        self._chosen = []

    def _open(self) -> list[_Chosen]:
        return [each for each in self._chosen if not each.memory.closed]


def _address(part: mmap.mmap) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(part)))


def _kept(memory: Memory, piece: _Piece, arrays: bool) -> Ranges:
    if piece.purpose in _DEAD or (piece.purpose == "arrays" and not arrays):
        return ()
    parts = None if arrays or piece.control is None else piece.control()
    return [(0, memory.nbytes)] if parts is None else parts
