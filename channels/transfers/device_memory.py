"""Shares an agent's memory with other processes of its host, and maps other agents' memory."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.copier import Copier
from proxyccl.channels.transfers.errors import NoPathError
from proxyccl.channels.transfers.regions import Region, holder_of
from proxyccl.device.base_runtime import Memory, StreamLike
from proxyccl.device.errors import ArgumentError, ProxyCCLError, ResourceError
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.handle_kinds import sharing_of
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.process import forks
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import find_runtime, open_driver, open_runtime
from proxyccl.proxy.codec import Message


class Share(Message, frozen=True, weakref=True):
    """The handle with which other processes of this host map a region, and the device of the region.

    Attributes:
        place: a name of the physical device, which is the same in all processes of the machine; "host" for host memory.
        handle: a memory handle, of the device's runtime or of `SharedMemory`.
    """

    region: Region
    place: Annotated[str, Meta(max_length=256)]
    handle: Annotated[bytes, Meta(max_length=1024)]


def runtime_name() -> str:
    """Returns the name of the default runtime: ``PROXYCCL_RUNTIME``, else the runtime found on this machine."""
    return os.environ.get("PROXYCCL_RUNTIME") or find_runtime()


class Devices:
    """The copiers of the devices that an agent's transfers use, each made at its first use.

    Any thread may use this object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copiers: dict[tuple[str, int], Copier] = {}

    def copier(self, device: int, name: str | None = None, runtime: Runtime | None = None) -> Copier:
        """Returns the copier of the device with this number in this process, of `runtime`, of the runtime `name`, or of
        the default runtime.

        Raises:
            ArgumentError: there is no such device.
            RuntimeUnavailableError: the machine does not offer the runtime.
        """
        if runtime is not None:
            name = runtime.name
        name = name or runtime_name()
        with self._lock:
            found = self._copiers.get((name, device))
            if found is None:
                found = self._copiers[name, device] = Copier(runtime or open_runtime(name, device))
            return found

    def of(self, share: Share) -> Copier:
        """Returns the copier of the device of a region that this process owns."""
        return self.copier(share.region.device, share.place.partition(":")[0])

    def of_stream(self, stream: StreamLike) -> Copier:
        """Returns the copier of the stream's device, if the stream has a `device_index`, as torch's streams do;
        otherwise the copier of the device that the agent used first. Raises the errors of `copier`.
        """
        named = getattr(stream, "device_index", None)
        with self._lock:
            used = next(iter(self._copiers), (None, 0))
        return self.copier(*(used[::-1] if named is None else (int(named), used[0])))

    def nearest(self, share: Share) -> Copier:
        """Returns a copier for copies between host memory and a region: the copier of the region's own device, if this
        device is visible in this process, otherwise the copier of any device with peer access. Raises NoPathError if no
        device can access the region.
        """
        name = share.place.partition(":")[0]
        if name == "host":
            return self.copier(0, name)
        driver = open_driver(name)
        numbers = range(driver.device_count())
        same = [number for number in numbers if driver.device(number).device_id == share.place]
        for number in same or numbers:
            copier = self.copier(number, name)
            if copier.runtime.can_access_peer(share.place):
                return copier
        raise NoPathError(f"no device of this process reaches {share.place}")

    def share(self, region: Region, runtime: Runtime | None = None) -> Share:
        """Exports a region for other processes, until nothing refers to the result.

        Raises:
            ArgumentError: the region is not memory of its device, or can't be exported.
            RuntimeUnavailableError: the machine does not offer the runtime.
        """
        runtime = runtime or self.copier(region.device).runtime
        owner = runtime.pointer_device(region.address)
        if owner != region.device:
            raise ArgumentError("memory", f"{region.address:#x} is not memory of {runtime.name} device {region.device}")
        self.copier(region.device, runtime=runtime)
        serve()  # lets agents in other PID namespaces map the region
        share = Share(region, runtime.device_id, runtime.export(region.address, region.nbytes))
        forks.finalizer(share, runtime.end_export, share.handle)
        return share


class NotSharedError(NoPathError):
    """The region can't be mapped, because its owner did not share it or deregistered it, or another region replaced
    it."""


class Reached:
    """One agent's shared regions, which this process maps at their first use. Device memory is mapped in the context of
    the device that copies, because copies in another context are slower than the link.

    Any thread may use this object.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shares: dict[Region, Share] = {}
        self._mapped: dict[Region, dict[Copier | None, Memory | SharedMemory]] = {}  # by the current shares

    def add(self, shares: Iterable[Share], replaced: Iterable[Region] = ()) -> None:
        """Removes the shares of the regions in `replaced`, then adds shares. A region that was registered again has a
        new share; memory mapped by the old share stays mapped while transfers use it."""
        with self._lock:
            before = {region: self._shares.pop(region) for region in self._shares.keys() & replaced}
            for share in shares:
                before.setdefault(share.region, self._shares.get(share.region, share))
                self._shares[share.region] = share
            for region, old in before.items():
                if self._shares.get(region) != old:
                    self._mapped.pop(region, None)

    def of(self, regions: Iterable[Region]) -> list[Share]:
        """Returns the shares of those regions that have one."""
        with self._lock:
            shares = self._shares
            return [shares[region] for region in regions if region in shares] if shares else []

    def share(self, region: Region) -> Share:
        """Returns the share of a region. Raises NotSharedError if the region has none."""
        with self._lock:
            if region in self._shares:
                return self._shares[region]
        raise NotSharedError(f"the region at {region.address:#x} was deregistered, or replaced by another one")

    def map(
        self, copier: Copier | None, addresses: Rows, holders: Sequence[Region]
    ) -> tuple[Rows, list[Memory | SharedMemory], str]:
        """Maps the regions that contain blocks (`View.holders`), for a device or, if `copier` is None, for the CPU.

        Returns:
            The addresses of the blocks in the mapped memory, the objects that keep this memory mapped, and how it was
            shared, such as "IPC".

        Raises:
            NotSharedError: a region has no share.
            NoPathError: a region can't be mapped.
        """
        with self._lock:
            shares = [self.share(region) for region in holders]
            memories = [self._map(copier, share) for share in shares]
        shifts = [(memory.ptr - region.address) % 2**64 for memory, region in zip(memories, holders, strict=True)]
        ways = {sharing_of(share.handle) for share in shares if copier is not None}
        moved = addresses + np.array(shifts, np.uint64)[holder_of(addresses, holders)]
        return moved, memories, ", ".join(sorted(ways))

    def _map(self, copier: Copier | None, share: Share) -> Memory | SharedMemory:
        mapped = self._mapped.get(share.region, {})
        if copier in mapped:
            return mapped[copier]
        if copier is not None and not copier.runtime.can_access_peer(share.place):
            raise NoPathError(f"{copier.runtime.device_id} does not reach memory of {share.place}")
        try:
            opened = SharedMemory.open(share.handle) if copier is None else copier.runtime.open(share.handle)
        except ProxyCCLError as error:
            where = "" if copier is None else f"memory at {share.region.address:#x} of {share.place} can't be mapped: "
            raise NoPathError(f"{where}{error}") from None
        self._mapped.setdefault(share.region, {})[copier] = opened
        return opened

    def close(self) -> None:
        """Unmaps all memory, which no transfer may still use."""
        with self._lock:
            for memory in itertools.chain.from_iterable(each.values() for each in self._mapped.values()):
                memory.close()
            self._shares, self._mapped = {}, {}


class Pinned:
    """An agent's regions of host memory that devices copy from or to. A region is pinned at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[Region, Memory | None] = {}

    def pin(self, copier: Copier, regions: Iterable[Region]) -> tuple[list[Memory], str]:
        """Pins regions. Returns the pinned memory, and the reason why a region can't be pinned, or "" if all are
        pinned.
        """
        memories, reason = [], ""
        with self._lock:
            for region in regions:
                if region not in self._pinned:
                    try:
                        self._pinned[region] = copier.runtime.pin(region.address, region.nbytes)
                    except ResourceError as error:
                        reason = str(error)
                        continue
                memory = self._pinned[region]
                if memory is not None:
                    memories.append(memory)
        return memories, reason

    def drop(self, regions: Iterable[Region]) -> None:
        """Removes regions that another agent has deregistered. Each region is unpinned when no transfer uses it."""
        with self._lock:
            for region in self._pinned.keys() & regions:
                del self._pinned[region]

    def forget(self, regions: Iterable[Region] | None = None) -> None:
        """Unpins the given regions, or all regions if `regions` is None. No transfer may still use these regions."""
        with self._lock:
            for region in list(self._pinned) if regions is None else self._pinned.keys() & regions:
                memory = self._pinned.pop(region)
                if memory is not None:
                    memory.close()
