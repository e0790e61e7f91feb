"""Kernel arguments: channels, sets of channels, and single semaphores and rings. Reports list a rank's channels from an
`Inventory`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar, overload

from msgspec import Struct

from proxyccl.channels.device_memory import DeviceMemory
from proxyccl.device._native import ffi
from proxyccl.device.arguments.integers import find_integer
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Memory, Runtime
from proxyccl.device.sleepers import Sleepers

if TYPE_CHECKING:
    from proxyccl.device._native import CData  # `CData` exists only in the type stub, not in cffi's module


class DeviceHandle(Struct, frozen=True):
    """A part of a channel (its semaphore or its ring) that a kernel takes by value."""

    handle_kind: int  # the handle's ProxycclHandleKind, which a kernel's parameter must have
    device_handle: bytes  # the struct that the kernel sees
    kept: object  # what must live as long as the handle
    sleepers: Sleepers | None = None  # wakes the proxy that takes triggers from the ring; None for a semaphore


class HandleArray:
    """An array of device handles in device memory, which a kernel takes as a pointer.

    Attributes:
        handle_kind: the ProxycclHandleKind of the handles, which a kernel's parameter must have.
    """

    def __init__(
        self, runtime: Runtime, device_memory: DeviceMemory, kind: int, handles: Sequence[bytes], kept: object
    ) -> None:
        self.handle_kind = kind
        self._count = len(handles)
        self._kept = kept
        self._memory: Memory | None = None
        raw = b"".join(handles)
        if raw:
            self._memory = device_memory.allocate(len(raw), "channels")
            runtime.copy(self._memory.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))

    def __len__(self) -> int:
        return self._count

    @property
    def device_pointer(self) -> int:
        return self._memory.ptr if self._memory is not None else 0


class Channel:
    """A channel to one peer. A kernel takes `device_handle` by value.

    Attributes:
        handle_kind: the ProxycclHandleKind of `device_handle`, which a kernel's parameter must have.
        peer: the rank at the other end.
        device_pointer: the handle's address in device memory, for kernels that take a pointer; 0 if device memory holds
            no copy of the handle.
        sleepers: wakes the proxy that takes the channel's triggers; None if the channel has no triggers.
    """

    handle_kind: ClassVar[int]
    semaphore_kind: ClassVar[int]

    def __init__(self, peer: int, handle: CData, sleepers: Sleepers | None = None) -> None:
        self.peer = peer
        self.sleepers = sleepers
        self.device_pointer = 0
        self._handle = handle
        self._kept: tuple[object, ...] = ()

    def keep(self, kept: tuple[object, ...]) -> None:
        """Keeps objects alive as long as this channel, because the channel may outlive its `ChannelSet`."""
        self._kept = kept

    @property
    def device_handle(self) -> bytes:
        """The struct that the kernel sees, as bytes."""
        return bytes(ffi.buffer(self._handle))

    @property
    def semaphore(self) -> DeviceHandle:
        """The channel's semaphore, for a kernel that takes by value a `proxyccl::SharedSemaphore` or a semaphore of
        MSCCL++.
        """
        return DeviceHandle(self.semaphore_kind, self._part("semaphore"), (self, self._kept))

    def _part(self, field: str) -> bytes:
        part = getattr(self._handle, field)
        return bytes(ffi.buffer(ffi.addressof(self._handle, field), ffi.sizeof(part)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to rank {self.peer}>"


C = TypeVar("C", bound=Channel)


class NoChannelError(ArgumentError, KeyError):
    """Raised if a `ChannelSet` has no channel to a rank. The class is also a KeyError, as mappings raise for a missing
    key.
    """

    __str__ = Exception.__str__  # KeyError.__str__ would quote the message


class ChannelSet(Sequence[C], Generic[C]):
    """Channels to peers, in the requested order of the peers.

    A kernel takes the set as a pointer to an array of device handles.

    Attributes:
        kind: the class of the channels.
        handle_kind: the ProxycclHandleKind of their handles, which a kernel's parameter must have.
    """

    def __init__(
        self,
        runtime: Runtime,
        device_memory: DeviceMemory,
        kind: type[C],
        channels: list[C],
        kept: tuple[object, ...],
    ) -> None:
        self.kind = kind
        self.handle_kind = kind.handle_kind
        self._runtime, self._device_memory, self._kept = runtime, device_memory, kept
        self._channels = channels
        self._by_peer = {channel.peer: channel for channel in channels}
        handles = [channel.device_handle for channel in channels]
        self._handles = HandleArray(runtime, device_memory, self.handle_kind, handles, kept)
        for i, channel in enumerate(channels):
            channel.device_pointer = self._handles.device_pointer + i * len(handles[i])
            channel.keep((*kept, self._handles))

    @overload
    def __getitem__(self, index: int) -> C: ...
    @overload
    def __getitem__(self, index: slice) -> list[C]: ...
    def __getitem__(self, index: int | slice) -> C | list[C]:
        return self._channels[index]

    def __len__(self) -> int:
        return len(self._channels)

    def to(self, peer: int) -> C:
        """Returns the channel to a rank. Raises NoChannelError if the set has no channel to the rank."""
        number = find_integer(peer)
        if number is None or number not in self._by_peer:
            raise NoChannelError("peer", f"no channel leads to rank {peer!r}; expected one of {self.peers}")
        return self._by_peer[number]

    @property
    def peers(self) -> list[int]:
        """The channels' peers, in the order of the channels."""
        return [channel.peer for channel in self._channels]

    @property
    def sleepers(self) -> Sleepers | None:
        """Wakes the proxy that takes the channels' triggers."""
        return self._channels[0].sleepers if self._channels else None

    @property
    def device_pointer(self) -> int:
        """The address of the array of device handles; 0 if there are no channels."""
        return self._handles.device_pointer

    @functools.cached_property
    def semaphores(self) -> HandleArray:
        """The semaphores in the order of the channels, for a kernel that takes a pointer to semaphores."""
        handles = [channel.semaphore.device_handle for channel in self._channels]
        return HandleArray(self._runtime, self._device_memory, self.kind.semaphore_kind, handles, self._kept)

    def __repr__(self) -> str:
        return f"<{len(self)} channels to ranks {self.peers}>"


class DeviceSemaphores(Protocol):
    """Semaphores whose counters are in device memory, where reports read them."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The addresses and sizes of the counters, whose bytes `decode` takes."""

    def decode(self, words: bytes) -> Sequence[tuple[int, int, int, int, int]]:
        """Decodes the bytes at `ranges`. Returns for each semaphore: the peer, the semaphore's number, and the numbers
        of signals that arrived, that were waited for, and that were sent.
        """


class Inventory:
    """The live channels and semaphores of a rank, for its reports."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()
        self._semaphores: weakref.WeakValueDictionary[int, DeviceSemaphores] = weakref.WeakValueDictionary()

    def add_channel(self, channel_id: int, channel: Channel) -> None:
        self._channels[channel_id] = channel

    def add_semaphores(self, semaphores: DeviceSemaphores) -> None:
        self._semaphores[id(semaphores)] = semaphores

    def channels(self) -> list[Channel]:
        return [channel for reference in self._channels.valuerefs() if (channel := reference()) is not None]

    def semaphores(self) -> list[DeviceSemaphores]:
        return [found for reference in self._semaphores.valuerefs() if (found := reference()) is not None]
