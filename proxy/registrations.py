"""Registers a rank's memory for peers on other hosts: with an RDMA adapter, with libfabric, or, for staged transports,
as a range to which received data is copied.

The network adapter writes data to the GPU's memory and then a signal to host memory. The two writes take different
paths, so a kernel that has read the signal may still read old data, unless the GPU orders both writes. If the GPU does
not, the staged transports move the data through pinned host memory.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.device.memory.lease_cache import LeaseCache
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions, RemoteSetup

ffi, lib = _engine.ffi, _engine.lib

_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Registration:
    """A range of memory that is registered with a network device."""

    ptr: int  # the range's address in this process
    nbytes: int  # the range's size
    # The address of the range's first byte in peers' requests. This address equals `ptr` unless the memory is a DMA-BUF
    # or the provider takes offsets instead of addresses.
    address: int
    key: int  # key for peers' requests, by the first adapter
    local_key: int  # key for this rank's own requests, by the first adapter; 0 if libfabric's provider needs no key
    # Identifies the range's allocation among all others; None if the range stays registered only while in use.
    allocation: Hashable = None
    # For RDMA, how the memory is registered: "host", "peer memory" (the device takes the GPU's address itself) or
    # "dma-buf".
    how: str = ""
    region: Any = field(default=None, compare=False, repr=False)  # pyverbs' memory region, or the address of a fid_mr
    rails: tuple[Registration, ...] = ()  # the registrations with each of several adapters; () with one adapter

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys for peers' requests, by adapter."""
        return tuple(each.key for each in self.rails or (self,))

    @property
    def local_keys(self) -> tuple[int, ...]:
        """The keys for this rank's own requests, by adapter."""
        return tuple(each.local_key for each in self.rails or (self,))


class RegistrationCache:
    """The registrations of a device. All users of a range share one registration, which may be kept after the last use.
    The cache is thread-safe.

    A range whose allocation the caller named stays registered after its last use, for reuse. A range without a named
    allocation could not be distinguished from a later allocation at the same address. At most `KEEP` unused ranges,
    with at most `KEEP_BYTES` bytes in all, stay registered; the least recently used ranges are deregistered first. GPU
    memory of a registered range stays occupied even after the program has freed the memory.
    """

    KEEP, KEEP_BYTES = 64, 1 << 30

    def __init__(self) -> None:
        self._made: LeaseCache[tuple[int, int, Hashable], Registration] = LeaseCache(
            self._deregister, keep=self.KEEP, weigh=lambda made: made.nbytes, keep_weight=self.KEEP_BYTES
        )

    def register(self, ptr: int, nbytes: int) -> Registration:
        """Registers memory of the host. Raises the errors of `register_of`."""
        raise NotImplementedError

    def _deregister(self, registration: Registration) -> None:
        raise NotImplementedError

    def _acquire(self, ptr: int, nbytes: int, allocation: Hashable, make: Callable[[], Registration]) -> Registration:
        if not isinstance(ptr, int) or not 0 < ptr < 1 << 64:
            raise ArgumentError("ptr", f"must be an address, not {ptr!r}")
        if not isinstance(nbytes, int) or nbytes <= 0:
            raise ArgumentError("nbytes", f"must be positive, not {nbytes!r}")
        return self._made.acquire((ptr, nbytes, allocation), make)

    def release(self, registration: Registration) -> None:
        """Ends one use of a registration. After the last release, requests must no longer name the registration. Raises
        ArgumentError if the registration is not in use.
        """
        key = (registration.ptr, registration.nbytes, registration.allocation)
        try:
            self._made.release(key, keep=registration.allocation is not None)
        except KeyError:
            raise ArgumentError("registration", f"{registration} is not in use") from None

    def register_of(
        self, runtime: Runtime, gpu_writes: str, ptr: int, nbytes: int, allocation: Hashable = None
    ) -> Registration:
        """Registers memory of a runtime. Refuses memory of a GPU that does not order RDMA writes. The caller must pair
        each call with a `release`. `gpu_writes` is "auto" to ask the GPU's driver whether the GPU orders RDMA writes,
        or "ordered" if the caller promises the order.

        Raises:
            ArgumentError: the range is empty or invalid.
            ResourceError: the system or the device is out of memory or descriptors.
            RuntimeUnavailableError: the network adapter can't access this memory, or neither the driver nor
                `gpu_writes` promises that the GPU orders RDMA writes.
        """
        raise NotImplementedError

    def unsupported_reason(self, runtime: Runtime, gpu_writes: str) -> str:
        """Registers a few bytes of a runtime's device memory and releases them. Returns the text of the
        RuntimeUnavailableError that `register_of` raises; "" on success. Raises ResourceError.
        """
        memory = runtime.allocate(_PROBE_BYTES)
        try:
            self.release(self.register_of(runtime, gpu_writes, memory.ptr, memory.nbytes))
        except RuntimeUnavailableError as error:
            return str(error)
        finally:
            memory.close()
        return ""

    def close(self) -> None:
        """Deregisters all memory. No transfers from or to this memory may be in flight."""
        self._made.close()


class RailRegistrations(RegistrationCache):
    """A `RegistrationCache` for a rank with several adapters, which registers each range with all of them."""

    def __init__(self, rails: Sequence[RegistrationCache]) -> None:
        super().__init__()
        self._rails = rails

    def register(self, ptr: int, nbytes: int) -> Registration:
        return self._acquire(ptr, nbytes, None, lambda: self._make(lambda rail: rail.register(ptr, nbytes)))

    def register_of(
        self, runtime: Runtime, gpu_writes: str, ptr: int, nbytes: int, allocation: Hashable = None
    ) -> Registration:
        def make(rail: RegistrationCache) -> Registration:
            return rail.register_of(runtime, gpu_writes, ptr, nbytes)  # only this cache keeps unused ranges

        return self._acquire(ptr, nbytes, allocation, lambda: replace(self._make(make), allocation=allocation))

    def _make(self, register: Callable[[RegistrationCache], Registration]) -> Registration:
        made: list[Registration] = []
        with contextlib.ExitStack() as undo:
            for rail in self._rails:
                made.append(register(rail))
                undo.callback(rail.release, made[-1])
            first = made[0]
            for other in made:
                if (other.address, other.how) != (first.address, first.how):
                    raise RuntimeUnavailableError(
                        f"the rank's adapters register this memory differently: as {first.how} and as {other.how}"
                    )
            undo.pop_all()
        return replace(first, rails=tuple(made))

    def _deregister(self, registration: Registration) -> None:
        for rail, made in zip(self._rails, registration.rails, strict=True):
            rail.release(made)


def require_ordered(runtime: Runtime, gpu_writes: str, variable: str) -> None:
    """Raises RuntimeUnavailableError unless the GPU's driver or `gpu_writes` promises the order of RDMA writes.
    `variable` is the environment variable that can set `gpu_writes`.
    """
    if gpu_writes == "auto" and not runtime.orders_rdma_writes:
        raise RuntimeUnavailableError(
            f"{runtime.device_name} does not say that it orders RDMA writes to its memory before a signal in host "
            f"memory, so kernels could read old data; {variable}=gpu_writes=ordered promises that the platform does"
        )


class RemoteWriteTargets:
    """The ranges of this rank's memory that peers may write by staged puts and read by staged gets. Threads and engines
    may share a `RemoteWriteTargets`.

    A peer names a range by its key. The engine refuses a key that has been removed.
    """

    def __init__(self) -> None:
        # The ranges as an array for the engine. The array lives as long as this object.
        self.table: Any = ffi.new("ProxycclRemoteWriteTarget[]", lib.PROXYCCL_STAGED_WRITE_TARGETS)
        self._free = deque(range(lib.PROXYCCL_STAGED_WRITE_TARGETS))  # the free keys, in order of reuse
        self._lock = threading.Lock()

    def add(self, ptr: int, nbytes: int, host_ptr: int = 0) -> int:
        """Adds a range. `host_ptr` is the CPU's address of the range, or 0 if the CPU can't access the range. Returns
        the range's key. Raises ResourceError if the table is full.
        """
        with self._lock:
            if not self._free:
                raise ResourceError(
                    f"{lib.PROXYCCL_STAGED_WRITE_TARGETS} memories are registered for staged peers already"
                )
            key = self._free.popleft()
            lib.proxyccl_remote_write_target_set(self.table + key, ptr, nbytes, host_ptr)
            return key

    def remove(self, key: int) -> None:
        """Removes the range with this key. Peers' triggers must no longer name the key."""
        with self._lock:
            lib.proxyccl_remote_write_target_set(self.table + key, 0, 0, 0)
            self._free.append(key)


class RemoteDevice:
    """A network device that was opened for the rank `setup`. The direct and the staged transport of a network share one
    `RemoteDevice`.
    """

    options: RdmaOptions | FabricOptions  # the device's name and settings
    registrations: RegistrationCache  # the memory that is registered with the device

    def __init__(self, setup: RemoteSetup) -> None:
        self.setup = setup
        self.write_targets = RemoteWriteTargets()  # the memory that peers' staged puts may write
        self._homes = itertools.count(setup.local_rank)

    def next_home(self, rails: int) -> int:
        """Returns the number of the rail that carries a new connection's short operations. Connections take turns."""
        return next(self._homes) % rails

    def close(self) -> None:
        """Deregisters all memory and closes the device. All endpoints that use the device must be closed first."""
        raise NotImplementedError
