"""An agent's endpoint of libfabric: registered memory that peers on other hosts read and write by their adapters."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from proxyccl.channels.transfers.blocks import Rows, joined
from proxyccl.channels.transfers.copier import Stages, Table
from proxyccl.channels.transfers.device_memory import runtime_name
from proxyccl.channels.transfers.errors import NoPathError
from proxyccl.channels.transfers.regions import DRAM, Region, holder_of, outermost
from proxyccl.device.errors import ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.runtime import Runtime
from proxyccl.proxy._transfers import ffi
from proxyccl.proxy.codec import Message, ProtocolError, Uint64
from proxyccl.proxy.fabric.endpoint import ADDRESS, FabricEndpoint
from proxyccl.proxy.fabric.library import choose_offer, fabric_offers
from proxyccl.proxy.registrations import Registration
from proxyccl.proxy.remote_options import FabricOptions

_ADAPTERS = Path("/sys/class/infiniband")
"""Adapters with RDMA, EFA among them."""

_SOCKETS = frozenset({"tcp", "net", "sockets", "udp"})
"""Providers that are not faster than the agents' own TCP."""


class Key(Message, frozen=True):
    """The names of a region in peers' requests to libfabric: the address of its first byte, and its key."""

    region: Region
    address: Uint64
    key: Uint64


class Keys:
    """The keys of one peer's regions. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Region, Key] = {}
        self._sorted: tuple[Rows, Rows] | None = None

    def add(self, keys: Iterable[Key], replaced: Iterable[Region] = ()) -> None:
        """Forgets the keys of replaced regions, then adds keys."""
        with self._lock:
            for region in replaced:
                self._keys.pop(region, None)
            self._keys.update((key.region, key) for key in keys)
            self._sorted = None

    def find(self, addresses: Rows, nbytes: Rows) -> tuple[Rows, Rows] | None:
        """Returns the request addresses and the keys of blocks; None if a block is in no region with a key."""
        with self._lock:
            if self._sorted is None:
                chosen = [self._keys[region] for region in outermost(self._keys)]
                rows = [
                    (key.region.address, key.region.address + key.region.nbytes, key.address, key.key) for key in chosen
                ]
                table = np.array(rows, np.uint64).reshape(-1, 4)
                self._sorted = np.ascontiguousarray(table[:, 0]), table
            starts, table = self._sorted
        at = np.searchsorted(starts, addresses, "right") - 1
        if not len(starts) or (at < 0).any() or (table[at, 1] < addresses + nbytes).any():
            return None
        return addresses - table[at, 0] + table[at, 2], table[at, 3]


class AgentFabric:
    """The endpoint of one agent. Any thread may use it.

    Attributes:
        endpoint: libfabric's endpoint.
        address: the endpoint's address for peers.
        raw: the address as libfabric encodes it.

    Args:
        options: the provider and its settings.
        devices: whether the provider should reach memory of devices, if it can.

    Raises:
        ArgumentError, ResourceError, RuntimeUnavailableError: the endpoint can't be opened.
    """

    def __init__(self, options: FabricOptions, *, devices: bool) -> None:
        self._options = options
        offers = fabric_offers(device_memory=devices)
        self.endpoint = FabricEndpoint(choose_offer(offers, options), options, waits=True)
        if not self.endpoint.offer.reads:
            self.endpoint.close()
            raise RuntimeUnavailableError(f"{self.endpoint.offer} does not read peers' memory")
        self.address = self.endpoint.address
        self.raw = ADDRESS.decode(self.address, "this agent").address
        self._lock = threading.Lock()
        self._registered: dict[Region, Registration] = {}
        self._ended: deque[tuple[Registration, object]] = deque()  # registrations of stages that are no longer in use
        self._unreached: dict[int, str] = {}  # by device, the reason why the provider can't reach its memory
        parts, offer = self.endpoint.parts, self.endpoint.offer
        named = {name: getattr(parts, name) for name in ("endpoint", "queue", "fabric", "peers", "descriptor")}
        limits = {"depth": self.endpoint.depth, "max_message": offer.max_message}
        self.port = ffi.new("ProxycclFabricPort *", {**named, **limits})

    @property
    def provider(self) -> str:
        """Libfabric's name of the provider."""
        return self.endpoint.offer.provider

    def reaches(self, address: bytes) -> bool:
        """Whether a peer has an endpoint of the same provider."""
        try:
            theirs = ADDRESS.decode(address, "the peer") if address else None
        except ProtocolError:
            return False
        mine = self.endpoint.offer
        return theirs is not None and (theirs.provider, theirs.format) == (mine.provider, mine.address_format)

    def register(self, regions: Iterable[Region], runtimes: Mapping[Region, Runtime]) -> None:
        """Registers regions that aren't registered yet, except those of devices that the provider does not reach.
        `runtimes` are the runtimes of the regions in device memory. Errors as for `FabricEndpoint.register`.
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
        """Registers a region. Raises the errors of `RegistrationCache.register_of`, and RuntimeUnavailableError for
        memory that the driver does not know.
        """
        if runtime is None:
            return self.endpoint.register(region.address, region.nbytes)
        if runtime.name != "host" and runtime.pointer_device(region.address) is None:
            raise RuntimeUnavailableError(f"device {region.device}: its driver does not know the memory")
        return self.endpoint.register_of(runtime, self._options.gpu_writes, region.address, region.nbytes)

    def deregister(self, regions: Iterable[Region]) -> None:
        """Deregisters the regions, skipping unregistered ones."""
        self._release_ended()
        with self._lock:
            for region in regions:
                made = self._registered.pop(region, None)
                if made is not None:
                    self.endpoint.release(made)

    def stages(self, table: Table) -> Stages:
        """Registers memory that stages copies of device memory, until nothing refers to the result. Errors as for
        `FabricEndpoint.register`.
        """
        self._release_ended()
        made, stages = self.endpoint.register(table.ptr, table.nbytes), Stages()
        stages.fields = {
            "by_fabric": 1,
            "descriptor": self.endpoint.descriptor(made),
            "key": made.key,
            "base": made.address,
        }
        # A finalizer releases nothing itself, because its thread may hold any lock. The table is not reused before the
        # registration is released, because a peer's late write may still land there.
        forks.finalizer(stages, self._ended.append, (made, table))
        return stages

    def _release_ended(self) -> None:
        for registration, _ in take_each(self._ended):
            self.endpoint.release(registration)

    def keys(self, regions: Iterable[Region]) -> list[Key]:
        """Returns the keys of the regions that are registered."""
        with self._lock:
            found = [(region, self._registered[region]) for region in regions if region in self._registered]
        return [Key(region, made.address, made.key) for region, made in found]

    def requests(self, rows: Rows, holders: Sequence[Region], theirs: Keys) -> Rows:
        """Makes the requests for rows of (local address, remote address, bytes), whose local blocks `holders` hold.

        Returns:
            shape (N, 6): local address, remote address as requests name it, bytes, local descriptor, remote key, remote
            address.

        Raises:
            NoPathError: some memory of either side is not registered with libfabric.
        """
        with self._lock:
            here = [self._registered[region] for region in holders if region in self._registered]
            descriptors = np.array([self.endpoint.descriptor(each) for each in here], np.uint64)
            unreached = "; ".join(dict.fromkeys(self._unreached.values()))
        there = theirs.find(rows[:, 1], rows[:, 2])
        if len(here) < len(holders) or there is None:
            side = "the peer's" if len(here) == len(holders) else "this agent's"
            raise NoPathError(
                f"some of {side} memory is not registered with libfabric" + (f" ({unreached})" if unreached else "")
            )
        shift = there[0] - rows[:, 1]  # constant for the blocks of a region
        merged = joined(np.column_stack((rows, descriptors[holder_of(rows[:, 0], holders)], there[1], shift)))
        columns = (merged[:, 0], merged[:, 1] + merged[:, 5], *merged[:, 2:5].T, merged[:, 1])
        return np.column_stack(columns)

    def close(self) -> None:
        """Closes the endpoint. The endpoint must no longer be in use."""
        self.deregister(list(self._registered))
        self.endpoint.close()


def open_fabric(asked: bool) -> tuple[AgentFabric | None, str]:
    """Opens an endpoint, with the options of ``PROXYCCL_FABRIC_…``, if this machine has a suitable adapter; if `asked`,
    by any provider. Otherwise returns None and the reason why libfabric can't use this machine's adapters, or "" if
    there are no adapters.

    Raises:
        ArgumentError, ResourceError, RuntimeUnavailableError: `asked`, and the endpoint can't be opened.
    """
    if not asked and not (_ADAPTERS.is_dir() and os.listdir(_ADAPTERS)):
        return None, ""
    try:
        made = AgentFabric(FabricOptions.from_environment(), devices=runtime_name() != "host")
    except ProxyCCLError as error:
        if asked:
            raise
        return None, str(error)
    if not asked and not _SOCKETS.isdisjoint(made.provider.split(";")):
        made.close()
        return None, f"libfabric offers nothing better than its provider {made.provider}"
    return made, ""
