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
    """A struct, as a kernel's argument, with handles of channels whose triggers a proxy takes.

    Attributes:
        sleepers: of that proxy.
    """

    sleepers: Sleepers

    @classmethod
    def of(cls, raw: bytes, sleepers: Sleepers | None) -> bytes:
        """The struct; plain bytes if no proxy is concerned."""
        if sleepers is None:
            return raw
        made = cls(raw)
        made.sleepers = sleepers
        return made


def wakes(sleepers: Iterable[object]) -> Any:
    """The list of a launch, which has to keep it (launch.h): those of the arguments that are `Sleepers`, each once."""
    found = {id(each): each for each in sleepers if isinstance(each, Sleepers)}
    if not found:
        return ffi.NULL
    return ffi.new("ProxycclSleepers *[]", [*(each.pointer for each in found.values()), ffi.NULL])
