"""Registers memory for access by peers, and exchanges its handles."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from proxyccl.channels.calls._calls import NAMED_BY_PROXIES, RECEIVED_BY_PROXIES
from proxyccl.channels.device_memory import claims
from proxyccl.channels.group import Group, groups_beyond
from proxyccl.channels.ranks import as_rank
from proxyccl.channels.segment.control import MemoryPurpose
from proxyccl.channels.symmetric import Announced
from proxyccl.device.arguments.integers import find_extents, find_integer
from proxyccl.device.arrays import libraries
from proxyccl.device.arrays.array import Array, ArrayView, as_view, current_stream
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, ResourceError
from proxyccl.device.memory.handle_kinds import NOT_PASSED, passes_namespaces
from proxyccl.device.process import forks
from proxyccl.device.runtime import Memory
from proxyccl.proxy.codec import Codec, Message, Uint32, Uint64
from proxyccl.proxy.interface import ExposedMemory, Keys
from proxyccl.proxy.tables import windows_of
from proxyccl.proxy.transports.table import TRANSPORTS
from proxyccl.proxy.trigger import MAX_MEMORIES

MOST_BYTES = 1 << 47
"""The most bytes of an array: as many as a process can address."""
_SCHEDULE_IDS = MAX_MEMORIES * 3 // 4
"""The most memory ids of a proxy that peers' ranges take for schedules; the other ids are for channels."""


class _Offer(Message, frozen=True):
    """A rank's description of the memory that it registers."""

    nbytes: Uint64
    handle: bytes  # the handle by which ranks of the same host map the memory; empty if the memory can't be shared
    unshared_reason: str  # the reason why the memory can't be shared; empty if it can, or has no bytes
    # By remote transport, the address and the keys by which peers access the memory.
    exposed: dict[str, tuple[Uint64, Keys]]
    unsupported_reasons: dict[str, str]  # by remote transport, the reason why the transport can't access the memory


_numbers = itertools.count()
_OFFER = Codec(_Offer, 1 << 20, "memory offer")
_IDS = Codec[dict[int, Uint32]](dict[int, Uint32], 1 << 20, name="memory ids")


def require_room(shape: tuple[int, ...], dtype: DType) -> None:
    if dtype.itemsize * math.prod(shape) > MOST_BYTES or any(n > MOST_BYTES for n in shape):
        raise ResourceError(f"can't allocate {shape} of {dtype}: no memory has more than {MOST_BYTES} bytes")


def allocate(
    group: Group, shape: int | Sequence[int], dtype: Any, purpose: MemoryPurpose = "results", *, symmetric: bool = False
) -> Array:
    """Allocates an array in device memory, for one of the purposes of `Communicator.memory_usage`. If `symmetric` is
    true, peers' kernels can access the array. See `Communicator.empty`."""
    group.failure.require_usable()
    given = find_extents(shape)
    found = None if given is None else [find_integer(n) for n in given]
    dims = tuple(n for n in found or () if n is not None)
    if found is None or len(dims) < len(found):
        raise ArgumentError("shape", f"must be an integer or a sequence of integers, not {shape!r}")
    if any(n < 0 for n in dims):
        raise ArgumentError("shape", f"dimensions can't be negative: {dims}")
    element: DType = as_dtype(dtype)
    require_room(dims, element)
    nbytes = element.itemsize * math.prod(dims)
    take = group.symmetric.allocate if symmetric else group.device_memory.allocate
    array = Array(group.runtime, take(max(nbytes, 1), purpose), dims, element)
    array.address = array.ptr
    group.device_memory.add_array(array, purpose)
    return array


def register(
    group: Group, array: Any, *, symmetric: bool = False, reserved: bool = False, argument: str = "array"
) -> RegisteredMemory:
    """Registers an array on all ranks together, optionally as symmetric memory. See `Communicator.register`.

    Args:
        symmetric: whether collectives use the array in place.
        reserved: whether the array may take the memory ids that are reserved for the library's own memory.
        argument: the array's name in error messages.
    """
    group.failure.require_usable()
    if isinstance(array, RegisteredMemory):
        array.require_current()
        return array
    view = as_view(array, argument, gpu=group.runtime.name)
    if view.device[0] != group.runtime.name:
        raise ArgumentError(argument, f"lies on {view.device[0]}, the communicator uses {group.runtime.name}")
    with group.exchange.telling():
        return RegisteredMemory.exchange(group, view, symmetric, reserved=reserved)


def deregister(group: Group, array: Any) -> None:
    """Closes the registration of an array. See `Communicator.deregister`."""
    group.failure.require_own_process()
    if isinstance(array, RegisteredMemory):
        array.close()
        return
    view = as_view(array, "array", gpu=group.runtime.name)
    for shared in reversed(group.kept):
        if isinstance(shared, RegisteredMemory) and (shared.ptr, shared.nbytes) == (view.ptr, view.nbytes):
            shared.close()
            return
    raise ArgumentError("array", "the array is not registered")


class RegisteredMemory:
    """A range of memory on every rank, made by `Communicator.register`, which all ranks call together.

    The registration keeps the array alive until `close`, or until the communicator is closed, because peers may access
    the array even if this rank drops its references.

    Attributes:
        ptr: address of this rank's range.
        nbytes: size of this rank's range; other ranks' sizes may differ (`peer_nbytes`).
    """

    def __init__(
        self,
        group: Group,
        view: ArrayView,
        offers: list[_Offer],
        exposed: dict[str, ExposedMemory],
        announced: Announced | None,
    ) -> None:
        self._group = group
        self._owner = view.owner
        self._exposed = exposed
        self._announced = announced
        self._offers = offers
        handle = offers[group.rank].handle
        self._end_export = forks.finalizer(self, group.runtime.end_export, handle) if handle else None
        self._remote_ids: dict[int, int] = {}
        self._opened: dict[int, Memory] = {}
        self._id: int | None = None
        self._transport_ids: dict[str, int] = {}  # by transport, the id of this rank's range
        self._ids_at_peers: dict[int, int] = {}
        self._schedule_ids = 0
        self._number = -1 - next(_numbers)  # the range's number in `Calls`; announcements have the numbers from 0
        self._closed = False
        self._allocations = group.runtime.allocations(view.ptr, view.nbytes)
        self.ptr = view.ptr
        self.nbytes = view.nbytes

    @classmethod
    def exchange(cls, group: Group, view: ArrayView, symmetric: bool, *, reserved: bool = False) -> RegisteredMemory:
        """Registers the array of a view, and exchanges offers with all ranks. Memory that can't be shared can still be
        the source of a put.
        """
        handle, unshared_reason = b"", ""
        exposed: dict[str, ExposedMemory] = {}
        unsupported_reasons: dict[str, str] = {}
        if view.nbytes:
            try:
                handle = group.runtime.export(view.ptr, view.nbytes)
            except ArgumentError as error:
                unshared_reason = str(error)
        with contextlib.ExitStack() as undo:
            if handle:
                undo.callback(group.runtime.end_export, handle)
            if group.crosses_namespaces and handle and not passes_namespaces(handle):
                raise ArgumentError("array", f"peers or the node daemon are in other PID namespaces, and {NOT_PASSED}")
            for transport in group.links.remote.transports if view.nbytes else ():
                try:
                    exposed[transport] = group.links.remote.context.expose(view.ptr, view.nbytes, transport, handle)
                except ProxyCCLError as error:
                    unsupported_reasons[transport] = str(error)
            announced = group.symmetric.announce(view.ptr, view.nbytes) if symmetric else None
            named = {transport: (memory.address, memory.keys) for transport, memory in exposed.items()}
            offer = _Offer(view.nbytes, handle, unshared_reason, named, unsupported_reasons)
            memory = cls(group, view, group.exchange.all_gather(offer, _OFFER, "register"), exposed, announced)
            undo.pop_all()
        group.keep(memory)
        if symmetric and group.schedules_need_registration:
            memory._tell_ids(reserved)
        elif symmetric:
            group.symmetric.update(wait=True)
            group.exchange.barrier("register: all ranks have mapped it")
        return memory

    def _tell_ids(self, reserved: bool) -> None:
        """Adds the peers' ranges to this rank's proxy, and sends each peer the id of the peer's range. All ranks call
        this together. Only some of a proxy's memory ids are for registered ranges; if they are used up, schedules stage
        the data.
        """
        group = self._group
        peers = [peer for peer in range(group.world_size) if peer != group.rank]
        ids: dict[int, int] = {}
        wanted = sum(windows_of(self._offers[peer].nbytes) for peer in peers)
        if reserved or group.links.schedule_ids + wanted <= _SCHEDULE_IDS:
            self._schedule_ids = 0 if reserved else wanted
            group.links.schedule_ids += self._schedule_ids
            for peer in peers:
                with contextlib.suppress(ArgumentError):  # without an id, the peer's schedules stage the data
                    ids[peer] = self.peer_id(peer)
        answers = group.exchange.all_gather(ids, _IDS, "register: memory ids")
        self._ids_at_peers = {peer: answers[peer][group.rank] for peer in peers if group.rank in answers[peer]}
        if self.is_for_schedules:
            proxies = NAMED_BY_PROXIES | RECEIVED_BY_PROXIES
            group.launches.calls.set_reached(self._number, self.ptr, self.ptr + self.nbytes, None, proxies, 0, 0, None)

    @property
    def is_for_schedules(self) -> bool:
        """Whether schedules may use this rank's range: all peers' proxies have ids for it (`id_at`)."""
        return bool(self.nbytes) and len(self._ids_at_peers) == self._group.world_size - 1

    def id_at(self, peer: int) -> int:
        """Returns the memory id, in a peer's proxy, of the first 4 GiB of this rank's range. Requires
        `is_for_schedules`."""
        return self._ids_at_peers[peer]

    def __repr__(self) -> str:
        return f"<RegisteredMemory of {self.nbytes} bytes>"

    @property
    def array(self) -> Any:
        """This rank's registered array."""
        self._require_open()
        return self._owner

    @functools.cached_property
    def digest(self) -> int:
        """A number that identifies the ranges that the ranks have registered together; the same on all ranks."""
        ranges = msgspec.json.encode([(offer.nbytes, offer.handle, offer.exposed) for offer in self._offers])
        return int.from_bytes(hashlib.blake2b(ranges, digest_size=7).digest(), "little")

    @property
    def device_pointer(self) -> int:
        """The address of this rank's range, for a kernel's pointer parameter."""
        self._require_open()
        return self.ptr

    @property
    def id(self) -> int:
        """The memory id of the first 4 GiB of this rank's range, for triggers."""
        self._require_open()
        if self._id is None:
            handle = functools.partial(self._handle, self._group.rank)
            self._id = self._group.links.proxy.add_memory(self.ptr, self.nbytes, self._keys, handle=handle)
        return self._id

    def require_shared(self, argument: str) -> None:
        """Raises ArgumentError if any rank's range can't be mapped by other processes. All ranks raise the same
        error.
        """
        for rank, offer in enumerate(self._offers):
            if offer.unshared_reason and len(self._offers) > 1:
                raise ArgumentError(argument, f"rank {rank} can't share its memory: {offer.unshared_reason}")

    @property
    def private(self) -> bool:
        """Whether no other process can map this rank's range."""
        return bool(self.nbytes) and not self._offers[self._group.rank].handle

    @property
    def _keys(self) -> Keys:
        """The local keys for `id`: those of the first transport that has keys and uses the range's local address."""
        exposed = self._exposed.values()
        return next((memory.local_keys for memory in exposed if memory.copied and any(memory.local_keys)), ())

    def source_id(self, peer: int) -> int:
        """Returns the memory id of the first 4 GiB of this rank's range, for triggers to a peer. The result is `id`,
        unless the transport to the peer uses a different address or key for the range.
        """
        if peer == self._group.rank:
            return self.id
        transport = self._group.links.transport(peer)
        memory = self._exposed.get(transport)
        if memory is None or (memory.copied and (memory.local_keys == self._keys or not any(memory.local_keys))):
            return self.id
        self._require_open()
        if transport not in self._transport_ids:
            proxy = self._group.links.proxy
            if memory.copied:
                handle = functools.partial(self._handle, self._group.rank)
                first = proxy.add_memory(self.ptr, self.nbytes, memory.local_keys, handle=handle)
            else:
                first = proxy.add_remote_memory(memory.address, self.nbytes, memory.local_keys)
            self._transport_ids[transport] = first
        return self._transport_ids[transport]

    def peer_nbytes(self, peer: int) -> int:
        """Returns the size of a rank's range in bytes. Raises ArgumentError for a peer that is not a rank."""
        return self._offers[as_rank(self._group.world_size, peer, "peer")].nbytes

    def peer_id(self, peer: int) -> int:
        """Returns the memory id of the first 4 GiB of a peer's range, for triggers to that peer.

        Raises:
            ArgumentError: the peer's memory can't be shared.
            ResourceError: no memory ids are left.
            RuntimeUnavailableError: no transport reaches the peer.
        """
        peer = as_rank(self._group.world_size, peer, "peer")
        if peer == self._group.rank:
            return self.id
        if peer not in self._remote_ids:
            self._remote_ids[peer] = self._add(peer)
        return self._remote_ids[peer]

    def _add(self, peer: int) -> int:
        links, offer = self._group.links, self._offers[peer]
        proxy, transport = links.proxy, links.transport(peer)
        remote = TRANSPORTS[transport].remote
        if remote is None:
            handle = functools.partial(self._handle, peer)
            return proxy.add_memory(self.open(peer).ptr, offer.nbytes, handle=handle)
        for rank in (self._group.rank, peer) if not remote.stages else (peer,):
            reason = self._offers[rank].unsupported_reasons.get(transport)
            if reason:
                raise ArgumentError("memory", remote.refusal.format(rank=rank, reason=reason))
        address, keys = offer.exposed.get(transport, (0, ()))  # empty memory has no address and no keys
        return proxy.add_remote_memory(address, offer.nbytes, keys)

    def peer_ptr(self, peer: int) -> int:
        """Returns the address at which this rank's kernels access a peer's range.

        Raises:
            ArgumentError: the peer's memory can't be shared, or this rank's kernels can't access it.
        """
        peer = as_rank(self._group.world_size, peer, "peer")
        if peer == self._group.rank:
            return self.ptr
        self._group.topology.require_accessible([peer], "peer")
        return self.open(peer).ptr

    def open(self, peer: int) -> Memory:
        """Maps a peer's range on the first call, and returns the mapping."""
        self._require_open()
        if peer not in self._opened:
            handle = self._handle(peer)
            self._group.failure.check()  # a failed peer's memory may stay mappable for a moment
            with self._group.mapping_of(peer):
                self._opened[peer] = self._group.mappings.acquire(handle)
        return self._opened[peer]

    def _handle(self, rank: int) -> bytes:
        offer = self._offers[rank]
        if not offer.handle:
            reason = offer.unshared_reason or "it is empty"
            raise ArgumentError("memory", f"rank {rank} can't share its memory: {reason}")
        return offer.handle

    def require_current(self) -> None:
        """Raises ArgumentError if the array was freed, and ClosedError if the registration is closed."""
        self._require_open()
        if self._group.runtime.allocations(self.ptr, self.nbytes) != self._allocations:
            raise ArgumentError(
                "memory", f"the array at {self.ptr:#x} was freed; expected it to be deregistered before that"
            )

    @property
    def closed(self) -> bool:
        """Whether the registration is closed."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the registered memory is closed")

    def close(self) -> None:
        """Closes the registration and frees its memory ids. Kernels and triggers must no longer use the memory.

        Peers' memory stays mapped for a while, because peers may register it again.
        """
        if self._closed or self._group.failure.inherited:
            return
        self._closed = True
        if not self._group.failure.closed:  # discards prepared calls that hold the ids, because the ids may be reused
            self._group.launches.calls.unset_reached(self._number)
            self._group.launches.calls.forget(self.ptr, self.ptr + self.nbytes)
        self._group.links.schedule_ids -= self._schedule_ids
        service = self._group.links.proxy_if_started
        if service is not None:
            for first in (self._id, *self._transport_ids.values()):
                if first is not None:
                    service.remove_memory(first, self.nbytes)
            for peer, first in self._remote_ids.items():
                service.remove_memory(first, self.peer_nbytes(peer))
        for memory in self._exposed.values():
            self._group.links.remote.withdraw(memory)
        if self._announced is not None:
            self._group.symmetric.withdraw(self._announced)
        if self._end_export is not None:
            self._end_export()
        if not self._group.failure.closed:
            self._group.let_go(self, self._owner)
            for peer in self._opened:
                self._group.mappings.release(self._offers[peer].handle)
        self._opened.clear()
        self._owner = None


def _claimed(start: int, end: int, processes: set[bytes]) -> str:
    """Implements `claims`: memory that a group with a rank in another process has registered."""
    for shared in [each for other in groups_beyond(processes) for each in other.kept]:
        if isinstance(shared, RegisteredMemory) and shared.ptr < end and start < shared.ptr + shared.nbytes:
            return (
                f"memory at {start:#x} is registered with a communicator of other processes; expected deregister before"
            )
    return ""


claims.append(_claimed)
libraries.register(RegisteredMemory, lambda memory: current_stream(memory.array))
