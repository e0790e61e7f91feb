"""The channels and semaphores of a rank that are in use, for its reports. Dropped ones are no longer listed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from proxyccl.channels.handles import Channel


class DeviceSemaphores(Protocol):
    """Semaphores whose words lie in device memory."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Where the words lie: addresses and sizes, for `decode`."""
        ...

    def decode(self, words: bytes) -> Sequence[tuple[int, int, int, int, int]]:
        """From the bytes of `ranges`: peer, number, signals that came in, were waited for, and were sent."""
        ...


class Inventory:
    """The channels and semaphores in use by one rank of a communicator."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()
        self._semaphores: weakref.WeakValueDictionary[int, DeviceSemaphores] = weakref.WeakValueDictionary()

    def add_channel(self, channel_id: int, channel: Channel) -> None:
        """Lists one of the proxy's channels."""
        self._channels[channel_id] = channel

    def add_semaphores(self, semaphores: DeviceSemaphores) -> None:
        """Lists semaphores in device memory."""
        self._semaphores[id(semaphores)] = semaphores

    def channels(self) -> list[Channel]:
        """The channels in use."""
        return [channel for reference in self._channels.valuerefs() if (channel := reference()) is not None]

    def semaphores(self) -> list[DeviceSemaphores]:
        """The semaphores in use."""
        return [found for reference in self._semaphores.valuerefs() if (found := reference()) is not None]
