"""The tables of a service's channels, memories and schedules. A table also writes each change to the engine's tables
and to the memory that observers read. Callers must not call methods of a table concurrently.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.codec import Message
from proxyccl.proxy.interface import Connection, Signals
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.schedule import Schedule
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES, WINDOW_BYTES

ffi, lib = _engine.ffi, _engine.lib

MAX_SCHEDULES: int = lib.PROXYCCL_MAX_SCHEDULES


class ChannelTable:
    """The channel ids in use, with each channel's ring, worker, and connection or handler. Rings are assigned to
    workers round-robin.
    """

    def __init__(
        self,
        service: Any,
        shared: SharedWords,
        observed: ObservedSegment,
        *,
        rings: int,
        workers: int,
        ring_per_connection: bool,
    ) -> None:
        self._service = service
        self._shared = shared
        self._observed = observed
        self._rings_of = [range(worker, rings, workers) for worker in range(workers)]
        self._ring_per_connection = ring_per_connection
        self._ring_of: dict[int, int] = {}  # each channel's ring
        self._free = list(reversed(range(MAX_CHANNELS)))
        self._handlers = 0

    def __len__(self) -> int:
        return len(self._ring_of)

    def ring_of(self, channel: int) -> int:
        return self._ring_of[channel]

    def reserve(self, worker: int, channel: int | None = None, *, connection: int | None = None) -> int:
        """Reserves a channel id for a worker: `channel`, which must be free, or any id. `connection` is the number of
        the channel's connection; None for a handler's channel, or for a channel of another service. Raises
        ResourceError if no ids are free.
        """
        if channel is not None:
            self._free.remove(channel)
        elif self._free:
            channel = self._free.pop()
        else:
            raise ResourceError(f"all {MAX_CHANNELS} channel ids are in use")
        turn = channel // len(self._rings_of)
        if self._ring_per_connection and connection is not None:
            turn = connection // len(self._rings_of)
        rings = self._rings_of[worker]
        self._ring_of[channel] = rings[turn % len(rings)]
        return channel

    def set_connection(
        self,
        channel: int,
        connection: Connection,
        pointer: _engine.ProxycclConnectionPointer,
        remote_semaphore: int,
        signals: Signals,
    ) -> None:
        lib.proxyccl_service_set_channel(
            self._service,
            channel,
            pointer,
            ffi.cast("uint64_t *", remote_semaphore),
            self._shared.flushed + channel,
            self._shared.completed + channel,
            ffi.new("ProxycclSignals *", signals)[0],
        )
        number = connection.number // len(self._rings_of)
        self._observed.place_channel(channel, connection.worker, self._ring_of[channel], number)

    def reserve_for_handler(self, channel: int | None) -> tuple[int, int]:
        """Reserves an id, as `reserve` does, for a Python handler. Returns the id and the channel's worker."""
        worker = self._handlers % len(self._rings_of)
        self._handlers += 1
        return self.reserve(worker, channel), worker

    def set_handler(self, channel: int, worker: int) -> None:
        """Directs a channel's triggers to the channel's handler, which must be added first."""
        lib.proxyccl_service_set_handler(
            self._service, channel, self._shared.flushed + channel, self._shared.completed + channel
        )
        self._observed.place_channel(channel, worker, self._ring_of[channel], None)

    def signals(self, channel: int) -> Signals:
        found = lib.proxyccl_service_signals(self._service, channel)
        return found.sent, found.taken

    def free(self, channels: Iterable[int]) -> None:
        none, null = ffi.new("ProxycclSignals *")[0], ffi.NULL
        for channel in channels:
            lib.proxyccl_service_set_channel(self._service, channel, null, null, null, null, none)
            self._observed.remove_channel(channel)
            self._shared.clear(channel)
            self._free.append(channel)


def windows_of(nbytes: int) -> int:
    """Returns the number of memory ids that memory of this size needs: one for each window of 4 GiB."""
    return max(1, -(-nbytes // WINDOW_BYTES))


class MemoryTable:
    """The memory ids in use, and each id's entries in the engine's table and in the kernels' table of limits. Memory
    that exceeds a window of 4 GiB has consecutive ids.
    """

    _NO_KEYS = [0] * lib.PROXYCCL_RAILS

    def __init__(self, service: Any, shared: SharedWords) -> None:
        self._service = service
        self._limits = shared.memory_limits
        self._used = [False] * MAX_MEMORIES

    def add(
        self,
        address: int,
        nbytes: int,
        keys: Sequence[int] = (),
        *,
        remote_only: bool = False,
        host: int | None = None,
        first: int | None = None,
    ) -> int:
        """Registers memory under free ids, or under the ids from `first` on, which the caller chose. Returns the
        first id. Raises ResourceError if no ids are free. The engine refuses copies from and to `remote_only` memory.
        `host` is the CPU's address of the memory; None if the CPU can't access the memory.
        """
        windows = windows_of(nbytes)
        if first is None:
            first = self._find(windows)
        for i in range(windows):
            offset = i * WINDOW_BYTES
            here = ffi.NULL if host is None else ffi.cast("char *", host + offset)
            self._set(first + i, address + offset, nbytes - offset, keys, remote_only=remote_only, host=here)
            self._used[first + i] = True
        return first

    def remove(self, first: int, nbytes: int) -> None:
        for i in range(windows_of(nbytes)):
            self._set(first + i, 0, 0, (), remote_only=False, host=ffi.NULL)
            self._used[first + i] = False

    def _set(
        self, memory: int, address: int, nbytes: int, keys: Sequence[int], *, remote_only: bool, host: Any
    ) -> None:
        self._limits[memory] = nbytes
        base, of_rails = ffi.cast("char *", address), ffi.new("uint64_t[]", [*keys, *self._NO_KEYS[len(keys) :]])
        lib.proxyccl_service_set_memory(self._service, memory, base, nbytes, of_rails, remote_only, host)

    def _find(self, windows: int) -> int:
        run = 0
        for i, used in enumerate(self._used):
            run = 0 if used else run + 1
            if run == windows:
                return i - windows + 1
        raise ResourceError(
            f"of {MAX_MEMORIES} memory ids, no {windows} consecutive ids are free: "
            f"{sum(self._used)} are in use; close memories that are no longer needed"
        )


class ScheduleTable:
    """A service's schedules, by number. `semaphores` is the CPU's address of the words that peers signal, an array
    indexed by channel id; None for a service without schedules.
    """

    def __init__(self, service: Any, shared: SharedWords, semaphores: int | None) -> None:
        self._service = service
        self._numbers: set[int] = set()
        self._next = 1
        self._rings = semaphores is not None
        if semaphores is not None:
            lib.proxyccl_service_set_schedule_words(service, shared.schedule_words, ffi.cast("uint64_t *", semaphores))

    def add(self, schedule: Schedule, number: int | None = None) -> int:
        if not self._rings:
            raise ArgumentError("schedule", "this proxy service was made without the words that peers signal")
        if number is None:
            number = self._free_number()
        steps, kept = _native_steps(schedule)
        status = lib.proxyccl_service_add_schedule(self._service, number, steps)
        del kept
        if status == errno.EINVAL:
            raise ArgumentError("schedule", f"an id is out of range, or a send has no destination: {schedule}")
        if status:
            raise ResourceError("out of memory for a schedule")
        self._numbers.add(number)
        return number

    def _free_number(self) -> int:
        if len(self._numbers) == MAX_SCHEDULES - 1:
            raise ResourceError(f"all {MAX_SCHEDULES - 1} schedules are in use; remove those that are no longer needed")
        while self._next in self._numbers:
            self._next = self._next % (MAX_SCHEDULES - 1) + 1
        return self._next

    def remove(self, number: int) -> None:
        if lib.proxyccl_service_remove_schedule(self._service, number):
            raise ResourceError(f"schedule {number} runs; wait for its stream first")
        self._numbers.discard(number)


def _id(value: int | None) -> int:
    return lib.PROXYCCL_NO_ID if value is None else value


def _native_step(step: Message) -> dict[str, int]:
    """Returns the fields of a step's C struct, which have the same names but `bytes` for `nbytes`."""
    return {"bytes" if name == "nbytes" else name: _id(value) for name, value in structs.asdict(step).items()}


def _native_steps(schedule: Schedule) -> tuple[Any, list[Any]]:
    """Returns a ProxycclScheduleSteps, and the objects that must stay alive as long as the steps."""
    posts = ffi.new("ProxycclSchedulePost[]", [_native_step(post) for post in schedule.posts])
    sends = ffi.new("ProxycclScheduleSend[]", [_native_step(send) for send in schedule.sends])
    receives = ffi.new("ProxycclScheduleReceive[]", [_native_step(receive) for receive in schedule.receives])
    steps = ffi.new("ProxycclScheduleSteps *")
    steps.posts, steps.post_count = posts, len(posts)
    steps.sends, steps.send_count = sends, len(sends)
    steps.receives, steps.receive_count = receives, len(receives)
    steps.joined = _id(schedule.joined)
    return steps, [posts, sends, receives]
