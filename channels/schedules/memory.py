"""Finds or allocates the memory that schedules use, with its ids in this rank's and the peers' proxies.

On one host schedules use memory that the rank has announced (symmetric.py); peers' proxies map the memory when the rank
first receives data in it. Between hosts schedules use memory that all ranks registered together, because only
registration sends the peers addresses and keys.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from msgspec import Struct

from proxyccl.channels.calls._calls import NAMED_BY_PROXIES
from proxyccl.channels.group import Group
from proxyccl.channels.memory import RegisteredMemory, allocate, register
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.channels.segment.announcements import NO_MEMORY
from proxyccl.channels.segment.rendezvous import wait_at_most
from proxyccl.channels.symmetric import Announced
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ResourceError, WaitTimeoutError
from proxyccl.device.stream_operations import CopyBytes
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.schedule import STAGES

Side = Literal["source", "target", "scratch"]
"""The purpose of memory: to send from, to receive results in, or to receive data that is then reduced."""

_POLL_SECONDS = 0.0001
_SMALLEST_STAGE = 1 << 20
_WORD_BYTES = 4
_BOX_IDS = Codec[dict[int, int]](dict[int, int], 1 << 20, name="memory ids of pinned memory")
_BOX_BYTES = 256 << 10
_BOX_OFFSETS: dict[Side, int] = {"source": 0, "target": _BOX_BYTES, "scratch": _BOX_BYTES}
CHUNKS_DONE, HERE, TAKEN, BLOCKS_DONE, OPENED = 0, STAGES, 2 * STAGES, 2 * STAGES + 1, 2 * STAGES + 2
"""Offsets of the words by which the blocks of a reduction synchronize (ProxycclArrived). At each of the first two
offsets, an array with one word per stage begins.
"""


class ScheduleMemory(Protocol):
    def source_id(self, peer: int) -> int:
        """Returns the id, in this rank's proxy, of the memory's first 4 GiB, for sends to a peer."""
        ...

    def id_at(self, peer: int) -> int:
        """Returns the id, in a peer's proxy, of the memory's first 4 GiB, for posts to that peer."""
        ...


class ScheduleSpan(Struct, frozen=True):
    """The bytes of a `ScheduleMemory` from `offset` on; `ptr` is their address."""

    memory: ScheduleMemory
    offset: int
    ptr: int

    def at(self, offset: int) -> ScheduleSpan:
        return ScheduleSpan(self.memory, self.offset + offset, self.ptr + offset)


class _AnnouncedMemory:
    """An announced range as a `ScheduleMemory`.

    Args:
        own: the range's id in this rank's proxy.
        at_peers: returns the range's ids in the peers' proxies; called when a post first needs one.
    """

    def __init__(self, own: int, at_peers: Callable[[], Mapping[int, int]]) -> None:
        self._own, self._at_peers = own, functools.cache(at_peers)

    def source_id(self, peer: int) -> int:
        return self._own

    def id_at(self, peer: int) -> int:
        return self._at_peers()[peer]


class _PinnedBoxes:
    """Pinned memory of each rank for short data, which the proxies' CPUs copy: one box to send from, and one to receive
    in. All ranks make the boxes together.
    """

    def __init__(self, group: Group) -> None:
        self._memory = PinnedRange(group, 2 * _BOX_BYTES)
        self.ptr, self.source_id, self.close = self._memory.ptr, self._memory.source_id, self._memory.close
        ids = {peer: self._memory.peer_id(peer) for peer in range(group.world_size) if peer != group.rank}
        answers = group.exchange.all_gather(ids, _BOX_IDS, "ids of pinned memory of schedules")
        self._at_peers = {peer: answers[peer][group.rank] for peer in ids}

    def id_at(self, peer: int) -> int:
        return self._at_peers[peer]


class ScheduleMemories:
    """Finds the schedules' memory that holds an array, or returns staging memory for the array. All ranks construct a
    `ScheduleMemories` together.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        # Whether all ranks make staging memory together, including ranks that need none.
        self.staged_together = group.schedules_need_registration
        defaults = group.runtime.launch_defaults
        staged_bytes = defaults.staged_pinned_bytes * (group.world_size - 1)
        # The greatest size of a schedule's input or output, in bytes, that CPUs copy through pinned memory.
        self.pinned_bytes = staged_bytes if self.staged_together else defaults.pinned_bytes
        # All ranks get the same `own_box`, because they share a host and thus a driver.
        own_box = group.world_size > 1 and not self.staged_together
        # The greatest size, in bytes, of a copy within the device that goes through the next rank's memory.
        self.own_box_bytes = defaults.own_box_bytes * (group.world_size - 1) if own_box else 0
        # The next rank's box is mapped now, because a graph capture may be the first to use the box.
        self._box = allocate(group, self.own_box_bytes, "uint8", "staging") if self.own_box_bytes else None
        self._own_box = _at_next(group, self._box)
        self._stages: dict[Side, list[Array]] = {}
        self._boxes: _PinnedBoxes | None = None
        # Device memory with the words from `CHUNKS_DONE` to `OPENED`, which are 0 while no kernel runs.
        self.reduction_words = group.device_memory.allocate((OPENED + 1) * _WORD_BYTES, "channels")
        if not self.staged_together:
            group.symmetric.serve(group.links.proxy)
        if not self.staged_together or (self.pinned_bytes > 0 and group.topology.stages_remote_pairs()):
            self._boxes = _PinnedBoxes(group)

    def source(self, ptr: int, nbytes: int) -> ScheduleSpan | None:
        """Returns the schedules' memory that holds an array to send; None if the array must be staged."""
        if self.staged_together:
            return self._registered(ptr, nbytes)
        announced = self._find(ptr, nbytes)
        return None if announced is None else self._announced(announced, ptr, dict)

    def target(self, ptr: int, nbytes: int) -> ScheduleSpan | None:
        """Returns the schedules' memory that holds an array to receive into; None if the array must be staged. Raises
        CommunicatorError if the group failed before a peer's proxy had mapped the memory, and WaitTimeoutError if a
        peer's proxy did not map the memory within the time-out.
        """
        if self.staged_together:
            return self._registered(ptr, nbytes)
        announced = self._find(ptr, nbytes)
        return None if announced is None else self._received(announced, ptr)

    def pinned(self, side: Side, nbytes: int) -> ScheduleSpan | None:
        """Returns pinned memory if the data is so short that CPUs move it faster than the driver; None for longer data.

        Args:
            side: whether the schedule uses the memory as a send's source, as a send's target or as scratch memory.
            nbytes: the size of the longest input or output of all ranks, so that all ranks make the same choice.
        """
        if self._boxes is None or nbytes > min(self.pinned_bytes, _BOX_BYTES):
            return None
        return ScheduleSpan(self._boxes, _BOX_OFFSETS[side], self._boxes.ptr + _BOX_OFFSETS[side])

    def own_copy(self, dst: int, src: int, nbytes: int) -> list[CopyBytes]:
        """Returns the operations by which a stream copies within the device. Copy engines make short copies to the next
        rank's device and back, because a copy within the device would be a kernel, which may wait for a multiprocessor.
        Only one stream at a time may use such operations.
        """
        if self._own_box is None or dst == src or not 0 < nbytes <= self.own_box_bytes:
            return [CopyBytes(dst, src, nbytes)]
        return [CopyBytes(self._own_box, src, nbytes), CopyBytes(dst, self._own_box, nbytes)]

    def found_or_staged(self, found: ScheduleSpan | None, side: Side, nbytes: int) -> ScheduleSpan:
        """Returns `found` (the result of `source` or `target`) or, if `found` is None, staging memory of `nbytes`.

        If `staged_together`, all ranks call this together. Raises the errors of `stage`.
        """
        if found is not None and not self.staged_together:
            return found
        stage = self.stage(side, nbytes)
        return found or stage

    def stage(self, side: Side, nbytes: int) -> ScheduleSpan:
        """Returns device memory of at least `nbytes` that peers' proxies can access. All calls share this memory.

        If `staged_together`, all ranks call this together with the same arguments. Otherwise the peers' proxies are
        asked to map the memory, and the first post of the memory waits for their replies, so that a call with several
        pieces of new staging memory waits only once. Raises ResourceError if the device has no memory left, or a proxy
        has no ids left for memory; if a peer's proxy has none left, a post raises this error.
        """
        stages = self._stages.setdefault(side, [])
        found = next((stage for stage in stages if stage.nbytes >= nbytes), None)
        if found is None:
            size = max(_SMALLEST_STAGE, 1 << (nbytes - 1).bit_length())
            memory = self._group.symmetric.allocate(size, "staging", reserved=True)
            found = Array(self._group.runtime, memory, (size,), as_dtype("uint8"))
            if self.staged_together:
                register(self._group, found, symmetric=True, reserved=True)
            stages.append(found)
        if self.staged_together:
            span = self._registered(found.ptr, nbytes)
        else:
            announced = self._group.symmetric.find(found.ptr, nbytes)
            span = None if announced is None else self._staged(announced, found.ptr, side)
        if span is None:
            raise _no_room(found.nbytes)
        return span

    def close(self) -> None:
        """Frees the memory that this object allocated, which no schedule of any rank may still use."""
        for stages in self._stages.values():
            for stage in stages:
                stage.free()
        if self._box is not None:
            self._box.free()
        for memory in (self._boxes, self.reduction_words):
            if memory is not None:
                memory.close()

    def _registered(self, ptr: int, nbytes: int) -> ScheduleSpan | None:
        for shared in self._group.kept:
            if isinstance(shared, RegisteredMemory) and shared.is_for_schedules:
                offset = ptr - shared.ptr
                if 0 <= offset <= shared.nbytes - nbytes:
                    return ScheduleSpan(shared, offset, ptr)
        return None

    def _find(self, ptr: int, nbytes: int) -> Announced | None:
        """Returns the announced range that holds an array; None if there is none, or no memory ids are left for arrays.

        Also returns None if `Calls` does not list the array as memory for schedules, because the library reuses one
        prepared call for all arrays that `Calls` does not list.
        """
        if not self._group.launches.calls.reach_of(ptr, nbytes) & NAMED_BY_PROXIES:
            return None
        announced = self._group.symmetric.find(ptr, nbytes)
        may = announced is not None and self._group.symmetric.may_have_memory_ids(announced)
        return announced if may else None

    def _staged(self, announced: Announced, ptr: int, side: Side) -> ScheduleSpan | None:
        def at_peers() -> dict[int, int]:
            found = self._memories_at_peers(announced)
            if NO_MEMORY in found.values():
                raise _no_room(announced.nbytes)
            return found

        if side != "source":  # no post names memory that this rank only sends from
            self._group.symmetric.memories_at_peers(announced)
        return self._announced(announced, ptr, at_peers)

    def _received(self, announced: Announced, ptr: int) -> ScheduleSpan | None:
        if announced.lent:  # the call must not wait for replies, because the program did not register the array
            found = self._group.symmetric.memories_at_peers(announced) if announced.for_proxies else None
        else:
            found = self._memories_at_peers(announced)
        if found is None or NO_MEMORY in found.values():
            return None
        return self._announced(announced, ptr, lambda: found)

    def _announced(
        self, announced: Announced, ptr: int, at_peers: Callable[[], Mapping[int, int]]
    ) -> ScheduleSpan | None:
        try:
            own = self._group.symmetric.own_memory(announced)
        except ResourceError:
            return None
        return ScheduleSpan(_AnnouncedMemory(own, at_peers), ptr - announced.start, ptr)

    def _memories_at_peers(self, announced: Announced) -> dict[int, int]:
        """Waits until peers' proxies have mapped the memory. The peers' watchers reply, and so do peers that wait in
        this function, so ranks that wait for each other can't deadlock.
        """
        group, answers = self._group, self._group.symmetric.memories_at_peers

        def all_have_replied() -> bool:
            group.symmetric.update()  # sends replies for which peers may be waiting
            return answers(announced) is not None

        found = answers(announced)
        if found is None:
            group.wake_peers()
            if not wait_at_most(all_have_replied, time.monotonic() + group.timeout, group.failure.check, _POLL_SECONDS):
                error = WaitTimeoutError(
                    f"a peer's proxy did not map an array within {group.timeout:g} s",
                    rank=group.rank,
                    operation="map for schedules",
                )
                raise group.failure.file_exchange_failure(error)
            found = answers(announced)
        assert found is not None
        return found


def _no_room(nbytes: int) -> ResourceError:
    return ResourceError(f"the proxies have no room for {nbytes} bytes of memory to stage arrays in")


def _at_next(group: Group, box: Array | None) -> int | None:
    """Returns the address of the next rank's box, which only this rank uses; None if the device can't access it."""
    if box is None:
        return None
    memory, following = register(group, box), (group.rank + 1) % group.world_size
    return memory.peer_ptr(following) if group.topology.accessible[following] else None
