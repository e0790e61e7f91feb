"""The libfabric endpoints (rails) of an agent. Peers on other hosts use the rails to read and write the agent's
registered memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from proxyccl.channels.transfers.blocks import Rows, joined
from proxyccl.channels.transfers.copier import Stages, Table
from proxyccl.channels.transfers.device_memory import runtime_name
from proxyccl.channels.transfers.errors import NoPathError
from proxyccl.channels.transfers.regions import DRAM, Region, end_of, holder_of, outermost
from proxyccl.device.driver import Driver
from proxyccl.device.errors import DriverError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_driver
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.proxy.codec import Message, Uint32, Uint64
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.fabric.library import FabricOffer, choose_offers, fabric_offers
from proxyccl.proxy.placement import SYSFS, Place, process_numa_node
from proxyccl.proxy.registrations import RailRegistrations, Registration
from proxyccl.proxy.remote_options import FabricOptions

_ADAPTERS = Path("/sys/class/infiniband")
"""The directory in which the kernel lists adapters with RDMA, including EFA."""

_SOCKETS = frozenset({"tcp", "net", "sockets", "udp"})
"""libfabric's providers over sockets, which are not faster than an agent's own TCP links."""

_agents_at: defaultdict[Place, Iterator[int]] = defaultdict(itertools.count)
"""Counts, for each pair of a GPU and a NUMA node, the endpoints that this process has opened near them, so that
successive agents use different network interfaces.
"""


_MOST_RAILS = Meta(max_length=lib.PROXYCCL_AGENT_RAILS)
_ADDRESS_BYTES: int = lib.PROXYCCL_ADDRESS_BYTES


class Rails(Message, frozen=True):
    """The libfabric endpoints of an agent, one on each of its interfaces.

    Attributes:
        provider, format: the provider, and libfabric's number for the format of its addresses.
        addresses: the endpoints' addresses in that format.
    """

    provider: Annotated[str, Meta(max_length=256)]
    format: Uint32
    addresses: Annotated[list[Annotated[bytes, Meta(max_length=_ADDRESS_BYTES)]], _MOST_RAILS]

    @property
    def in_engine(self) -> bytes:
        """The addresses as the engine takes them."""
        return b"".join(address.ljust(_ADDRESS_BYTES, b"\0") for address in self.addresses)


class Key(Message, frozen=True):
    """The data that a peer needs to access a region by libfabric: the address of the region's first byte, and one key
    for each of the agent's rails.
    """

    region: Region
    address: Uint64
    keys: Annotated[list[Uint64], _MOST_RAILS]


class Keys:
    """The keys of one peer's regions. Any thread may use this object. `rails` is the number of the peer's rails."""

    def __init__(self, rails: int) -> None:
        self._rails = rails
        self._lock = threading.Lock()
        self._keys: dict[Region, Key] = {}
        self._sorted: tuple[Rows, Rows] | None = None

    def add(self, keys: Iterable[Key], replaced: Iterable[Region] = ()) -> None:
        """Removes the keys of the regions in `replaced`, then adds keys."""
        with self._lock:
            for region in replaced:
                self._keys.pop(region, None)
            self._keys.update((key.region, key) for key in keys if len(key.keys) == self._rails)
            self._sorted = None

    def find(self, addresses: Rows, nbytes: Rows, rails: int) -> tuple[Rows, Rows] | None:
        """Returns each block's address for requests, and its keys for the first `rails` rails as rows. Returns None if
        a block lies in no region with keys.
        """
        with self._lock:
            if self._sorted is None:
                rows = sorted(
                    (key.region.address, end_of(key.region), key.address, *key.keys) for key in self._keys.values()
                )
                table = np.array(rows, np.uint64).reshape(-1, 3 + self._rails)
                table = table[outermost(table[:, 1])]
                self._sorted = np.ascontiguousarray(table[:, 0]), table
            starts, table = self._sorted
        at = np.searchsorted(starts, addresses, "right") - 1
        if not len(starts) or (at < 0).any() or (table[at, 1] < addresses + nbytes).any():
            return None
        return addresses - table[at, 0] + table[at, 2], table[at, 3 : 3 + rails]


class AgentFabric:
    """The libfabric endpoints of one agent, one on each of its interfaces. Any thread may use the endpoints.

    Attributes:
        rails: the provider and the endpoints' addresses.
        interfaces: the names of the interfaces.
        ports: the engine's description of the endpoints.

    Args:
        options: the provider and its settings.
        driver: the driver of GPUs whose memory the provider should access if it can; None without GPUs.

    Raises:
        ArgumentError, ResourceError, RuntimeUnavailableError: the endpoints can't be opened.
    """

    def __init__(self, options: FabricOptions, driver: Driver | None) -> None:
        self._options = options
        offers = choose_agent_offers(fabric_offers(device_memory=driver is not None), options, driver)
        for offer in offers:
            if not offer.reads:
                raise RuntimeUnavailableError(f"{offer} does not read peers' memory")
        self._endpoints: list[FabricEndpoint] = []
        with contextlib.ExitStack() as undo:
            for offer in offers:
                self._endpoints.append(FabricEndpoint(offer, options, waits=True))
                undo.callback(self._endpoints[-1].close)
            self._registrations = RailRegistrations(self._endpoints)
            undo.callback(self._registrations.close)
            self.rails = Rails(*offers[0].kind, [endpoint.raw_address for endpoint in self._endpoints])
            self._closing = undo.pop_all()  # closes all endpoints, even if closing one fails
        self.interfaces = [offer.domain for offer in offers]
        self._lock = threading.Lock()
        self._registered: dict[Region, Registration] = {}
        self._ended: deque[tuple[Registration, object]] = deque()  # registrations of unused stages
        self._unreached: dict[int, str] = {}  # by device, the reason why the provider can't access the device's memory
        parts = ("endpoint", "queue", "fabric", "peers", "descriptor")
        ports = [
            {name: getattr(each.parts, name) for name in parts}
            | {"depth": each.depth, "max_message": each.offer.max_message}
            for each in self._endpoints
        ]
        self.ports = ffi.new("ProxycclFabricPort[]", ports)

    def reaches(self, theirs: Rails | None) -> bool:
        """Returns whether a peer has endpoints of the same provider."""
        mine = self.rails
        return theirs is not None and (theirs.provider, theirs.format) == (mine.provider, mine.format)

    def register(self, regions: Iterable[Region], runtimes: Mapping[Region, Runtime]) -> None:
        """Registers those regions that aren't registered yet, except regions in device memory that the provider can't
        access. `runtimes` has the runtime of each region in device memory. Raises the errors of
        `FabricEndpoint.register`.
        """
        with self._lock:
            for region in regions:
                if not region.nbytes or region in self._registered:
                    continue
                try:
                    made = self._register(region, runtimes.get(region))
                except RuntimeUnavailableError as error:
                    if region.kind == DRAM:
                        raise
                    self._unreached[region.device] = str(error)
                    continue
                self._registered[region] = made

    def _register(self, region: Region, runtime: Runtime | None) -> Registration:
        if runtime is None:
            return self._registrations.register(region.address, region.nbytes)
        if runtime.name != "host" and runtime.pointer_device(region.address) is None:
            raise RuntimeUnavailableError(f"device {region.device}: its driver does not know the memory")
        return self._registrations.register_of(runtime, self._options.gpu_writes, region.address, region.nbytes)

    def deregister(self, regions: Iterable[Region]) -> None:
        """Deregisters those of the regions that are registered."""
        self._release_ended()
        with self._lock:
            for region in regions:
                made = self._registered.pop(region, None)
                if made is not None:
                    self._registrations.release(made)

    def stages(self, table: Table) -> Stages:
        """Registers pinned staging buffers, until nothing refers to the result. Raises the errors of
        `FabricEndpoint.register`.
        """
        self._release_ended()
        made, stages = self._registrations.register(table.ptr, table.nbytes), Stages()
        stages.fields = {
            "by_fabric": 1,
            "base": made.address,
            "descriptors": self._descriptors(made),
            "keys": list(made.keys),
        }
        # The finalizer only queues the registration for release, because its thread may hold any lock. The finalizer
        # also keeps the memory from being reused before the release, because a late write of a peer may still arrive in
        # this memory.
        forks.finalizer(stages, self._ended.append, (made, table))
        return stages

    def _release_ended(self) -> None:
        for registration, _ in take_each(self._ended):
            self._registrations.release(registration)

    def _descriptors(self, made: Registration) -> list[int]:
        return [endpoint.descriptor(rail) for endpoint, rail in zip(self._endpoints, made.rails, strict=True)]

    def keys(self, regions: Iterable[Region]) -> list[Key]:
        """Returns the keys of the regions that are registered."""
        with self._lock:
            found = [(region, self._registered[region]) for region in regions if region in self._registered]
        return [Key(region, made.address, list(made.keys)) for region, made in found]

    def requests(self, rows: Rows, holders: Sequence[Region], theirs: Keys, rails: int) -> Rows:
        """Makes libfabric requests, for the first `rails` rails, from rows of (local address, remote address, bytes).
        `holders` are the regions that contain the local blocks.

        Returns:
            uint64 of shape (N, 4 + 2 * rails): local address, remote address for libfabric, bytes, remote address, and
            the local descriptor and the remote key for each rail.

        Raises:
            NoPathError: memory of a block is not registered with libfabric, on this side or the peer's.
        """
        with self._lock:
            here = [self._registered[region] for region in holders if region in self._registered]
            descriptors = np.array([self._descriptors(each)[:rails] for each in here], np.uint64).reshape(-1, rails)
            unreached = "; ".join(dict.fromkeys(self._unreached.values()))
        there = theirs.find(rows[:, 1], rows[:, 2], rails)
        if len(here) < len(holders) or there is None:
            side = "the peer's" if len(here) == len(holders) else "this agent's"
            raise NoPathError(
                f"some of {side} memory is not registered with libfabric" + (f" ({unreached})" if unreached else "")
            )
        shift = there[0] - rows[:, 1]  # the difference is the same for all blocks of a region
        words = np.stack((descriptors[holder_of(rows[:, 0], holders)], there[1]), axis=2).reshape(len(rows), -1)
        merged = joined(np.column_stack((rows, shift, words)))
        columns = (merged[:, 0], merged[:, 1] + merged[:, 3], merged[:, 2], merged[:, 1], merged[:, 4:])
        return np.column_stack(columns)

    def close(self) -> None:
        """Closes the endpoints, which no transfer may still use."""
        self.deregister(list(self._registered))
        self._closing.close()


def choose_agent_offers(
    offers: list[FabricOffer], options: FabricOptions, driver: Driver | None, root: Path = SYSFS
) -> list[FabricOffer]:
    """Chooses the interfaces of a new agent: those nearest to the calling thread's current GPU or, if `driver` is None,
    to the NUMA node of the process; of named interfaces with IP addresses, the first ones. Successive agents of one
    place take equally near interfaces in turns. Distances are read from sysfs, which is mounted at `root`. Raises the
    errors of `choose_offers`.
    """
    gpu, first = None, os.getpid()  # the process id, if nothing else distinguishes the processes of this host
    if driver is not None:
        # A forked child can't call its parent's driver, but its agents can move the host's memory.
        with contextlib.suppress(DriverError):
            device = driver.current_device()
            gpu = driver.device(device).pci_address
            first = device if driver.device_count() > 1 else first
    near = Place(gpu, process_numa_node(root))
    number = first + next(_agents_at[near])
    return choose_offers(offers, options, near, local_rank=number, root=root, first_address=True)


def open_fabric(asked: bool) -> tuple[AgentFabric | None, str]:
    """Opens endpoints with the options of ``PROXYCCL_FABRIC``. If `asked` is false, opens endpoints only by a libfabric
    provider for RDMA adapters of this machine. Returns the endpoints, or None, and the reason why libfabric can't use
    the machine's adapters. The reason is "" if libfabric uses the adapters or the machine has none.

    Raises:
        ArgumentError, ResourceError, RuntimeUnavailableError: `asked` is true, but no endpoint can be opened.
    """
    if not asked and not (_ADAPTERS.is_dir() and os.listdir(_ADAPTERS)):
        return None, ""
    try:
        name = runtime_name()
        made = AgentFabric(FabricOptions.from_environment(), None if name == "host" else open_driver(name))
    except ProxyCCLError as error:
        if asked:
            raise
        return None, str(error)
    if not asked and not _SOCKETS.isdisjoint(made.rails.provider.split(";")):
        made.close()
        return None, f"libfabric offers nothing better than its provider {made.rails.provider}"
    return made, ""
