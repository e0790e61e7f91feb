"""An agent's registrations, in memory that peers on the same host map, so that they can check them while they copy.

The number of a registration is never used again. So memory that is registered later at the same address, even as an
equal region, is not taken for the former memory.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import Uint64Pointer

_WORDS: int = lib.PROXYCCL_LEDGER_WORDS
_NBYTES = _WORDS * 8  # pages of words that were never used take no memory


class Ledger:
    """The ledger of an agent of this process, which writes it, or of a peer, whose ledger this process maps.

    The word of a registration, number % words, is the number while the memory is registered, and the number's
    complement if the memory was freed first. After `end` the word has some other value. Word 0 counts the registrations
    that have ended: while word 0 does not change, all registrations remain valid.

    The callers of `begin` and `end` take turns.

    Attributes:
        words: all words, uint64.
        pointer: the address of the words, for the engine.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._mapped = memory.addresses()
        self.pointer: Uint64Pointer = ffi.cast("uint64_t *", memory.ptr)
        self.words: Rows = np.ctypeslib.as_array((ctypes.c_uint64 * _WORDS).from_address(memory.ptr))
        self._next = itertools.count(1)
        self._unused: list[int] = []
        self._births = itertools.count(1)
        self._watched: dict[int, weakref.finalize[..., Any]] = {}
        forks.finalizer(self, _unwatch, self._watched)  # finalizers of the watched memory may outlive the agent

    @classmethod
    def make(cls) -> Ledger:
        """Makes a new ledger. Raises ResourceError as `SharedMemory.allocate`."""
        return cls(SharedMemory.allocate(_NBYTES))

    @classmethod
    def open(cls, handle: bytes) -> Ledger:
        """Maps a peer's ledger by its handle. Raises ArgumentError or ResourceError if that is impossible."""
        memory = SharedMemory.open(handle)
        if memory.nbytes != _NBYTES:
            memory.close()
            raise ArgumentError("handle", f"it names {memory.nbytes} bytes, not a ledger of {_NBYTES}")
        return cls(memory)

    @property
    def handle(self) -> bytes:
        """The handle with which peers map the ledger."""
        return self._memory.handle

    @property
    def count(self) -> int:
        """The number of registrations that have ended."""
        return int(lib.proxyccl_ledger_count(self.pointer))

    def holds(self, number: int) -> bool:
        """Whether a registration is valid: it has not ended, and its memory was not freed."""
        return bool(number) and int(self.words[number % _WORDS]) == number

    def begin(self, pages: object = None) -> int:
        """Begins a registration, and returns its number. If `pages` is an object that lives as long as the memory is
        mapped, the object's end records that the memory was freed. Raises ResourceError if there are too many
        registrations.
        """
        slot = self._unused.pop() if self._unused else next(self._next)
        if slot >= _WORDS:
            raise ResourceError(f"an agent has at most {_WORDS - 1} registered regions")
        number = next(self._births) * _WORDS + slot
        lib.proxyccl_ledger_begin(self.pointer, number)
        if pages is not None:
            end = lib.proxyccl_ledger_end
            self._watched[number] = forks.finalizer(pages, _freed, end, self.pointer, number, self._mapped)
        return number

    def end(self, number: int) -> None:
        """Ends a registration."""
        watched = self._watched.pop(number, None)
        if watched is not None:
            watched.detach()
        lib.proxyccl_ledger_end(self.pointer, number, False)
        self._unused.append(number % _WORDS)

    def close(self) -> None:
        """Closes the descriptor of the ledger's memory, which stays mapped for transfers that still read it."""
        self._memory.close()


def _unwatch(watched: dict[int, weakref.finalize[..., Any]]) -> None:
    for each in list(watched.values()):
        each.detach()


def _freed(end: Any, pointer: Uint64Pointer, number: int, _mapped: object) -> None:
    """Records that the memory was freed. Garbage collection calls this in any thread, which may hold any lock."""
    end(pointer, number, True)
