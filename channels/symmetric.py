"""Symmetric memory: arrays that the kernels of all peers can access, so that collectives use them in place.

A rank announces an array. Each peer maps the array, and replies with the address of its mapping. An array is symmetric
once all peers have replied. No rank waits for the replies: the kernels of a collective exchange the addresses at which
peers can access their outputs, so all ranks make the same choice (team.h).

Memory that this module keeps alive is freed only after its withdrawal. Memory of other allocators may be freed at any
time, and its address given to a new allocation. A rank therefore uses the peers' replies only while the address belongs
to the announced allocation.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from msgspec import Struct, field

from proxyccl.channels.calls._calls import NAMED_BY_PROXIES, RECEIVED_BY_PROXIES, Calls
from proxyccl.channels.device_memory import DeviceMemory
from proxyccl.channels.joining.meeting import Meeting
from proxyccl.channels.segment.announcements import (
    ENTRIES,
    LONGEST_HANDLE,
    MOST_RANKS,
    NO_MEMORY,
    UNREACHED,
    Announcements,
)
from proxyccl.channels.segment.control import MemoryPurpose
from proxyccl.device.errors import ProxyCCLError, ResourceError
from proxyccl.device.memory.allocation_guard import AllocationGuard
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.memory.memory_pool import MemoryPool
from proxyccl.device.process import forks
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.runtime import Memory
from proxyccl.proxy.daemon.client import Proxy
from proxyccl.proxy.tables import windows_of
from proxyccl.proxy.trigger import MAX_MEMORIES

_RESERVED_ENTRIES = 64  # more than the number of staging buffers: three kinds, each with one size per power of two


class Export(Struct):
    """A range of this rank's memory that was exported."""

    start: int  # the address of the range
    end: int  # the first address after the range
    handle: bytes  # the handle by which peers map the range
    guard: AllocationGuard  # checks that the range still lies in the allocations that were exported

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Announced(Export):
    """A range of this rank's memory that is announced."""

    entry: int  # the range's number in the table
    # An object that keeps the range from being freed until no peer maps it; None if the owner may free the range at any
    # time.
    memory: object = None
    users: int = 1  # the number of `announce` calls that have not been withdrawn
    proxy_memory: int | None = None  # the id, in this rank's proxy, of the range's first 4 GiB; None without an id
    for_proxies: bool = False  # whether peers' proxies were asked to add the range
    # Whether the library announced the range unasked (lent_memory.py); calls by proxy then do not wait for the peers'
    # replies.
    lent: bool = False
    # How peers can access the range, as last passed to `Calls`.
    known: tuple[list[int] | None, int, bool] = (None, 0, False)
    # The other groups that announce the range until this group withdraws the range, each with its announcement.
    heirs: list[tuple[weakref.ref[SymmetricMemory], Announced]] = field(default_factory=list)

    @property
    def ids(self) -> int:
        """The number of memory ids that the range takes in a proxy."""
        return windows_of(self.nbytes)

    @property
    def has_ids(self) -> bool:
        """Whether a proxy has ids for the range, or peers were asked to assign ids."""
        return self.for_proxies or self.proxy_memory is not None


class _Handled(Struct):
    """This rank's mapping of one entry of a peer's table of announcements."""

    version: int = 0  # the entry's version that was handled last
    handle: bytes = b""  # the handle of the mapped memory; b"" if nothing is mapped
    mapped: Memory | None = None  # the mapped memory
    # The id, in this rank's proxy, of the memory's first 4 GiB; None before the memory has an id.
    memory: int | None = None
    told: bool = False  # whether this rank has sent the peer the id or NO_MEMORY


def _note_end(symmetric: weakref.ref[SymmetricMemory], announced: Announced) -> None:
    """Makes the next update of a range's group withdraw the range.

    This finalizer takes no lock, because Python may collect garbage in a thread that holds a lock or waits for the node
    daemon.

    The reference to the group is weak, because the traceback of a failed group's exception may keep the array alive. If
    the group is gone, only the groups that inherited the range are notified.
    """
    alive = symmetric()
    if alive is not None and alive.note_end(announced):
        return
    heirs, announced.heirs = announced.heirs, []
    for heir, same in heirs:
        _note_end(heir, same)


class SymmetricArrayMemory:
    """Memory of `Communicator.empty`, which is freed once it is withdrawn and all peers have unmapped it."""

    def __init__(self, memory: Memory, symmetric: SymmetricMemory, announced: Announced) -> None:
        self.ptr, self.nbytes = memory.ptr, memory.nbytes
        self._process, self._symmetric, self._announced = forks.here(), weakref.ref(symmetric), announced
        self._finalizer = forks.finalizer(self, _note_end, self._symmetric, announced)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Withdraws the memory, which no queued work may still use."""
        alive = self._symmetric()
        if alive is None:
            self._finalizer()
        elif self._finalizer.detach() is not None and self._process.is_here:
            alive.withdraw(self._announced)


class SymmetricMemory:
    """One rank's announcements, and its mappings of its peers' announced memory.

    Args:
        meeting: the ranks.
        mappings: maps the memory of peers.
        calls: the calls of the group, whose table of ranges this object updates.
        device_memory: allocates this rank's memory.

    Attributes:
        offered: whether this rank's announcements reach all ranks: the ranks share a host, and are at most MOST_RANKS.
        freed: a queue of the addresses of lent ranges that their owners have freed.
    """

    def __init__(self, meeting: Meeting, mappings: HandleCache, calls: Calls, device_memory: DeviceMemory) -> None:
        self._runtime, self._mappings, self._calls = meeting.runtime, mappings, calls
        self._device_memory = device_memory
        self._own = meeting.control.announcements
        self._topology, self._rank = meeting.topology, meeting.topology.rank
        peers = {peer: segment.announcements for peer, segment in meeting.segments.items()}
        self._numbers = {peer: number for number, peer in enumerate(sorted({*peers, self._rank}))}
        self._world_size = self._topology.world_size
        self.offered = len(self._numbers) == self._world_size and self._world_size <= MOST_RANKS
        self._peers = peers if self.offered else {}  # if not offered, no rank announces memory
        self._lock = threading.RLock()  # guards the fields below, except the mappings
        self._announced: dict[int, Announced] = {}
        self._unsettled: dict[int, Announced] = {}  # ranges for which replies of peers or their proxies are missing
        self._free = list(range(ENTRIES - 1, -1, -1))
        self.withdrawn: dict[int, object] = {}  # withdrawn memory, by entry; released when all peers have unmapped it
        self._ended: deque[Announced] = deque()  # ranges of collected arrays; needs no lock
        self._pool: MemoryPool | None = None
        self._pool_changes = -1  # the pool's change count when it was last handled
        self._following = threading.Lock()  # guards `_segments`
        self._segments: dict[int, Announced | None] = {}  # the pool's segments, by number; None: not exportable
        self.freed: deque[int] = deque()
        self._closed = False
        self._mapping = threading.Lock()  # guards `_seen` and `_handled`
        self._proxy: Proxy | None = None
        self._adding = threading.Lock()  # guards `Announced.proxy_memory`; unlike `_lock`, no watcher waits for it
        self._seen = dict.fromkeys(peers, 0)  # the change count of each peer's table when last handled
        self._handled: dict[tuple[int, int], _Handled] = {}  # by peer and entry number

    def allocate(self, nbytes: int, purpose: MemoryPurpose, *, reserved: bool = False) -> Memory:
        """Returns device memory, and announces it unless the table is full or peers can't map the memory.

        Args:
            purpose: the purpose in the account of the group's memory.
            reserved: whether to allow one of the entries that are reserved for staging memory.

        Raises:
            ResourceError: the device has no memory left.
        """
        try:
            memory = self._device_memory.allocate(nbytes, purpose)
        except ResourceError:  # retries even if another thread has let withdrawn memory go meanwhile
            self.let_go_withdrawn()
            memory = self._device_memory.allocate(nbytes, purpose)
        announced = self.announce(memory.ptr, nbytes, memory, reserved=reserved)
        if announced is None:
            return memory
        return SymmetricArrayMemory(memory, self, announced)

    def announce(self, ptr: int, nbytes: int, memory: object = None, *, reserved: bool = False) -> Announced | None:
        """Announces a range, unless it is announced already. Returns None if peers can't map the range, or the table is
        full.

        Each call that does not return None is paired with a `withdraw`.

        Args:
            memory: keeps the range from being freed; released once the range is withdrawn and no peer maps it.
            reserved: as for `allocate`.
        """
        if not self.offered or self._world_size == 1 or nbytes == 0:
            return None
        self.withdraw_ended()
        known = self.find(ptr, nbytes)
        if known is not None:
            with self._lock:
                if known.users:
                    known.users += 1
                    known.lent = False  # the program asked for the announcement, so calls may wait for replies
                    if known.memory is None:
                        known.memory = memory
                    self._tell_calls(known)
                    return known
        exported = self.export(ptr, nbytes)
        return None if exported is None else self._announce(exported, memory, reserved=reserved)

    def export(self, ptr: int, nbytes: int) -> Export | None:
        """Exports a range, which must not be freed during the call. Returns None if peers can't map the range."""
        allocations = self._runtime.allocations(ptr, nbytes)
        try:
            handle = self._runtime.export(ptr, nbytes)
        except ProxyCCLError:  # peers can't map the range
            return None
        if len(handle) <= LONGEST_HANDLE:
            return Export(ptr, ptr + nbytes, handle, AllocationGuard(self._runtime.calls, allocations))
        self._runtime.end_export(handle)
        return None

    def lend(self, exported: Export) -> None:
        """Announces an exported range unless it has been announced or freed since the export."""
        if self._is_unchanged(exported) and self.find(exported.start, exported.nbytes) is None:
            self._announce(exported, lent=True)
        else:
            self._runtime.end_export(exported.handle)

    def _announce(
        self, exported: Export, memory: object = None, *, reserved: bool = False, lent: bool = False
    ) -> Announced | None:
        with self._lock:
            self.let_go_withdrawn()
            if self._closed or len(self._free) <= (0 if reserved else _RESERVED_ENTRIES):
                self._runtime.end_export(exported.handle)
                return None
            entry = self._free.pop()
            announced = Announced(
                exported.start, exported.end, exported.handle, exported.guard, entry, memory, lent=lent
            )
            self._announced[entry] = announced
            self._own.announce(entry, exported.handle)
            if lent and self._proxy is not None:
                self._offer_to_proxies(announced)
            self._unsettled[entry] = announced
            self._tell_calls(announced)
        self._calls.forget(announced.start, announced.end)
        return announced

    def _tell_calls(self, announced: Announced) -> None:
        replies = self._replies(announced.entry)
        bases = None
        if replies is not None and UNREACHED not in replies:
            bases = [announced.start if rank == self._rank else replies.pop(0) for rank in range(self._world_size)]
        at_peers = self.memories_at_peers(announced) if announced.lent and announced.for_proxies else {}
        proxies = NAMED_BY_PROXIES  # calls wait for replies, except for lent memory
        if at_peers is not None and (at_peers or not announced.lent) and NO_MEMORY not in at_peers.values():
            proxies |= RECEIVED_BY_PROXIES
        if replies is not None and at_peers is not None:
            self._unsettled.pop(announced.entry, None)
        kept = announced.memory is not None
        if announced.known == (bases, proxies, kept):
            return
        announced.known = bases, proxies, kept
        holds, guard = (0, 0) if kept else announced.guard.addresses
        self._calls.set_reached(
            announced.entry, announced.start, announced.end, bases, proxies, holds, guard, announced.guard
        )

    def withdraw(self, announced: Announced) -> None:
        """Undoes an `announce`. At the last `withdraw`, no queued work of this rank may still use the range."""
        with self._lock:
            if not announced.users:  # already dropped
                return
            announced.users -= 1
            if announced.users:
                return
            heirs, announced.heirs = announced.heirs, []
            closed = self._closed
            if not closed:
                self._end(announced)
        for heir, same in heirs:
            alive = heir()
            if alive is not None:
                alive.withdraw(same)
        if not closed:
            self._calls.forget(announced.start, announced.end)
            self._remove_from_proxy(announced)

    def note_end(self, announced: Announced) -> bool:
        """Makes the next update withdraw a range. Takes no lock. Returns False if this object is closed."""
        if self._closed:
            return False
        self._ended.append(announced)
        return True

    def withdraw_ended(self) -> None:
        """Withdraws the ranges whose arrays were garbage-collected."""
        for ended in take_each(self._ended):
            self.withdraw(ended)

    def inherit(self, other: SymmetricMemory) -> None:
        """Announces the ranges and the pool of another group of this rank until that group withdraws them."""
        other.withdraw_ended()  # a failed group gets no further updates
        with other._lock:
            of_pool = {id(segment) for segment in other._segments.values()}
            ranges = [each for each in other._announced.values() if id(each) not in of_pool and not each.lent]
        for announced in ranges:
            if announced.memory is not None or other._is_unchanged(announced):
                same = self.announce(announced.start, announced.nbytes, announced.memory)
                if same is not None:
                    announced.heirs.append((weakref.ref(self), same))
        if other._pool is not None:
            self.follow(other._pool)

    def _forget(self, announced: Announced) -> None:
        """Withdraws a range that its owner has freed, regardless of `users`."""
        with self._lock:
            if self._closed or not announced.users:
                return
            announced.users = 0
            self._end(announced)
            if announced.lent:
                self.freed.append(announced.start)
        self._calls.forget(announced.start, announced.end)
        self._remove_from_proxy(announced)

    def _end(self, announced: Announced) -> None:
        del self._announced[announced.entry]
        self._unsettled.pop(announced.entry, None)
        self._calls.unset_reached(announced.entry)
        self._own.announce(announced.entry, b"")
        self._runtime.end_export(announced.handle)
        self.withdrawn[announced.entry] = announced.memory
        announced.memory = None

    def let_go_withdrawn(self) -> None:
        """Drops the references to withdrawn memory that all peers have unmapped, so that the memory is freed."""
        with self._lock:
            done = [entry for entry in list(self.withdrawn) if self._replies(entry) is not None]
            for entry in done:
                del self.withdrawn[entry]
            self._free += done

    @property
    def lent_sizes(self) -> list[int]:
        with self._lock:
            return [announced.nbytes for announced in self._announced.values() if announced.lent]

    def withdraw_if(self, lost: Callable[[Announced], bool]) -> None:
        """Withdraws the ranges for which `lost` returns True."""
        with self._lock:
            ranges = list(self._announced.values())
        for announced in ranges:
            if lost(announced):
                self._forget(announced)

    # -- this rank's memory for proxies ---

    def serve(self, proxy: Proxy) -> None:
        """Makes updates add memory that peers announce to this rank's proxy."""
        with self._mapping:
            self._proxy = proxy
            self._seen = dict.fromkeys(self._peers, 0)
            for table in self._peers.values():
                table.handle_again()
        with self._lock:
            for announced in self._announced.values():
                if announced.lent:
                    self._offer_to_proxies(announced)
                    self._unsettled[announced.entry] = announced

    def may_have_memory_ids(self, announced: Announced) -> bool:
        """Returns whether a range has ids in proxies, or may still get some. All ranks' arrays take at most half of a
        proxy's ids, and lent ranges at most a quarter; the other ids are for staging memory.
        """
        with self._lock:
            others = sum(other.ids for other in self._announced.values() if other.has_ids)
        part = 4 if announced.lent else 2
        return announced.has_ids or others + announced.ids <= MAX_MEMORIES // (part * self._world_size)

    def own_memory(self, announced: Announced) -> int:
        """Returns the id, in this rank's proxy, of the first 4 GiB of this rank's range. Raises ResourceError if no ids
        are left."""
        with self._adding:
            if announced.proxy_memory is None:
                if self._proxy is None:
                    raise RuntimeError("serve was not called")
                announced.proxy_memory = self._proxy.add_memory(
                    announced.start, announced.nbytes, handle=lambda: announced.handle
                )
            return announced.proxy_memory

    def memories_at_peers(self, announced: Announced) -> dict[int, int] | None:
        """Returns, by peer, the id, in the peer's proxy, of the first 4 GiB of this rank's range; None until all peers
        have replied.

        The id is NO_MEMORY if the peer's proxy can't add the range. All ranks must have called `serve`.
        """
        with self._lock:
            self._ask_proxies(announced)
        peers = sorted(self._peers)
        found = self._own.memories(announced.entry, [self._numbers[peer] for peer in peers])
        return None if found is None else dict(zip(peers, found, strict=True))

    def _ask_proxies(self, announced: Announced) -> None:
        if not announced.for_proxies:
            announced.for_proxies = True
            self._own.announce_to_proxies(announced.entry)

    def _offer_to_proxies(self, announced: Announced) -> None:
        """Announces a range to peers' proxies before a call needs it, because calls do not wait for lent memory."""
        if self.may_have_memory_ids(announced):
            self._ask_proxies(announced)

    def find(self, ptr: int, nbytes: int) -> Announced | None:
        with self._lock:
            found = [a for a in self._announced.values() if a.start <= ptr and ptr + nbytes <= a.end]
        for announced in found:
            if announced.memory is not None or self._is_unchanged(announced):
                return announced
            self._forget(announced)
        return None

    def _is_unchanged(self, found: Export) -> bool:
        with self._runtime.current():
            return found.guard.holds

    def _replies(self, entry: int) -> list[int] | None:
        return self._own.replies(entry, [self._numbers[peer] for peer in sorted(self._peers)])

    def _remove_from_proxy(self, announced: Announced) -> None:
        if announced.proxy_memory is not None and self._proxy is not None:
            self._proxy.remove_memory(announced.proxy_memory, announced.nbytes)

    # -- this rank's memory that another library allocates ---

    def follow(self, pool: MemoryPool) -> None:
        """Makes updates announce a pool's segments when they are allocated, and withdraw them when they are freed."""
        self._pool = pool
        self._follow_pool(pool)

    def _follow_pool(self, pool: MemoryPool) -> None:
        changes = pool.changes
        if changes == self._pool_changes or not self._following.acquire(blocking=False):
            return  # another thread is updating
        try:
            segments = {segment.number: segment for segment in pool.segments() if not segment.freed}
            for number in self._segments.keys() - segments.keys():
                announced = self._segments.pop(number)
                if announced is not None:
                    self.withdraw(announced)
            for number in segments.keys() - self._segments.keys():
                if self._closed or len(self._free) <= _RESERVED_ENTRIES:
                    return  # the next update retries
                hold = pool.hold(number)
                if hold is not None:
                    segment = segments[number]
                    self._segments[number] = self.announce(segment.ptr, segment.nbytes, hold)
            self._pool_changes = changes
        finally:
            self._following.release()

    # -- peers' memory ---

    def update(self, *, wait: bool = False) -> None:
        """Maps memory that peers have announced, unmaps memory that they have withdrawn, and replies. Also releases
        memory that peers have unmapped, withdraws ranges that were freed, and announces and withdraws segments of the
        pool of `follow`.

        Args:
            wait: whether to wait if another thread is updating; otherwise the call returns immediately.
        """
        self.withdraw_ended()
        if self.withdrawn:
            self.let_go_withdrawn()
        if self._pool is not None:
            self._follow_pool(self._pool)
        # A driver can't reuse memory that peers map.
        self.withdraw_if(lambda range_: range_.memory is None and not self._is_unchanged(range_))
        with self._lock:
            for announced in list(self._unsettled.values()):
                self._tell_calls(announced)
        # A thread that finds `_mapping` held returns, so the thread that held `_mapping` checks once more afterwards.
        while not self._closed and any(table.changes != self._seen[peer] for peer, table in self._peers.items()):
            if not self._mapping.acquire(blocking=wait):
                return
            try:
                if not self._closed:
                    for peer, table in self._peers.items():
                        self._update_from(peer, table)
            finally:
                self._mapping.release()

    def _update_from(self, peer: int, table: Announcements) -> None:
        changes = table.changes
        if changes == self._seen[peer]:
            return
        # Withdrawn memory is unmapped first, because a driver may refuse to map memory that has been allocated at its
        # address.
        for entry, announcement in sorted(table.changed(), key=lambda found: bool(found[1].handle)):
            handled = self._handled.setdefault((peer, entry), _Handled())
            if announcement.version != handled.version:
                self._let_go(handled)
                address = self._map(peer, announcement.handle, handled)
                handled.version = announcement.version
                table.reply(entry, self._numbers[self._rank], handled.version, address)
            if announcement.for_proxies and announcement.handle and self._proxy is not None and not handled.told:
                memory = self._add_to_proxy(self._proxy, announcement.handle, handled)
                handled.told = True
                table.reply_memory(entry, self._numbers[self._rank], handled.version, memory)
            table.handle(entry, announcement)
        self._seen[peer] = changes

    def _let_go(self, handled: _Handled) -> None:
        if handled.mapped is not None:
            if handled.memory is not None and self._proxy is not None:
                self._proxy.remove_memory(handled.memory, handled.mapped.nbytes)
            self._mappings.release(handled.handle, keep=False)
        handled.handle, handled.mapped, handled.memory, handled.told = b"", None, None, False

    def _add_to_proxy(self, proxy: Proxy, handle: bytes, handled: _Handled) -> int:
        """Returns the id, in this rank's proxy, of the first 4 GiB of a peer's memory, or NO_MEMORY."""
        try:
            if handled.mapped is None:  # kernels can't access the memory, but copies may
                handled.mapped, handled.handle = self._mappings.acquire(handle), handle
            mapped = handled.mapped
            handled.memory = proxy.add_memory(mapped.ptr, mapped.nbytes, handle=lambda: handle)
        except ProxyCCLError:  # without an id, the owner stages the data
            return NO_MEMORY
        return handled.memory

    def _map(self, peer: int, handle: bytes, handled: _Handled) -> int:
        if not handle:
            return 0
        if not self._topology.accessible[peer]:
            return UNREACHED
        try:
            handled.mapped, handled.handle = self._mappings.acquire(handle), handle
        except ProxyCCLError:  # the owner may have freed and withdrawn the memory
            return UNREACHED
        return handled.mapped.ptr

    def memories(self) -> list[object]:
        """Returns this rank's memory that must stay allocated because peers' kernels may access it."""
        with self._lock:
            announced = [each.memory for each in self._announced.values()]
            return [memory for memory in (*announced, *self.withdrawn.values()) if memory is not None]

    def close(self) -> None:
        """Stops updates, and drops the references to this rank's memory. No kernel of this rank may use peers' memory
        any longer.
        """
        with self._following, self._mapping, self._lock:
            self._closed = True
            for announced in self._announced.values():
                self._runtime.end_export(announced.handle)
            self._segments.clear()
            self._announced.clear()
            self._unsettled.clear()
            self.withdrawn.clear()
        self.withdraw_ended()  # notifies the groups that inherited these ranges
