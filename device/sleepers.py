"""The sleeping threads of a proxy, which a launch wakes if it gives them work (waking.h)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxyccl.device._native import ffi, lib
from proxyccl.device.memory.shared_memory import SharedMemory

MOST_SLEEPERS: int = lib.PROXYCCL_MOST_SLEEPERS


class Sleepers:
    """The words of threads that may sleep. Threads may be added while others wake them.

    Attributes:
        pointer: the ProxycclSleepers.
    """

    def __init__(self) -> None:
        self.pointer = ffi.new("ProxycclSleepers *")
        self._memories: list[SharedMemory] = []  # mapped for as long as a launch may look at the words

    def add(self, word: SharedMemory) -> None:
        """Adds a thread by its word. Beyond `MOST_SLEEPERS` a thread is not woken: it then wakes by itself."""
        self._memories.append(word)
        lib.proxyccl_sleepers_add(self.pointer, ffi.cast("uint32_t *", word.ptr))


class ProxiedStruct(bytes):
    """A struct, as a kernel's argument, of which a launch must know more than its bytes.

    Attributes:
        sleepers: of the proxy that takes the triggers of its channels; None if it has no such channels.
        pointers: offsets of its pointers to arrays of a call.
        peers_words: offset of the addresses, by rank, at which kernels of all ranks reach the output of a call. None if
            it has none, or the call leaves them null.
    """

    sleepers: Sleepers | None = None
    pointers: tuple[int, ...] = ()
    peers_words: int | None = None

    @classmethod
    def of(
        cls,
        raw: bytes,
        sleepers: Sleepers | None,
        *,
        pointers: tuple[int, ...] = (),
        peers_words: int | None = None,
    ) -> bytes:
        """The struct; plain bytes if its bytes are all there is to know."""
        if sleepers is None and not pointers and peers_words is None:
            return raw
        made = cls(raw)
        made.sleepers, made.pointers, made.peers_words = sleepers, pointers, peers_words
        return made


def wakes(sleepers: Iterable[object]) -> Any:
    """The list of a launch, which has to keep it (launch.h): those of the arguments that are `Sleepers`, each once."""
    found = {id(each): each for each in sleepers if isinstance(each, Sleepers)}
    if not found:
        return ffi.NULL
    return ffi.new("ProxycclSleepers *[]", [*(each.pointer for each in found.values()), ffi.NULL])
