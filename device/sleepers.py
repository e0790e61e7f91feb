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
        self._memories: list[SharedMemory] = []  # kept mapped as long as a launch may read the words

    def add(self, word: SharedMemory) -> None:
        """Adds the word of a thread. Launches do not wake threads beyond `MOST_SLEEPERS`, which wake by themselves."""
        self._memories.append(word)
        lib.proxyccl_sleepers_add(self.pointer, ffi.cast("uint32_t *", word.ptr))


class ProxiedStruct(bytes):
    """A struct argument of a kernel, with what a launch must know beyond its bytes.

    Attributes:
        sleepers: the sleepers of the proxy that takes triggers of the struct's channels; None without such channels.
        pointers: the offsets of pointers to a call's arrays.
        peers_words: offset of the table of addresses, by rank, at which kernels of all ranks reach a call's output.
            None if the struct has no such table, or the call leaves the table null.
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
        """Returns the struct as a ProxiedStruct, or as plain bytes if a launch needs nothing more."""
        if sleepers is None and not pointers and peers_words is None:
            return raw
        made = cls(raw)
        made.sleepers, made.pointers, made.peers_words = sleepers, pointers, peers_words
        return made


def wakes(sleepers: Iterable[object]) -> Any:
    """Returns the NULL-terminated list of the distinct `Sleepers` among `sleepers`, for a launch, which must keep it
    (launch.h)."""
    found = {id(each): each for each in sleepers if isinstance(each, Sleepers)}
    if not found:
        return ffi.NULL
    return ffi.new("ProxycclSleepers *[]", [*(each.pointer for each in found.values()), ffi.NULL])
