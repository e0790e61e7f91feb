"""Agents: register memory that other agents may read and write by address, and transfer data to and from other agents'
memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from proxyccl.channels import array_libraries
from proxyccl.channels.device_memory import claims
from proxyccl.channels.timeouts import as_seconds, timeout_from
from proxyccl.channels.transfers.blocks import Rows, as_rows
from proxyccl.channels.transfers.checksums import UNREADABLE, checksums_of
from proxyccl.channels.transfers.device_memory import Devices, Pinned, Reached, Share
from proxyccl.channels.transfers.engine_calls import raise_status, wait_in_slices
from proxyccl.channels.transfers.errors import (
    DisconnectedError,
    NameTakenError,
    NotRegisteredError,
    TransferTimeoutError,
    UnknownAgentError,
)
from proxyccl.channels.transfers.fabric import AgentFabric, open_fabric
from proxyccl.channels.transfers.grants import (
    GRANT,
    BlocksOfHost,
    Fence,
    Found,
    Grant,
    GrantMessage,
    as_granted,
    find_blocks,
)
from proxyccl.channels.transfers.host_memory import share_of
from proxyccl.channels.transfers.ledger import LEDGER_BYTES, MOST_KEYS, Ledger, number_of
from proxyccl.channels.transfers.losses import event_of_losses
from proxyccl.channels.transfers.metadata import LONGEST_NAME, METADATA, Metadata, Place
from proxyccl.channels.transfers.paths import (
    FABRIC,
    Connecting,
    Link,
    Path,
    allowed_paths,
    open_listeners,
)
from proxyccl.channels.transfers.peers import Peer
from proxyccl.channels.transfers.preparing import Pair, Preparer, Side, kind_of
from proxyccl.channels.transfers.published import Published
from proxyccl.channels.transfers.regions import (
    DRAM,
    VRAM,
    Region,
    Regions,
    columns_of,
    holder_of,
    is_unicode,
    require_valid,
)
from proxyccl.channels.transfers.transfer import State, Transfer, has_ended, set_guard, set_label
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import Array, as_view
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, ResourceError
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.memory.descriptors import EXHAUSTED, out_of_descriptors
from proxyccl.device.memory.shared_memory import SharedMemory, find_range
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.shown_text import shown
from proxyccl.proxy._transfers import ffi, lib
from proxyccl.proxy.hosts import boot_id

if TYPE_CHECKING:
    from proxyccl.channels.transfers.copier import Copier
    from proxyccl.proxy._transfers import ProxycclAgentPointer, ProxycclStagingPointer

_CONNECT_SECONDS = 10.0
_LEAST_WORDS = 512
_LENGTHS = struct.Struct("=QQ")
_LOG = logging.getLogger("proxyccl.transfer")
_agents: weakref.WeakValueDictionary[int, Agent] = weakref.WeakValueDictionary()
"""The agents of this process, by `id`. Read it by `valuerefs`, which is atomic, because other threads may make agents
during the reading.
"""


class Agent:
    """Registers memory, and transfers blocks between this memory and other agents' memory.

    Agents form no group and have no ranks. Agents start and end at any time, and each knows only the agents that it has
    added by `add`. Transfers are one-sided: the program that reads or writes calls the agent, and the other program
    does nothing.

    Any thread may call any method. Use the agent as a context manager, or call `close`. A forked child must make its
    own agent.

    On a network without IP addresses, such as EFA, an agent uses the adapter that is nearest to the GPU that is current
    in the thread that makes the agent.

    Args:
        name: the name by which other agents refer to this agent, of at most 1024 characters.
        listen: the addresses or names of this host at which agents of other hosts can connect, where "0.0.0.0" stands
            for all IPv4 addresses and "::" for all IPv6 addresses; None for all addresses; () for none, so that only
            agents of this host can connect.
        paths: the paths that this agent's transfers may use, from "shared_memory", "process_vm", "unix", "fabric" and
            "tcp". None for the paths in ``PROXYCCL_TRANSFER_PATHS``, separated by commas, or if that isn't set all
            paths ("fabric" only if there is an RDMA adapter). Connecting to a peer fails if none of the paths leads to
            the peer.
        timeout: the longest that connecting or a call of `wait` may take, in seconds; None for ``PROXYCCL_TIMEOUT``, or
            if that isn't set 30 s.

    Attributes:
        name: the agent's name.
        timeout: the time-out in seconds.

    Raises:
        ArgumentError: a name, address, path or time-out is invalid.
        ResourceError: no file descriptor or thread is left.
        RuntimeUnavailableError: `paths` names "fabric", but libfabric can't be used.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: Sequence[str] | None = None,
        paths: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        longest = LONGEST_NAME
        if not isinstance(name, str) or not 1 <= len(name) <= longest or "\0" in name or not is_unicode(name):
            raise ArgumentError(
                "name", f"must be a text of 1 to {longest} characters that UTF-8 has, not {name!r:.100}"
            )
        array_libraries.keep_opaque(Agent)
        self.name = name
        self.timeout = timeout_from(timeout)
        allowed, named = allowed_paths(paths)
        self._lock = threading.RLock()
        self._closing = threading.RLock()  # reentrant: a signal handler may call `close`
        self._own = Regions()
        self._peers: dict[str, Peer] = {}
        self._kept: dict[Region, list[object]] = {}
        self._ledger = Ledger.make()
        serve()  # lets agents in other PID namespaces map the ledger
        self._devices = Devices()
        self._reached, self._pinned = Reached(), Pinned()
        self._serving: dict[Copier, ProxycclStagingPointer] = {}
        served: list[object] = []
        self._keep_serving = served.append
        ledger_address = int(ffi.cast("uintptr_t", self._ledger.pointer))
        self._ledger_region = Region(ledger_address, LEDGER_BYTES)
        self._internal = {self._ledger_region}  # this agent's regions that the program has not registered
        self._idle_words: deque[tuple[Region, NDArray[np.uint64], Transfer]] = deque()
        self._closed = False
        self._process = forks.here()
        self._token, secret = os.urandom(lib.PROXYCCL_SECRET_BYTES), os.urandom(lib.PROXYCCL_SECRET_BYTES)
        self._published = Published(name)
        log = ffi.cast("ProxycclTransferLog *", self._published.log.ptr)
        served.append(self._published.log)
        losses = event_of_losses(self._unmap_lost)
        listeners, addresses = open_listeners(self._token, listen)
        descriptors = ffi.new("int[]", [each.detach() for each in listeners])
        handle = lib.proxyccl_agent_create(
            name.encode(), self._token, secret, "process_vm" in allowed, descriptors, len(descriptors), losses, log
        )
        if not handle:
            if ffi.errno in EXHAUSTED:
                raise out_of_descriptors("an agent", ffi.errno)
            raise ResourceError(f"an agent can't be started: {os.strerror(ffi.errno)}")
        self._handle: ProxycclAgentPointer = handle
        forks.finalizer(self, _release, handle, served)
        _agents[id(self)] = self
        forks.finalizer(self, self._published.withdraw).atexit = True  # runs at exit if the agent is open
        self._published.write(())
        wants = FABRIC in allowed and (named or len(listeners) > 1)
        self._fabric, self._no_fabric = open_fabric(named) if wants else (None, "")
        if self._fabric is not None:
            served.append(self._fabric)
            if status := lib.proxyccl_agent_set_fabric(handle, self._fabric.ports, len(self._fabric.ports)):
                raise ResourceError(f"an agent can't use libfabric: {os.strerror(status)}")
        self._preparer = Preparer(name, handle, self._devices, self._reached, self._pinned, self._fabric, allowed)
        fabric = None if self._fabric is None else self._fabric.rails
        secret_address = lib.proxyccl_agent_secret(handle)
        self._place = Place(
            boot_id(),
            self._process.pid,
            addresses,
            secret,
            secret_address,
            fabric,
            self._ledger.handle,
            ledger_address,
        )
        # Agents that can't map the ledger read it through the link. So the ledger has no libfabric key, which would pin
        # its pages.
        self._begin([self._ledger_region], {})

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, {len(self.regions)} regions, {len(self._peers)} peers)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the agent: closes its links, and cancels its active transfers. If two threads call this, both return
        when the agent is closed.
        """
        self._process.require("the agent")
        with self._closing:
            with self._lock:
                self._closed = True
                peers = list(self._peers.values())
                self._peers.clear()
            lib.proxyccl_agent_stop(self._handle)
            for peer in peers:
                peer.leave()
            self._ledger.revoke_all()
            self._pinned.forget()
            self._reached.add((), self._own.all)
            self._drop_pins_of_others(self._own.all)
            self._ledger.close()
            if self._fabric is not None:
                self._fabric.close()
            self._published.withdraw()

    # Memory

    def register(self, memory: Any, *, label: str = "", device: int = 0, kind: str | None = None) -> Region:
        """Registers memory, which other agents may then read and write, and which this agent's transfers may use.

        Args:
            memory: a writable, C-contiguous array in host or GPU memory, an array made by ProxyCCL, or (address, bytes)
                of memory that the caller keeps mapped. The agent keeps an array alive until it is deregistered.
            label: a name by which other agents can find the region.
            device: only if `memory` is (address, bytes): the device's number or, for host memory, any number that the
                caller chooses.
            kind: only if `memory` is (address, bytes): "dram" or None for host memory, "vram" for device memory.

        Raises:
            ArgumentError: `memory` is neither an array nor (address, bytes), or is device memory that can't be shared
                with other processes.
            RuntimeUnavailableError: this machine does not offer the device's runtime.
        """
        owner: object = None
        runtime: Any = None
        if isinstance(memory, tuple):
            address, nbytes = (as_integer(each, "memory", "must be (address, bytes)", 0, 2**63 - 1) for each in memory)
        else:
            if kind is not None:
                raise ArgumentError(
                    "kind", "is for addresses; an array knows its own device, so leave this argument out"
                )
            view = as_view(memory, "memory")
            if not view.writable:
                raise ArgumentError("memory", "the array is read-only")
            owner, address, nbytes = view, view.ptr, view.nbytes
            if isinstance(memory, Array):
                runtime = memory.runtime
            if runtime is not None or view.device[0] != "host":
                kind, device = VRAM, max(0, view.device[1])
        region = Region(address, nbytes, device, kind or DRAM, label)
        self._register([region], runtime)
        if owner is not None:
            with self._lock:
                self._kept.setdefault(region, []).append(owner)
        return region

    def register_regions(self, regions: Sequence[Region]) -> None:
        """Registers all of the regions or, if one can't be registered, none. The caller must keep the regions' memory
        mapped.

        Raises:
            ArgumentError, RuntimeUnavailableError: a region can't be registered (see `register`).
        """
        self._register(regions, None)

    def _register(self, regions: Sequence[Region], runtime: Any) -> None:
        shares: list[Share] = []
        copiers: dict[Region, Copier] = {}
        mapped: dict[Region, SharedMemory] = {}
        for region in regions:
            require_valid(region)
            if not region.nbytes:  # an array without elements may have no address
                continue
            if region.kind == VRAM:
                shares.append(self._devices.share(region, runtime))
                copiers[region] = self._devices.of(shares[-1])
            memory = find_range(region.address, region.nbytes)
            if memory is not None:
                mapped[region] = memory
                if region.kind == DRAM:
                    shares.append(share_of(region, memory))
        with self._lock:
            self._require_open()
            for copier in copiers.values():
                if copier not in self._serving:
                    self._serving[copier], kept = copier.staging(None if self._fabric is None else self._fabric.stages)
                    self._keep_serving(kept)
            if self._fabric is None:
                self._begin(regions, mapped)
            else:  # with the lock held, because `deregister` keeps only regions in `_own`
                with contextlib.ExitStack() as undo:
                    undo.callback(self._fabric.deregister, [region for region in regions if region not in self._own])
                    self._fabric.register(regions, {region: copier.runtime for region, copier in copiers.items()})
                    self._begin(regions, mapped)
                    undo.pop_all()
            if shares:
                self._reached.add(shares)

    def _begin(self, regions: Sequence[Region], mapped: Mapping[Region, SharedMemory]) -> None:
        own, ledger = self._own, self._ledger
        new, ended = dict.fromkeys(regions), []
        for region in own.among(new):
            if ledger.holds(own.number(region)):
                del new[region]
            else:  # the memory was freed
                ended.append(own.number(region))
        begun = ledger.begin(len(new)) if new else []
        numbers = dict(zip(new, begun, strict=True))
        try:
            if mapped:
                for region in mapped.keys() & numbers.keys():
                    ledger.watch(numbers[region], mapped[region].addresses())
            self._change_memory([region for region in new if region not in own] if ended else new, adds=True)
        except BaseException:
            ledger.end(begun)
            raise
        own.add(regions, numbers)
        if ended:
            ledger.end(ended)

    def deregister(self, *regions: Region) -> None:
        """Ends the registration of all of the regions or, if one isn't registered, of none. After `deregister` returns,
        no transfer through a socket of this agent accesses the regions, and peers on this host start no more copies of
        the regions. After `deregister`, a peer's CPU may still finish copying a piece of at most 1 MiB, a device may
        finish copies that are queued, and libfabric may finish requests that it has accepted.

        Raises:
            NotRegisteredError: a region is not registered.
        """
        with self._lock:
            self._require_open()
            removed = self._own.remove(regions)
            if removed is None:
                raise NotRegisteredError("a region is not registered")
            gone = removed.keys()
            self._ledger.end(list(removed.values()))
            self._change_memory(gone, adds=False)
            if self._fabric is not None:
                self._fabric.deregister(gone)
            self._reached.add((), gone)
            self._pinned.forget(gone)
            self._drop_pins_of_others(gone)
            for region in regions if self._kept else ():
                kept = self._kept.get(region)
                if kept:
                    del kept[0]
                if not kept:
                    self._kept.pop(region, None)

    def _drop_pins_of_others(self, regions: Iterable[Region]) -> None:
        """Unpins deregistered memory that other agents of this process have pinned, because the program may now free
        it.
        """
        for reference in _agents.valuerefs():
            agent = reference()
            if agent is not None and agent is not self:
                agent._pinned.drop(regions)

    @property
    def regions(self) -> list[Region]:
        """The registered regions, in the order of registration."""
        with self._lock:
            return [region for region in self._own.all if region not in self._internal]

    def _change_memory(self, regions: Collection[Region], *, adds: bool) -> None:
        """Tells the engine that peers may, or may no longer, access regions through sockets."""
        for serving in (None, *self._serving) if regions else ():
            device = None if serving is None else serving.runtime.device
            rows = [
                value
                for region in regions
                if (region.device if region.kind == VRAM else None) == device
                for value in (region.address, region.nbytes)
            ]
            if not rows:
                continue
            staging = ffi.NULL if serving is None else self._serving[serving]
            if lib.proxyccl_agent_change_memory(self._handle, staging, rows, len(rows) // 2, adds):
                raise MemoryError("there is no memory for the regions")

    # Grants

    def grant(
        self,
        blocks: Any,
        *,
        lease: float | None = None,
        key: int | None = None,
        writes: bool = False,
        checksums: bool = False,
    ) -> Grant:
        """Lets others read, or write, blocks of this agent's registered memory until the grant is revoked. Send the
        grant's bytes, `Grant.encoded`, to the peers, which pass them to `read`, `write` or `prepare`. If the owner
        revokes the grant while a transfer is active, the transfer raises StaleReadError or StaleWriteError.

        With a grant for reads, the memory must not change before the grant is revoked. With a grant for writes, no byte
        arrives after `Grant.revoke` has returned True, even if a writer was killed. Deregistering memory revokes no
        grant.

        Args:
            blocks: integers of shape (N, 2): address and bytes of each block. The blocks must be registered, and must
                not overlap.
            lease: the time in seconds after which `Grant.active` revokes the grant, and transfers of agents on this
                host raise StaleReadError or StaleWriteError; None for no limit. Peers that pass a key, but can't map
                this agent's ledger, notice only the revocation.
            key: an integer from 0 to 2^40 - 1 that peers may pass instead of `Grant.encoded`, so that they need not
                know the grant's bytes. The agent must never have used the key before. A grant with a key is revoked as
                a whole, and a peer that passes the key does not check that the grant contains its blocks.
            writes: whether the grant is for writes, rather than reads. Only agents of this host can write with a grant,
                to host memory.
            checksums: whether reads compare each block's CRC-32 with that of the block at the time of this call, and
                raise CorruptReadError if they differ. This is for links that may corrupt data, such as TCP between
                hosts. The blocks, and the memory into which readers read them, must be host memory. A read must contain
                whole granted blocks. Each side computes about 2 GB/s on one core. Not with `key` or `writes`.

        Raises:
            ArgumentError: `blocks`, `lease`, `key`, `writes` or `checksums` is invalid.
            NotRegisteredError: a block does not lie within registered memory.
            ResourceError: the agent has 980,000 registered regions and granted blocks, a grant is active whose key
                differs by a multiple of 65,536, or /proc is not mounted.
        """
        rows = as_granted(blocks)
        for name, value in (("writes", writes), ("checksums", checksums)):
            if not isinstance(value, bool):
                raise ArgumentError(name, f"must be True or False, not {value!r:.100}")
        if checksums and (writes or key is not None):
            raise ArgumentError("checksums", "must be False for a grant for writes, or with a key")
        ends = 0
        if lease is not None:
            ends = time.monotonic_ns() + int(1e9 * as_seconds(lease, "lease", "must be a positive number of seconds"))
        with self._lock:
            self._require_open()
            kind = kind_of(self._own, rows[:, 0], rows[:, 1], "local", "")
        if checksums and kind != DRAM:
            raise ArgumentError("checksums", "must be False for memory of a device")
        sums = checksums_of(rows) if checksums else np.empty(0, np.int64)
        if (sums == UNREADABLE).any():
            raise ArgumentError("blocks", f"block {sums.argmin()} in order of addresses lies in memory that was freed")
        with self._lock:
            self._require_open()
            if key is None:
                numbers = self._ledger.grant(len(rows))
            else:
                number = self._ledger.grant_by_key(_as_key(key, "key"), writes=writes, deadline=ends)
                numbers = np.full(len(rows), number, np.uint64)
        try:
            message = GrantMessage(
                "proxyccl-grant-3",
                self.name,
                self._token,
                self._place.host,
                writes,
                ends,
                np.column_stack((rows, numbers)).tobytes(),
                sums.astype(np.uint32).tobytes(),
            )
            return Grant(self._ledger, message)
        except BaseException:
            self._ledger.revoke(numbers)
            raise

    def _granted(
        self, grant: bytes | int, name: str, known: Peer | None, rows: Rows, writes: bool, local: str
    ) -> BlocksOfHost | Fence:
        """Finds a transfer's blocks in a grant. `local` is the kind of the local memory. Raises the errors of `prepare`
        for `grant`.
        """
        rows = rows.copy()  # the caller may change its array before the checks that follow the transfer
        ledger = self._ledger if known is None else known.ledger
        if isinstance(grant, bytes | bytearray | memoryview):
            message = GRANT.decode(bytes(grant), "an agent")
            found = find_blocks(message, rows, writes=writes)
            if message.token != (self._token if known is None else known.token):
                text = f"the grant is of a former agent {name}, which has ended"
                replace(found, owner=name).raise_stale(np.ones(len(rows), bool), text)
        else:
            number = number_of(_as_key(grant, "grant", "the bytes of a grant, or "), writes=writes)
            deadline = np.zeros(1, np.uint64) if ledger is None else ledger.deadline(number)
            found = Found(name, writes, rows, np.full(len(rows), number, np.uint64), number, deadline)
        if found.checksums is not None and local != DRAM:
            raise ArgumentError("grant", "has checksums, which are checked only for reads into host memory")
        if ledger is not None:
            try:
                of_host, no_words = BlocksOfHost(found, ledger), np.empty(0, np.uint64)
            except ArgumentError:  # the owner's descriptor, by which this process mapped the ledger before, is closed
                raise DisconnectedError(f"agent {name} has ended, so its grant can't be used", name) from None
            return of_host if known is None or found.checksums is None else Fence(found, of_host, None, no_words)
        assert known is not None
        numbers = np.unique(found.numbers)
        region, words = self._words_of(len(numbers))
        size = np.uint64(words.itemsize)
        at = np.uint64(known.place.ledger_address) + numbers % np.uint64(lib.PROXYCCL_LEDGER_WORDS) * size
        here = np.uint64(region.address) + np.arange(len(numbers), dtype=np.uint64) * size
        look = self.prepare("read", name, np.column_stack((here, at, np.full_like(at, size))))
        fence = Fence(found, None, look, words[: len(numbers)])
        forks.finalizer(fence, self._idle_words.append, (region, words, look))
        return fence

    def _words_of(self, count: int) -> tuple[Region, NDArray[np.uint64]]:
        """Returns at least `count` registered words of this agent, which no other fence uses and no transfer writes."""
        found = None
        for idle in list(take_each(self._idle_words)):
            if found is None and len(idle[1]) >= count and has_ended(idle[2], 0.0):
                found = idle[:2]
            else:
                self._idle_words.append(idle)
        if found is not None:
            return found
        words = np.zeros(max(count, _LEAST_WORDS), np.uint64)
        region = self.register(words)
        with self._lock:
            self._internal.add(region)
        return region, words

    # Other agents

    def metadata(self, regions: Iterable[Region] | None = None, *, place: bool = True) -> bytes:
        """Returns this agent's metadata, which other agents pass to `add`. Anyone who has the metadata may read and
        write this agent's memory.

        Args:
            regions: the regions to include; None for all.
            place: whether to include the agent's addresses. Metadata without addresses only add regions for peers that
                have already added this agent.

        Raises:
            NotRegisteredError: a region is not registered.
        """
        with self._lock:
            self._require_open()
            ledger = [self._ledger_region] * place
            if regions is None:
                columns, once = self._own.columns(without=self._internal.difference(ledger))
            else:
                once = list(dict.fromkeys(regions)) + ledger
                columns = columns_of(once, map(self._own.number, once))
                if not columns[3].all():
                    raise NotRegisteredError("a region is not registered")
            labels = [region.label for region in once]
            table = columns.tobytes(), labels if any(labels) else []
            keys = [] if self._fabric is None else self._fabric.keys(once)
            told = self._place if place else None
            said = Metadata("proxyccl-agent-5", self.name, self._token, told, *table, self._reached.of(once), keys)
            return METADATA.encode(said)

    def add(self, metadata: bytes) -> str:
        """Adds another agent, or more regions of an agent that was added. Does not communicate.

        Returns:
            The agent's name.

        Raises:
            MetadataError: the bytes are not metadata.
            ArgumentError: the metadata are this agent's own, or not bytes.
            UnknownAgentError: the metadata have no addresses, and their agent was not added before.
            NameTakenError: another agent of this name was added; call `remove` first.
        """
        if not isinstance(metadata, bytes | bytearray | memoryview):
            raise ArgumentError("metadata", f"must be bytes, not {type(metadata).__name__}")
        message = METADATA.decode(bytes(metadata), "an agent")
        if message.name == self.name:
            raise ArgumentError("metadata", f"are those of an agent of this one's name, {self.name!r}")
        with self._lock:
            self._require_open()
            peer = self._peers.get(message.name)
            if message.place is None and (peer is None or peer.token != message.token):
                raise _unknown(message.name)
            if peer is None:
                assert message.place is not None
                peer = self._peers[message.name] = Peer(message.token, message.place)
                peer.internal.add(Region(message.place.ledger_address, LEDGER_BYTES))
            elif (message.token, message.place or peer.place) != (peer.token, peer.place):
                raise NameTakenError(f"another agent of the name {message.name!r} was added", message.name)
            peer.know(message)
        return message.name

    def remove(self, name: str) -> None:
        """Forgets another agent, and closes the link to it. Active transfers with this agent end as lost.

        Raises:
            UnknownAgentError: no such agent was added.
            ActiveError: the agent was removed, but requests of a transfer to libfabric have not completed, so they may
                still write.
        """
        self._remove(name, None)

    def _remove(self, name: str, token: bytes | None) -> None:
        with self._lock:
            self._require_open()
            peer = self._peers.get(name)
            if token is not None and (peer is None or peer.token != token):
                return
            if peer is None:
                raise _unknown(name)
            del self._peers[name]
            peer.removed = True
        self._published.forget([name])
        self._publish_links()
        peer.leave()

    def remove_agent_of(self, metadata: bytes) -> None:
        """Removes the agent that made these metadata, if it was added. Does not remove another agent of the same name.

        Raises:
            MetadataError: the bytes are not metadata.
            ActiveError: the agent was removed, but requests of a transfer to libfabric have not completed.
        """
        message = METADATA.decode(metadata, "an agent")
        self._remove(message.name, message.token)

    @property
    def peers(self) -> list[str]:
        """The names of the agents that were added."""
        with self._lock:
            return list(self._peers)

    def regions_of(self, name: str) -> list[Region]:
        """Returns the known regions of another agent or, if `name` is this agent's name, this agent's regions.

        Raises:
            UnknownAgentError: no such agent was added.
        """
        with self._lock:
            known = self._known(name)
            internal = self._internal if known is None else known.internal
            return [region for region in self._regions(known).all if region not in internal]

    def connect(self, name: str) -> Path:
        """Connects to another agent, unless this agent is connected to it. Calling `connect` is optional, because the
        first transfer or message also connects.

        Returns:
            The path of transfers between host memory of the two agents.

        Raises:
            UnknownAgentError: no such agent was added.
            DisconnectedError: the agent can't be reached.
        """
        link = self._link(name, self._known(name))
        return Path("self") if link is None else link.path

    def lost(self, name: str) -> str:
        """Returns the reason why the link to another agent was lost; "" if it works or was not opened yet.

        Raises:
            UnknownAgentError: no such agent was added.
        """
        with self._lock:
            self._require_open()
            link = self._peer(name).link
        return "" if link is None else link.lost

    def find_side(self, name: str, rows: Rows, kind: str) -> tuple[Side, int | None]:
        """Returns a snapshot of an agent's registered memory of `kind`, for `prepare_checked`, and the index of the
        first row that is not registered, or None if all are. Rows are (address, bytes, device). `name` may be this
        agent's name. Raises UnknownAgentError.
        """
        with self._lock:
            known = self._known(name)
            regions = self._regions(known)
            first = len(rows)
            for device in set(rows[:, 2].tolist()):
                chosen = np.flatnonzero(rows[:, 2] == device)
                outside = regions.view(kind, device).find_outside(rows[chosen, 0], rows[chosen, 1])
                if outside is not None:
                    first = min(first, int(chosen[outside]))
            return Side(name, known, kind, regions.view(kind)), None if first == len(rows) else first

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise _unknown(name)
        return peer

    def _known(self, name: str) -> Peer | None:
        with self._lock:
            self._require_open()
            return None if name == self.name else self._peer(name)

    def _regions(self, peer: Peer | None) -> Regions:
        if peer is None:
            return self._own
        if ended := peer.forget_ended():
            self._pinned.drop(region for region in ended if region not in self._own)
        return peer.regions

    def _link(self, name: str, peer: Peer | None) -> Link | None:
        """Returns the link to a peer, opening it if necessary. Returns None if `peer` is None, which stands for this
        agent.

        Raises:
            UnknownAgentError: the agent was removed, even if another agent now has its name.
            DisconnectedError: the agent can't be reached.
        """
        with self._lock:
            self._require_open()
            if peer is None:
                return None
            if peer.removed:
                raise UnknownAgentError(f"agent {name!r} was removed", name)
            if peer.link is not None:
                return peer.link
        with peer.connecting:  # the agent's lock isn't held, because connecting may take long
            if peer.link is None:
                fabric = self._fabric if self._fabric and self._fabric.reaches(peer.place.fabric) else None
                deadline = time.monotonic() + min(self.timeout, _CONNECT_SECONDS)
                ledger, reason = _open_ledger(peer.place)
                with contextlib.ExitStack() as undo:
                    if ledger is not None:
                        undo.callback(ledger.close)
                    attempt = Connecting(
                        self._handle, name, peer.token, peer.place, self._preparer.paths, deadline, fabric, reason
                    )
                    link = attempt.connect()
                    undo.pop_all()
                self._warn_of_slow(link, peer.place.host)
                with self._lock:
                    peer.ledger, peer.link = ledger, link
                peer.unmap_lost()  # an earlier process of the peer may have ended
                if peer.removed:
                    peer.leave()
                _LOG.info("agent %s reaches agent %s by %s", shown(self.name), shown(name), link.path)
                self._publish_links()
        return peer.link

    def _unmap_lost(self) -> None:
        with self._lock:
            lost = {name: peer for name, peer in self._peers.items() if peer.link is not None and peer.link.lost}
        if lost:
            self._published.forget(lost)
            self._publish_links()
        for peer in lost.values():
            peer.unmap_lost()

    def _publish_links(self) -> None:
        with self._lock:
            links = [(name, peer.link) for name, peer in self._peers.items() if peer.link is not None]
        self._published.write((name, link.path) for name, link in links if not link.lost)

    def _warn_of_slow(self, link: Link, host: str) -> None:
        what = f"moves data to and from agent {link.peer} of the same host through a socket"
        self._preparer.warn_once(what, link.path.reason, 5)
        if link.path.name == "tcp" and host != boot_id():
            what = f"reaches agent {link.peer} by TCP, although this host has adapters with RDMA"
            self._preparer.warn_once(what, self._no_fabric, 5)

    # Transfers

    def prepare(self, operation: str, peer: str, blocks: Any, *, grant: bytes | int | None = None) -> Transfer:
        """Prepares a transfer, which can be started any number of times.

        Args:
            operation: "read" to copy from the peer's memory, "write" to copy to the peer's memory.
            peer: the other agent's name, or this agent's own.
            blocks: integers of shape (N, 3): local address, remote address, bytes. Both address ranges of each block
                must be registered. The blocks that are written must not overlap.
            grant: the bytes of the peer's `Grant`, whose blocks must contain the remote blocks, or the grant's key.

        Raises:
            ArgumentError: `operation` is neither "read" nor "write", `blocks` is not of shape (N, 3), or `grant` is not
                a key, or has checksums although the local memory is not host memory.
            MetadataError, NotGrantedError: `grant` is not a grant, does not contain a block, is for transfers in the
                other direction, or has checksums and contains a block only in part.
            StaleReadError, StaleWriteError: the grant's agent has ended, and `peer` is a later agent of that name.
            UnknownAgentError: no such agent was added.
            NotRegisteredError: a block lies outside registered memory.
            DisconnectedError: the peer can't be reached.
            NoPathError: no device of this process can access both sides' memory, and no socket connects to the peer; or
                the transfer is a write with a grant, and its path is none of "shared_memory", "process_vm" and "self".
        """
        if operation not in ("read", "write"):
            raise ArgumentError("operation", f'must be "read" or "write", not {operation!r}')
        rows = as_rows(blocks)
        known = self._known(peer)
        sides = self._sides(peer, rows)
        if known is not None and known.link is None:  # without a link, deregistered regions of the peer aren't known
            self._link(peer, known)
            sides = self._sides(peer, rows)
        return self.prepare_checked(operation == "write", rows, *sides, grant=grant)

    def _sides(self, peer: str, rows: Rows) -> tuple[Side, Side]:
        with self._lock:
            known = self._known(peer)
            regions = self._regions(known)  # stored once, because the agent's regions may change at any moment
            here = kind_of(self._own, rows[:, 0], rows[:, 2], "local", "")
            there = kind_of(regions, rows[:, 1], rows[:, 2], "remote", peer)
            return Side(self.name, None, here, self._own.view(here)), Side(peer, known, there, regions.view(there))

    def prepare_checked(
        self, writes: bool, rows: Rows, ours: Side, theirs: Side, *, grant: bytes | int | None = None
    ) -> Transfer:
        """Prepares a transfer as `prepare` does, from blocks that `find_side` has found to be registered on both sides.

        Raises:
            ArgumentError, MetadataError, NotGrantedError, StaleReadError, StaleWriteError: `grant` does not allow the
                transfer.
            UnknownAgentError: the other agent was removed, even if another agent now has its name.
            NotRegisteredError: memory of a block was deregistered since `find_side`, even if it was registered again.
            DisconnectedError, NoPathError: no path leads to the peer or its memory (see `prepare`).
        """
        name, known = theirs.name, theirs.peer
        link = self._link(name, known)
        moved = rows[rows[:, 2] > 0]
        with self._lock:
            here, here_rows = ours.holders(moved[:, 0], self._own)
            there, there_rows = theirs.holders(moved[:, 1], self._regions(known))
        kinds = (ours.kind, theirs.kind) if len(moved) else (DRAM, DRAM)
        apart = None
        if VRAM in kinds:
            apart = np.column_stack((holder_of(moved[:, 0], here), holder_of(moved[:, 1], there))).astype(np.uint64)
        is_granted_write = writes and grant is not None
        pair = Pair(link, known, name, writes, moved, kinds, (here, there), apart, is_granted_write)
        transfer = self._preparer.prepare(pair)
        set_guard(transfer, False, self._ledger, here_rows)
        ledger = self._ledger if known is None else known.ledger
        if ledger is not None:
            set_guard(transfer, True, ledger, there_rows)
        if grant is not None:
            self._granted(grant, name, known, rows, writes, kinds[0]).guard(transfer)
        return set_label(transfer, self._published.label(name, transfer.path.name))

    def read(
        self, peer: str, blocks: Any, *, message: bytes | None = None, grant: bytes | int | None = None
    ) -> Transfer:
        """Starts to read blocks of another agent's memory. Has the arguments and errors of `prepare` and
        `Transfer.start`."""
        return self.prepare("read", peer, blocks, grant=grant).start(message)

    def write(
        self, peer: str, blocks: Any, *, message: bytes | None = None, grant: bytes | int | None = None
    ) -> Transfer:
        """Starts to write blocks to another agent's memory. Has the arguments and errors of `prepare` and
        `Transfer.start`."""
        return self.prepare("write", peer, blocks, grant=grant).start(message)

    def wait(self, transfers: Iterable[Transfer], timeout: float | None = None) -> None:
        """Waits until all data of the given transfers has arrived.

        Args:
            transfers: started transfers.
            timeout: the longest wait for all transfers together, in seconds; None: the agent's time-out.

        Raises:
            TransferTimeoutError: a transfer is still active.
            DisconnectedError, NotRegisteredError, CanceledError, TransferError: a transfer failed or was canceled.
        """
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        deadline = time.monotonic() + bounded
        for transfer in transfers:
            if transfer.state is State.ACTIVE:
                transfer.wait(max(1e-6, deadline - time.monotonic()))
            else:
                transfer.done()

    # Messages

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message to another agent, or to this agent itself. Messages of one sender arrive in order.

        Args:
            peer: the name of the receiving agent, which may be this agent.
            message: at most 256 MiB.

        Raises:
            UnknownAgentError: no such agent was added.
            DisconnectedError: the agent has ended, or can't be reached.
            ArgumentError: the message is too long.
        """
        link = self._link(peer, self._known(peer))
        if link is None:
            raise_status(lib.proxyccl_agent_tell(self._handle, ffi.NULL, message, len(message)), peer)
        else:
            link.tell(message)

    def messages(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have arrived since the last call, in order, as (sender's name, message). A
        transfer's message arrives after the transfer's data.
        """
        self._process.require("the agent")
        taken: list[tuple[str, bytes]] = []
        unread = lib.proxyccl_agent_unread(self._handle)
        if not unread:
            return taken
        room = ffi.new("char[]", unread)
        data = bytes(ffi.buffer(room, lib.proxyccl_agent_take(self._handle, room, unread)))
        at = 0
        while at < len(data):
            name, message = _LENGTHS.unpack_from(data, at)
            start = at + _LENGTHS.size + name
            at = start + message
            taken.append((data[start - name : start].decode(errors="replace"), data[start:at]))
        return taken

    def wait_for_message(self, timeout: float | None = None) -> None:
        """Waits until `messages` would return a message.

        Raises:
            TransferTimeoutError: no message arrived within `timeout` seconds (None: the agent's time-out).
            ClosedError: the agent was closed.
        """
        bounded = self.timeout if timeout is None else timeout_from(timeout)
        self._process.require("the agent")
        if not wait_in_slices(lambda ns: lib.proxyccl_agent_wait(self._handle, ns), 0, bounded):
            self._require_open()
            raise TransferTimeoutError(f"agent {self.name}: no message came within {bounded:g} s")

    def _require_open(self) -> None:
        self._process.require("the agent")
        if self._closed:
            raise ClosedError(f"agent {self.name} was closed")


def _release(handle: ProxycclAgentPointer, served: list[object]) -> None:
    lib.proxyccl_agent_release(handle)
    for each in served:
        if isinstance(each, AgentFabric):
            each.close()


def _open_ledger(place: Place) -> tuple[Ledger | None, str]:
    if place.host != boot_id():
        return None, ""
    try:
        return Ledger.open(place.ledger), ""
    except ProxyCCLError as error:
        return None, f"its registrations can't be looked at: {error}"


def _as_key(value: Any, argument: str, otherwise: str = "") -> int:
    return as_integer(value, argument, f"must be {otherwise}a key from 0 to {MOST_KEYS - 1}", 0, MOST_KEYS - 1)


def _unknown(name: str) -> UnknownAgentError:
    return UnknownAgentError(f"no agent of the name {name!r} was added", name)


def _claimed(start: int, end: int, _: set[bytes]) -> str:
    """Implements `claims`: memory that an agent of this process has registered, and that peers may access any time."""
    agents = [agent for reference in _agents.valuerefs() if (agent := reference()) is not None and not agent._closed]
    for agent in agents:
        for region in agent.regions:
            if region.address < end and start < region.address + region.nbytes:
                return f"agent {agent.name!r} has registered {region}; expected deregister before"
    return ""


claims.append(_claimed)


def _forget() -> None:
    """Closes a forked child's copies of descriptors, so that peers notice the parent's end even if the child is still
    running.
    """
    for agent in _agents.values():
        lib.proxyccl_agent_forget(agent._handle)
    _agents.clear()


os.register_at_fork(after_in_child=_forget)
