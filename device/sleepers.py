"""The sleeping threads of a proxy. A launch that gives these threads work wakes them (waking.h)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from proxyccl.device._native import ffi, lib
from proxyccl.device.memory.shared_memory import SharedMemory

MOST_SLEEPERS: int = lib.PROXYCCL_MOST_SLEEPERS


class Sleepers:
    """The words by which a proxy's sleeping threads are woken. Threads may be added while other threads wake them."""

    def __init__(self) -> None:
        self.pointer = ffi.new("ProxycclSleepers *")  # see waking.h
        self._memories: list[SharedMemory] = []  # kept mapped, because launches read the words

    def add(self, word: SharedMemory) -> None:
        """Adds the word of a thread. Launches wake at most `MOST_SLEEPERS` threads; further threads wake up by
        themselves."""
        self._memories.append(word)
        lib.proxyccl_sleepers_add(self.pointer, ffi.cast("uint32_t *", word.ptr))

    def remove(self, words: Collection[SharedMemory]) -> None:
        """Removes the words of threads that have ended. No launch may wake threads meanwhile."""
        kept, self._memories = [word for word in self._memories if word not in words], []
        self.pointer.count = 0
        for word in kept:
            self.add(word)


class ProxiedStruct(bytes):
    """The bytes of a kernel's struct argument, with the properties of the struct that a launch needs."""

    # The sleepers of the proxy of the struct's channels; None if the struct has no ProxyChannels.
    sleepers: Sleepers | None = None
    pointers: tuple[int, ...] = ()  # the offsets, in bytes, of pointers to a call's arrays
    # Offset in the struct, in bytes, of a table with one address per rank: the address at which that rank's kernels
    # access a call's output. None if the struct has no table, or if the call passes no table.
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
        """Returns the struct as a ProxiedStruct, or as plain bytes if all attributes have their defaults."""
        if sleepers is None and not pointers and peers_words is None:
            return raw
        made = cls(raw)
        made.sleepers, made.pointers, made.peers_words = sleepers, pointers, peers_words
        return made


def wakes(sleepers: Iterable[object]) -> Any:
    """Returns a NULL-terminated array of the distinct `Sleepers` among `sleepers`, or NULL. The caller keeps the array
    (launch.h)."""
    found = {id(each): each for each in sleepers if isinstance(each, Sleepers)}
    if not found:
        return ffi.NULL
    return ffi.new("ProxycclSleepers *[]", [*(each.pointer for each in found.values()), ffi.NULL])
