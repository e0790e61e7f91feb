"""Words in device memory in which peers' kernels store counts of signals. A few allocations hold all words, and a peer
maps each allocation once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from proxyccl.channels.device_memory import DeviceMemory
from proxyccl.channels.joining.exchange import Exchange
from proxyccl.device._native import ffi
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.runtime import Memory, Runtime
from proxyccl.proxy.codec import Codec, Message, Uint64

_BLOCK = 64 << 10
"""The bytes of an allocation; if one object needs more words, its allocation is larger."""


class WordsOffer(Message, frozen=True):
    """A rank's description of its words for an object that all ranks make together, such as a set of channels."""

    handle: bytes  # handle of the memory that holds the words
    offset: Uint64  # offset of the first word in that memory
    number: Uint64  # this rank's proposal for the words' number; the ranks take the greatest proposal
    dropped: list[Uint64]  # the numbers of the words that this rank has dropped since its last offer


_OFFER = Codec(WordsOffer, 4 << 20)


class _Block(Struct, frozen=True):
    memory: Memory
    handle: bytes


class _Part(Struct):
    block: _Block
    offset: int
    nbytes: int
    ranks: int = 0  # number of ranks that still use the words

    @property
    def ptr(self) -> int:
        return self.block.memory.ptr + self.offset


class SemaphoreWords:
    """This rank's words, and the words of its peers.

    A rank reuses words only after all ranks have dropped their semaphores with these words, because until then a peer
    may signal. An offer of new words also lists the words that the offering rank has dropped.

    Args:
        device_memory: allocates this rank's memory.
        mappings: maps the memory of peers, which stays mapped until `mappings` is closed.
        keep: keeps this rank's memory until the group is released.
    """

    def __init__(
        self,
        runtime: Runtime,
        device_memory: DeviceMemory,
        mappings: HandleCache,
        exchange: Exchange,
        keep: Callable[[Memory], object],
    ) -> None:
        self._runtime, self._mappings, self._exchange, self._keep = runtime, mappings, exchange, keep
        self._device_memory = device_memory
        self._block: _Block | None = None
        self._used = 0  # bytes of the current block
        self._exported: list[bytes] = []  # the handles of all blocks
        self._free: dict[int, list[_Part]] = {}  # unused words, by size
        self._theirs: dict[bytes, Memory] = {}
        self._next = 0
        self._parts: dict[int, _Part] = {}  # words in use, by number
        self._dropped: deque[int] = deque()  # numbers of words that were dropped since the last offer
        self._lock = threading.Lock()

    def make(self, nbytes: int, user: object) -> tuple[int, list[WordsOffer]]:
        """Returns the address of zeroed words of this rank, and all ranks' offers. All ranks call this together.

        The words are in use until `user` is garbage-collected; before that, all kernels that were launched with `user`
        must have ended. Raises the errors of `Exchange.all_gather`.
        """
        with self._lock:
            part = self._take(nbytes)
        dropped = list(take_each(self._dropped))
        offer = WordsOffer(part.block.handle, part.offset, self._next, dropped)
        offers = self._exchange.all_gather(offer, _OFFER, "sm_channels")
        # The proposals differ if an earlier call failed on some ranks, so that only the other ranks counted that call.
        number = max(offer.number for offer in offers)
        self._next = number + 1
        self._parts[number], part.ranks = part, len(offers)
        forks.finalizer(user, self._dropped.append, number)
        for offer in offers:
            self._note(offer.dropped)
        return part.ptr, offers

    def at_peer(self, offer: WordsOffer) -> int:
        """Returns this rank's address of a peer's words, for kernels. Raises the errors of `HandleCache.acquire`."""
        if offer.handle not in self._theirs:
            self._theirs[offer.handle] = self._mappings.acquire(offer.handle)
        return self._theirs[offer.handle].ptr + offer.offset

    def close(self) -> None:
        """Drops the references to this rank's and its peers' memory, which the group then frees."""
        for handle in self._exported:
            self._runtime.end_export(handle)
        self._block = None
        for referring in (self._exported, self._free, self._theirs, self._parts):
            referring.clear()

    def _take(self, nbytes: int) -> _Part:
        if free := self._free.get(nbytes):
            part = free.pop()
            zeros = bytes(nbytes)
            self._runtime.copy(part.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(zeros))), nbytes)
            return part
        if self._block is None or self._used + nbytes > self._block.memory.nbytes:
            memory = self._device_memory.allocate(max(nbytes, _BLOCK), "channels")
            self._keep(memory)
            self._exported.append(self._runtime.export(memory.ptr, memory.nbytes))
            self._block, self._used = _Block(memory, self._exported[-1]), 0
        part = _Part(self._block, self._used, nbytes)
        self._used += nbytes
        return part

    def _note(self, dropped: Sequence[int]) -> None:
        for number in dropped:
            if (part := self._parts.get(number)) is not None:
                part.ranks -= 1
                if part.ranks == 0:
                    self._free.setdefault(part.nbytes, []).append(self._parts.pop(number))
