"""Sends arrays between neighbours in the ring of ranks. A send waits only if the neighbour has no free slot.

Each rank has send slots and receive slots for each neighbour, and uses them cyclically. In a send, the caller's stream
copies the array to a send slot, and the proxy moves the data to the neighbour's receive slot. A receive copies the data
out of the receive slot, and frees the slot by a signal. See DESIGN.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, register
from proxyccl.channels.schedules.links import schedule_channels
from proxyccl.channels.schedules.rings import ScheduleRings, Step
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import Event, StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.schedule import Schedule, ScheduleReceive, ScheduleSend

_MOST_PREPARED = 1024
_COPY = 1  # index of the copy in a receive's operations, where adjacent waits and writes are merged into one operation


class _Flow:
    """This rank's sends to a neighbour, or its receives from a neighbour, with their slots."""

    def __init__(self, channel: int, begin: int) -> None:
        self.channel = channel  # carries the flow's data, and in the opposite direction the signals that free slots
        self.begin = begin  # the offset of the flow's slots in this rank's memory
        self.count = 0  # the number of this rank's sends or receives so far
        self.sent: dict[int, Event] = {}  # by slot, the event after the slot's latest send; only on GPUs


class RingSlots:
    """Slots between a group's ranks and their neighbours. All ranks construct a `RingSlots` together, with the same
    sizes.

    A rank's sends and receives run one after the other in the order of the calls, even if the calls are on different
    streams. A send delays the caller's stream only until the data is in this rank's slot. Raises ResourceError if the
    device has no memory left, or a proxy has no ids left for memory or channels, and ArgumentError if this rank can't
    access a neighbour's memory.

    Args:
        group: at least two ranks; the group must not be used for anything else. The slots live until the group is
            released.
        slot_bytes: the greatest size of a send in bytes.
        slots: the number of sends to a neighbour that need not wait for a receive.
    """

    def __init__(self, group: Group, slot_bytes: int, slots: int) -> None:
        self._group, self._slot_bytes, self._slots = group, slot_bytes, slots
        # The ranks before and after this rank, which with two ranks are the same.
        self.neighbours = _neighbours(group.rank, group.world_size)
        up, down = schedule_channels(group, self.neighbours, 2)  # `up`: to higher ranks, `down`: to lower ranks
        nbytes = 2 * len(self.neighbours) * slots * slot_bytes
        self._array = allocate(group, nbytes, "uint8", "transfers", symmetric=True)
        self._memory = register(group, self._array)
        self._rings = ScheduleRings(group)
        self._lock = threading.Lock()
        self._prepared: dict[tuple[int, bool, int, int], StreamOperations] = {}
        self._stream = None if group.runtime.name == "host" else group.runtime.create_stream()
        self._sends: dict[int, _Flow] = {}
        self._receives: dict[int, _Flow] = {}
        for number, peer in enumerate(self.neighbours):
            to, back = (up, down) if peer > group.rank else (down, up)
            self._receives[peer] = _Flow(back[peer], self._begin(number))
            self._sends[peer] = _Flow(to[peer], self._begin(len(self.neighbours) + number))
            self._memory.source_id(peer)
            self._memory.peer_id(peer)  # maps the memory, before any stream waits for a peer
        group.keep(self)
        group.exchange.barrier("slots: all ranks have made their slots")

    def send(self, view: ArrayView, peer: int, stream: StreamLike) -> None:
        """Sends an array to a neighbour. Work queued later on the stream may overwrite the array. Raises
        CommunicatorError if the group has failed.

        Args:
            view: the array, of at most `slot_bytes`.
            peer: a neighbour.
            stream: None on the host runtime; the call then returns when the array is in the neighbour's slot.
        """
        group, flow = self._group, self._sends[peer]
        with self._lock:
            group.failure.require_usable()
            slot = flow.count % self._slots
            ring = self._ring(peer, slot, view.nbytes, sends=True)
            at = self._array.ptr + flow.begin + slot * self._slot_bytes
            if self._stream is None:
                group.runtime.copy(at, view.ptr, view.nbytes)
                group.launches.launch(ring, None, ())
            else:
                handle, own = group.runtime.stream_handle(stream), self._stream.handle
                if slot in flow.sent:
                    group.runtime.wait_event(handle, flow.sent[slot])
                group.runtime.copy(at, view.ptr, view.nbytes, handle)
                group.runtime.order_streams(handle, own)
                group.launches.launch(ring, self._stream, ())
                flow.sent.setdefault(slot, group.runtime.create_event()).record(own)
            flow.count += 1

    def receive(self, view: ArrayView, peer: int, stream: StreamLike) -> None:
        """Receives an array from a neighbour, whose sends arrive in order. Takes the arguments of `send`, and raises
        its errors.
        """
        flow = self._receives[peer]
        with self._lock:
            slot = flow.count % self._slots
            ring = self._ring(peer, slot, view.nbytes, sends=False)
            if view.nbytes:
                source = self._array.ptr + flow.begin + slot * self._slot_bytes
                ring.set_copy(_COPY, CopyBytes(view.ptr, source, view.nbytes))
            self._group.launches.launch(ring, stream, (view.owner,))
            flow.count += 1

    def close(self) -> None:
        """Destroys the stream and the events. The group calls this when it is released."""
        self._prepared.clear()
        for event in (event for flow in self._sends.values() for event in flow.sent.values()):
            event.close()
        if self._stream is not None:
            self._stream.close()

    def _begin(self, number: int) -> int:
        return number * self._slots * self._slot_bytes

    def _ring(self, peer: int, slot: int, nbytes: int, *, sends: bool) -> StreamOperations:
        waits = sends and self._sends[peer].count >= self._slots
        key = peer, sends, slot, nbytes << 1 | waits
        if key not in self._prepared:
            if len(self._prepared) == _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            make = self._sending(peer, slot, nbytes, waits=waits) if sends else self._receiving(peer, slot, nbytes)
            self._prepared[key] = self._rings.prepare(make)
        return self._prepared[key]

    def _sending(self, peer: int, slot: int, nbytes: int, *, waits: bool) -> list[Step]:
        flow, rings = self._sends[peer], self._rings
        at_peer = _neighbours(peer, self._group.world_size).index(self._group.rank)
        send = ScheduleSend(
            flow.channel,
            self._memory.source_id(peer),
            flow.begin + slot * self._slot_bytes,
            nbytes,
            dst_memory=self._memory.peer_id(peer),
            dst_offset=self._begin(at_peer) + slot * self._slot_bytes,
            gate=1 if waits else 0,
        )
        if not waits:
            return [Schedule(sends=(send,)), *rings.end()]
        freed = ScheduleReceive(flow.channel, stage=0)
        return [Schedule(sends=(send,), receives=(freed,)), *self._turn(), *rings.end([0], gated=True)]

    def _turn(self) -> tuple[WaitValue, WriteValue]:
        """Returns the stream operations that wait for the schedule's receive, and then open the schedule's gate."""
        words = self._rings.words
        return WaitValue(words.stages[0], 1), WriteValue(words.gate, 1)

    def _receiving(self, peer: int, slot: int, nbytes: int) -> list[Step]:
        flow, rings = self._receives[peer], self._rings
        frees = ScheduleSend(
            flow.channel, self._memory.source_id(peer), 0, 0, dst_memory=self._memory.peer_id(peer), gate=1
        )
        came = ScheduleReceive(flow.channel, stage=0)
        source = self._array.ptr + flow.begin + slot * self._slot_bytes
        copy = CopyBytes(source + 1, source, nbytes)  # `receive` replaces this placeholder
        came_in, opens = self._turn()
        return [Schedule(sends=(frees,), receives=(came,)), came_in, copy, opens, *rings.end([0], gated=True)]


def _neighbours(rank: int, world_size: int) -> Sequence[int]:
    return sorted({(rank - 1) % world_size, (rank + 1) % world_size})
