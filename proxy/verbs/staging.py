"""Staging: pinned memory between RDMA and memory that the device can't register, and whether it is needed."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from proxyccl.device.errors import ResourceError, RuntimeUnavailableError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.verbs.endpoint import VerbsOptions
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registration, Registrations

ffi, lib = _engine.ffi, _engine.lib
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class StagedOptions:
    """A queue pair, and the staging area between it and memory that it can't reach (staged_transport.h).

    Attributes:
        wire: the queue pair; its `signal_rkey` is that of the peer's area.
        area: address of the own area: `staged_area_bytes` of zeroed pinned memory, registered.
        device_area: the GPU's address of the area.
        area_lkey: local key of the area.
        peer_area: address of the peer's area, as the peer registered it.
        ring_bytes: bytes of each of the two rings in an area; the same on both sides, and a multiple of 64.
        chunk_bytes: bytes of a put that are moved at a time.
        write_targets: address of the table of own memory that peers may write (`RemoteWriteTargets`).
        signals: address of the own words that the peer may signal.
        signals_bytes: bytes of those words.
    """

    wire: VerbsOptions
    area: int
    device_area: int
    area_lkey: int
    peer_area: int
    ring_bytes: int
    chunk_bytes: int
    write_targets: int
    signals: int
    signals_bytes: int


def register_device_memory(
    registrations: Registrations, runtime: Runtime, ptr: int, nbytes: int, allocation: Hashable = None
) -> Registration:
    """Registers memory of a runtime. Arguments and errors as for `Registrations.register`."""
    dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
    return registrations.register(ptr, nbytes, dmabuf, allocation=allocation)


def probe(registrations: Registrations, runtime: Runtime) -> Registration:
    """Registers a few bytes of a runtime's device memory and releases them. Returns that registration.

    Raises:
        ResourceError: the system or the device has no room.
        RuntimeUnavailableError: the RDMA device can't reach the runtime's device memory.
    """
    memory = runtime.allocate(_PROBE_BYTES)
    try:
        registration = register_device_memory(registrations, runtime, memory.ptr, memory.nbytes)
        registrations.release(registration)
        return registration
    finally:
        memory.close()


def unsupported_reason(registrations: Registrations, runtime: Runtime) -> str:
    """Why the RDMA device can't reach the runtime's device memory; empty if it can.

    Raises:
        ResourceError: the system or the device has no room.
    """
    try:
        probe(registrations, runtime)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""


class RemoteWriteTargets:
    """The ranges of own memory that peers may write by staged puts. Threads and engines share it.

    A peer names a range by its key. The engine refuses a key that has been removed.
    """

    def __init__(self) -> None:
        self._table = ffi.new("ProxycclRemoteWriteTarget[]", lib.PROXYCCL_STAGED_WRITE_TARGETS)
        self._free = deque(range(lib.PROXYCCL_STAGED_WRITE_TARGETS))  # the key that was removed first is used first
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """The table's address, for the engine; valid as long as this object lives."""
        return int(ffi.cast("uintptr_t", self._table))

    def add(self, ptr: int, nbytes: int) -> int:
        """Adds a range. Returns its key.

        Raises:
            ResourceError: the table is full.
        """
        with self._lock:
            if not self._free:
                raise ResourceError(
                    f"{lib.PROXYCCL_STAGED_WRITE_TARGETS} memories are registered for staged peers already"
                )
            key = self._free.popleft()
            lib.proxyccl_remote_write_target_set(self._table + key, ptr, nbytes)
            return key

    def remove(self, key: int) -> None:
        """Removes the range of a key. No trigger of a peer may name it any more."""
        with self._lock:
            lib.proxyccl_remote_write_target_set(self._table + key, 0, 0)
            self._free.append(key)


def staged_area_bytes(ring_bytes: int) -> int:
    """Bytes of a staging area with rings of that size."""
    return int(lib.PROXYCCL_STAGED_WORDS_BYTES) + 2 * ring_bytes


class StagingArea:
    """This rank's pinned memory of a staged connection: words that count both engines' progress, and two rings.

    Close it after the connection.

    Attributes:
        ring_bytes: bytes of each ring, on this side.
        chunk_bytes: bytes of a put that are moved at a time.
        registration: the registration by which the peer reaches it.

    Raises:
        ResourceError: the system or the device has no room.
        RuntimeUnavailableError: the device can't register the runtime's pinned memory.
    """

    def __init__(self, runtime: Runtime, registrations: Registrations, options: RdmaOptions) -> None:
        align = int(lib.PROXYCCL_STAGED_ALIGN)
        self.ring_bytes = options.staging_bytes // align * align
        self.chunk_bytes = options.staging_chunk
        self._memory = runtime.allocate_pinned(staged_area_bytes(self.ring_bytes))
        self._registrations = registrations
        try:
            self.registration = registrations.register(self._memory.host_ptr, self._memory.nbytes)
        except BaseException:
            self._memory.close()
            raise

    def engine_options(
        self,
        wire: VerbsOptions,
        peer_area: int,
        peer_ring_bytes: int,
        write_targets: RemoteWriteTargets,
        signals: int,
        signals_bytes: int,
    ) -> StagedOptions:
        """The options of a connection. Both sides use the smaller of their ring sizes.

        Args:
            wire: the queue pair, with the key of the peer's area.
            peer_area: address of the peer's area, as the peer registered it.
            peer_ring_bytes: bytes of each ring, on the peer's side.
            write_targets: own memory that the peer may write.
            signals: address of the own words that the peer may signal.
            signals_bytes: bytes of those words.
        """
        ring_bytes = min(self.ring_bytes, peer_ring_bytes)
        return StagedOptions(
            wire=wire,
            area=self._memory.host_ptr,
            device_area=self._memory.ptr,
            area_lkey=self.registration.lkey,
            peer_area=peer_area,
            ring_bytes=ring_bytes,
            chunk_bytes=min(self.chunk_bytes, ring_bytes // 2),
            write_targets=write_targets.address,
            signals=signals,
            signals_bytes=signals_bytes,
        )

    def close(self) -> None:
        """Frees it. No copy or request may be outstanding on it."""
        if not self._memory.closed:
            self._registrations.release(self.registration)
            self._memory.close()
