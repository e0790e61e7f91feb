"""Staging: pinned memory between the network device and memory that this device can't register."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from proxyccl.device.errors import ResourceError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

STAGING_BYTES = range(4096, (64 << 20) + 1)
"""Bytes of pinned memory per peer and direction."""

STAGING_CHUNK = range(64, (32 << 20) + 1)
"""Bytes of a put that are staged at a time."""

Registration = TypeVar("Registration")


MOST_WIRES: int = lib.PROXYCCL_STAGED_WIRES
"""The most wires of a staged connection."""


class StagedWire(Struct, frozen=True):
    """A wire of a staged connection.

    Attributes:
        options: of the wire's own transport; signals go to the peer's area there.
        area_key: key of this rank's area for the wire's own requests.
        peer_area: address by which the wire names the peer's area.
        peer_area_key: the key that goes with it.
        number: of this rank's end. Wires to several peers that have the same end are served by one thread.
    """

    options: Any
    area_key: int
    peer_area: int
    peer_area_key: int
    number: int


class StagedOptions(Struct, frozen=True):
    """Wires, and the staging area between them and memory that they can't reach (staged_transport.h).

    Attributes:
        wires: at least one, and at most `MOST_WIRES`; the peer has them in the same order.
        ends: number of this side's endpoints, of which the peer may use fewer.
        credits_tell: whether a message that the peer has credited is complete on its wire.
        area: address of this rank's area: `staged_area_bytes` of zeroed pinned memory, registered.
        device_area: the GPU's address of the area.
        ring_bytes: bytes of each of the two rings in an area; the same on both sides, and a multiple of 64.
        chunk_bytes: bytes of a put that are moved at a time.
        write_targets: address of the table of this rank's memory that peers may write (`RemoteWriteTargets`).
        signals: address of this rank's words that the peer may signal.
        signals_bytes: bytes of those words.
    """

    wires: tuple[StagedWire, ...]
    ends: int
    credits_tell: bool
    area: int
    device_area: int
    ring_bytes: int
    chunk_bytes: int
    write_targets: int
    signals: int
    signals_bytes: int


class RemoteWriteTargets:
    """The ranges of this rank's memory that peers may write by staged puts and read by staged gets. Threads and
    engines share it.

    A peer names a range by its key. The engine refuses a key that has been removed.
    """

    def __init__(self) -> None:
        self._table = ffi.new("ProxycclRemoteWriteTarget[]", lib.PROXYCCL_STAGED_WRITE_TARGETS)
        self._free = deque(range(lib.PROXYCCL_STAGED_WRITE_TARGETS))  # the key that was removed first is reused first
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """The table's address, for the engine; valid as long as this object lives."""
        return int(ffi.cast("uintptr_t", self._table))

    def add(self, ptr: int, nbytes: int, host_ptr: int = 0) -> int:
        """Adds a range, which the CPU reaches at `host_ptr` if that is not 0. Returns its key.

        Raises:
            ResourceError: the table is full.
        """
        with self._lock:
            if not self._free:
                raise ResourceError(
                    f"{lib.PROXYCCL_STAGED_WRITE_TARGETS} memories are registered for staged peers already"
                )
            key = self._free.popleft()
            lib.proxyccl_remote_write_target_set(self._table + key, ptr, nbytes, host_ptr)
            return key

    def remove(self, key: int) -> None:
        """Removes the range of a key. Peers' triggers must no longer name it."""
        with self._lock:
            lib.proxyccl_remote_write_target_set(self._table + key, 0, 0, 0)
            self._free.append(key)


def staged_area_bytes(ring_bytes: int) -> int:
    """Bytes of a staging area with rings of that size."""
    return int(lib.PROXYCCL_STAGED_WORDS_BYTES) + 2 * ring_bytes


class Registrar(Protocol[Registration]):
    """Registers the host's memory with the wire's device."""

    def register(self, ptr: int, nbytes: int) -> Registration:
        """Registers a range."""
        ...

    def release(self, registration: Registration) -> None:
        """Ends that."""
        ...


class StagingArea(Generic[Registration]):
    """This rank's pinned memory of a staged connection: words that count both engines' progress, and two rings.

    Close it after the connection.

    Args:
        runtime: allocates it.
        registrars: register it, one for each wire.
        ring_bytes: bytes of each ring, on this side.
        chunk_bytes: bytes of a put that are moved at a time.

    Attributes:
        ring_bytes: of each ring.
        registrations: the registrations by which the peer reaches it, in that order.

    Raises:
        ResourceError: the system or the device has no room.
        RuntimeUnavailableError: the device can't register the runtime's pinned memory.
    """

    def __init__(
        self, runtime: Runtime, registrars: Sequence[Registrar[Registration]], ring_bytes: int, chunk_bytes: int
    ) -> None:
        align = int(lib.PROXYCCL_STAGED_ALIGN)
        self.ring_bytes = ring_bytes // align * align
        self._chunk_bytes = chunk_bytes
        self._memory = runtime.allocate_pinned(staged_area_bytes(self.ring_bytes))
        self.registrations: list[Registration] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.close)
            for registrar in registrars:
                registration = registrar.register(self._memory.host_ptr, self._memory.nbytes)
                undo.callback(registrar.release, registration)
                self.registrations.append(registration)
            self._close = undo.pop_all().close

    def engine_options(
        self,
        wires: Sequence[StagedWire],
        credits_tell: bool,
        peer_ring_bytes: int,
        write_targets: RemoteWriteTargets,
        signals: range,
    ) -> StagedOptions:
        """The options of a connection. Both sides use the smaller of their ring sizes.

        Args:
            wires: as in `StagedOptions`.
            credits_tell: likewise.
            peer_ring_bytes: bytes of each ring, on the peer's side.
            write_targets: this rank's memory that the peer may write.
            signals: addresses of this rank's words that the peer may signal.
        """
        ring_bytes = min(self.ring_bytes, peer_ring_bytes)
        return StagedOptions(
            wires=tuple(wires),
            ends=len(self.registrations),
            credits_tell=credits_tell,
            area=self._memory.host_ptr,
            device_area=self._memory.ptr,
            ring_bytes=ring_bytes,
            chunk_bytes=min(self._chunk_bytes, ring_bytes // 2),
            write_targets=write_targets.address,
            signals=signals.start,
            signals_bytes=len(signals),
        )

    def close(self) -> None:
        """Frees it. No copy or request may be outstanding on it."""
        if not self._memory.closed:
            self._close()
