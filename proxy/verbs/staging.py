"""Pinned memory that stands between RDMA and memory that the device can't register; and whether that is needed."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Hashable

from proxyccl.device.errors import ResourceError, RuntimeUnavailableError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import StagedOptions, VerbsOptions
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registration, Registrations

ffi, lib = _engine.ffi, _engine.lib
_PROBE_BYTES = 4096


def register_device_memory(
    registrations: Registrations, runtime: Runtime, ptr: int, nbytes: int, allocation: Hashable = None
) -> Registration:
    """Registers memory of a runtime; arguments and errors as of `Registrations.register`."""
    dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
    return registrations.register(ptr, nbytes, dmabuf, allocation=allocation)


def probe(registrations: Registrations, runtime: Runtime) -> Registration:
    """Registers and releases a little of a runtime's device memory, and tells how that was done.

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


def refusal(registrations: Registrations, runtime: Runtime) -> str:
    """Why the RDMA device can't reach the runtime's device memory; empty if it can.

    Raises:
        ResourceError: the system or the device has no room.
    """
    try:
        probe(registrations, runtime)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""


class Landings:
    """The ranges of own memory that peers may have data put in. Threads may share it, and engines look at it.

    A peer names a range by its key. What no longer is one is refused.
    """

    def __init__(self) -> None:
        self._table = ffi.new("ProxycclLanding[]", lib.PROXYCCL_STAGED_LANDINGS)
        self._free = deque(range(lib.PROXYCCL_STAGED_LANDINGS))  # in turn, so that a key that was given back rests
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Of the table, for the engine; good as long as this object lives."""
        return int(ffi.cast("uintptr_t", self._table))

    def add(self, ptr: int, nbytes: int) -> int:
        """A key for a range.

        Raises:
            ResourceError: there are too many.
        """
        with self._lock:
            if not self._free:
                raise ResourceError(f"{lib.PROXYCCL_STAGED_LANDINGS} memories are registered for staged peers already")
            key = self._free.popleft()
            lib.proxyccl_landing_set(self._table + key, ptr, nbytes)
            return key

    def remove(self, key: int) -> None:
        """Gives a key back. No trigger of a peer may name it any more."""
        with self._lock:
            lib.proxyccl_landing_set(self._table + key, 0, 0)
            self._free.append(key)


def staged_area_bytes(ring_bytes: int) -> int:
    """The size of an area with rings of that size."""
    return int(lib.PROXYCCL_STAGED_WORDS_BYTES) + 2 * ring_bytes


class StagingArea:
    """One end's pinned memory of a staged connection: the words by which both engines know how far they are, and two
    rings. Closed behind the connection.

    Attributes:
        ring_bytes: of each ring, as this end has it.
        chunk_bytes: of a put, are moved at a time.
        registration: by which the peer reaches it.

    Raises:
        ResourceError: there is no room.
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
        landings: Landings,
        signals: int,
        signals_bytes: int,
    ) -> StagedOptions:
        """What `ProxyService.connect_staged` wants. Of two ends that have rings of different sizes, both use the
        smaller.

        Args:
            wire: the queue pair, with the key of the peer's area.
            peer_area: the address that the peer has registered.
            peer_ring_bytes: its rings, as the peer has them.
            landings: own memory that the peer may have data put in.
            signals: address of the own words that the peer may signal.
            signals_bytes: their size.
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
            landings=landings.address,
            signals=signals,
            signals_bytes=signals_bytes,
        )

    def close(self) -> None:
        """Frees it. Nothing may be under way from or to it."""
        if not self._memory.closed:
            self._registrations.release(self.registration)
            self._memory.close()
