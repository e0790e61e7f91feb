"""An agent's ledger: its registrations, in memory that peers on the same host map to check them while they copy.

The number of a registration is never used again, so it identifies memory even if other memory is registered later at
the same address.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.engine_calls import wait_in_slices
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.memory.shared_memory import SharedMemory, open_descriptor
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclLedgerPointer

_WORDS: int = lib.PROXYCCL_LEDGER_WORDS
LEDGER_BYTES = ffi.sizeof("ProxycclLedger")  # unused pages take no memory
MOST_KEYS = 1 << 40
_KEY_SLOTS: int = lib.PROXYCCL_LEDGER_KEYS
_SLOTS = _WORDS - _KEY_SLOTS

_KEY_BIRTHS = 1 << 42


def number_of(key: int, *, writes: bool) -> int:
    """Returns the number of a grant with a key, from 0 to `MOST_KEYS` - 1."""
    return (_KEY_BIRTHS + writes * MOST_KEYS + key) * _WORDS + _WORDS - 1 - key % _KEY_SLOTS


class Place:
    """A process's place in a ledger, where its active transfers are counted. A lock of the ledger's file shows that the
    process has not ended.

    Attributes:
        number: the number of the place.
        descriptor: a descriptor of the ledger's file, with its own open file description, to which the lock belongs.

    Raises:
        ArgumentError: the ledger's owner has ended or has closed the ledger.
        ResourceError: the file can't be opened, for example because /proc is not mounted, or all places are taken.
    """

    def __init__(self, ledger: Ledger) -> None:
        opened, _, _ = open_descriptor(ledger.handle)
        try:  # `opened` may share its description with the owner's descriptor
            self.descriptor = os.open(f"/proc/self/fd/{opened}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"an agent's ledger can't be opened for a grant: {error.strerror}") from None
        finally:
            os.close(opened)
        forks.keep_from_children(self)
        forks.finalizer(self, os.close, self.descriptor)
        self.number = lib.proxyccl_ledger_join(ledger.pointer, self.descriptor)
        if self.number < 0:
            places = f"at most {lib.PROXYCCL_LEDGER_PLACES} agents of a host can use the grants of an agent"
            raise ResourceError(f"an agent's grants can't be used: {os.strerror(-self.number)} ({places})")

    def close(self) -> None:
        """Closes a forked child's copy of the descriptor, which would hold the parent's lock after the parent's end."""
        os.close(self.descriptor)


class Ledger:
    """The ledger of an agent of this process, or of a peer whose ledger this process has mapped to read it.

    The index of a registration's word is number % len(words). While the memory is registered, the word is the number.
    If the memory was freed before `end`, the word is the number's complement. After `end`, the word is neither the
    number nor its complement. Word 0 counts the registrations that have ended, so while word 0 does not change, valid
    registrations stay valid.

    Any thread may call the methods.

    Attributes:
        words: the ledger's words, as a uint64 array.
        pointer: the address of the words, for the engine.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._mapped = memory.addresses()
        self.pointer: ProxycclLedgerPointer = ffi.cast("ProxycclLedger *", memory.ptr)
        self.words: Rows = np.ctypeslib.as_array((ctypes.c_uint64 * _WORDS).from_address(memory.ptr))
        deadlines = memory.ptr + ffi.offsetof("ProxycclLedger", "deadlines")
        self._deadlines: Rows = np.ctypeslib.as_array((ctypes.c_uint64 * _KEY_SLOTS).from_address(deadlines))
        self._next = 1  # the first slot that was never used
        self._lock = threading.Lock()
        self._unused: list[int] = []
        self._granted = np.zeros(_WORDS, bool)  # whether a slot's word is that of a granted block
        self._place: Place | None = None
        self._births = itertools.count(1)
        self._watched: dict[int, weakref.finalize[..., Any]] = {}
        forks.finalizer(self, _unwatch, self._watched)  # the finalizers in `_watched` may outlive the agent

    @classmethod
    def make(cls) -> Ledger:
        """Makes a new ledger. Raises ResourceError if the ledger can't be allocated."""
        return cls(SharedMemory.allocate(LEDGER_BYTES))

    @classmethod
    def open(cls, handle: bytes) -> Ledger:
        """Maps a peer's ledger by its handle. Raises ArgumentError or ResourceError if the ledger can't be mapped."""
        memory = SharedMemory.open(handle)
        if memory.nbytes != LEDGER_BYTES:
            memory.close()
            raise ArgumentError("handle", f"it names {memory.nbytes} bytes, not a ledger of {LEDGER_BYTES}")
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
        """Returns whether a registration has not ended and its memory was not freed."""
        return bool(number) and int(self.words[number % _WORDS]) == number

    def begin(self, count: int) -> list[int]:
        """Begins registrations, and returns their numbers. Raises ResourceError if there are too many registrations."""
        with self._lock:
            numbers = self._take(count)
        lib.proxyccl_ledger_begin(self.pointer, numbers, count)
        return numbers

    def watch(self, number: int, pages: object) -> None:
        """Makes the ledger record that a registration's memory was freed, when `pages` is garbage-collected."""
        end = lib.proxyccl_ledger_end
        self._watched[number] = forks.finalizer(pages, _freed, end, self.pointer, number, self._mapped)

    def end(self, numbers: Sequence[int]) -> None:
        """Ends registrations."""
        for number in self._watched.keys() & numbers if self._watched else ():
            self._watched.pop(number).detach()
        lib.proxyccl_ledger_end(self.pointer, numbers, len(numbers), False)
        with self._lock:
            self._unused += [number % _WORDS for number in numbers]

    def place(self) -> Place:
        """Returns the place of this process's transfers, which the first call takes. Raises the errors of `Place`."""
        with self._lock:
            if self._place is None:
                self._place = Place(self)
            return self._place

    def grant(self, count: int) -> NDArray[np.uint64]:
        """Returns the numbers of `count` granted blocks. Raises ResourceError if there are too many registrations and
        granted blocks, or if `place` raises the error.
        """
        self.place()
        with self._lock:
            numbers = np.array(self._take(count), np.uint64)
            slots = numbers % np.uint64(_WORDS)
            self.words[slots], self._granted[slots] = numbers, True
        return numbers

    def grant_by_key(self, key: int, *, writes: bool, deadline: int) -> int:
        """Returns the number of the grant with a key, whose lease ends at `deadline` in ns of CLOCK_MONOTONIC (0: no
        lease). Raises ResourceError like `grant`, or if the key's word is in use.
        """
        self.place()
        number = number_of(key, writes=writes)
        with self._lock:
            slot = number % _WORDS
            if self._granted[slot]:
                raise ResourceError(
                    f"key {key} can't be used while the grant with key {key} or another one that differs by a multiple "
                    f"of {_KEY_SLOTS} is not revoked"
                )
            self.deadline(number)[0] = deadline
            lib.proxyccl_ledger_begin(self.pointer, [number], 1)  # releases the deadline to readers of the word
            self._granted[slot] = True
        return number

    def deadline(self, number: int) -> NDArray[np.uint64]:
        """Returns a view of the word that contains the deadline of a grant with a key."""
        slot = number % _WORDS - _SLOTS
        return self._deadlines[slot : slot + 1]

    def revoke(self, numbers: NDArray[np.uint64], *, ends: bool = True) -> None:
        """Revokes granted blocks: no transfer of these blocks starts afterwards. If `ends` is True, active transfers of
        the blocks become stale, and memory that is read may be overwritten. Does nothing for blocks that are revoked
        already.
        """
        with self._lock:
            words = self.words[numbers % np.uint64(_WORDS)]
            revoked = np.unique(numbers[(words == numbers) | (words == ~numbers)])
            slots = revoked % np.uint64(_WORDS)
            lib.proxyccl_ledger_revoke(self.pointer, ffi.cast("uint64_t *", revoked.ctypes.data), len(revoked), ends)
            if ends:
                self._granted[slots] = False
                self._unused += slots[slots < _SLOTS].tolist()

    def wait(self, grant: int, seconds: float) -> bool:
        """Waits at most `seconds` until no transfer of a grant is active on this host. `grant` is the number of the
        grant's first block. Returns whether none is active.
        """
        where = self.pointer, self.place().descriptor, self.place().number
        status = wait_in_slices(lambda ns: lib.proxyccl_ledger_wait(*where, grant, ns), errno.EBUSY, seconds)
        if status not in (0, errno.EBUSY):
            raise ResourceError(f"the locks of a ledger can't be queried: {os.strerror(status)}")
        return status == 0

    def revoke_all(self) -> None:
        """Revokes all granted blocks."""
        words = self.words[self._granted]
        self.revoke(np.minimum(words, ~words))  # a number has less than 63 bits

    def holds_each(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns for each number whether its word is unchanged. The reads of the words follow all earlier reads."""
        lib.proxyccl_ledger_revoked(self.pointer, ffi.cast("uint64_t *", numbers.ctypes.data), len(numbers), True)
        return np.asarray(self.words[numbers % np.uint64(_WORDS)] == numbers)

    def _take(self, count: int) -> list[int]:
        """Returns numbers that were never used, in ascending order, of unused slots. The lock must be held. Raises
        ResourceError if there are not enough slots.
        """
        unused = self._unused
        missing = count - len(unused)
        if missing > 0:
            if self._next + missing > _SLOTS:
                raise ResourceError(f"an agent has at most {_SLOTS - 1} registered regions and granted blocks")
            unused += range(self._next, self._next + missing)
            self._next += missing
        return [next(self._births) * _WORDS + unused.pop() for _ in range(count)]

    def close(self) -> None:
        """Closes the ledger's descriptor. The memory stays mapped while transfers still read it."""
        self._memory.close()


def _unwatch(watched: dict[int, weakref.finalize[..., Any]]) -> None:
    for each in list(watched.values()):
        each.detach()


def _freed(end: Any, pointer: ProxycclLedgerPointer, number: int, _mapped: object) -> None:
    """Records that the memory was freed. Garbage collection calls this in any thread, so it must not take a lock."""
    end(pointer, [number], 1, True)
