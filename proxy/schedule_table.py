"""The schedules of a service, by number."""

from __future__ import annotations

import errno
from typing import Any

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.schedule import Schedule
from proxyccl.proxy.shared_words import SharedWords

ffi, lib = _engine.ffi, _engine.lib

MAX_SCHEDULES: int = lib.PROXYCCL_MAX_SCHEDULES


class ScheduleTable:
    """Assigns numbers to schedules and hands them to the engine. The caller serialises all calls.

    Args:
        service: a ProxycclService whose workers do not run yet.
        shared: the memory of the words that streams and workers share.
        semaphores: the CPU's address of this rank's words that peers signal, by channel id; None for a service without
            schedules.
    """

    def __init__(self, service: Any, shared: SharedWords, semaphores: int | None) -> None:
        self._service = service
        self._numbers: set[int] = set()
        self._next = 1
        self._rings = semaphores is not None
        if semaphores is not None:
            lib.proxyccl_service_set_schedule_words(service, shared.schedule_words, ffi.cast("uint64_t *", semaphores))

    def add(self, schedule: Schedule) -> int:
        """Adds a schedule. Returns its number.

        Raises:
            ArgumentError: an id is out of range, or a send names no destination; or the service has no schedules.
            ResourceError: no numbers are left.
        """
        if not self._rings:
            raise ArgumentError("schedule", "this proxy service was made without the words that peers signal")
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
        """Frees a schedule, which streams must no longer start.

        Raises:
            ResourceError: the schedule is running.
        """
        if lib.proxyccl_service_remove_schedule(self._service, number):
            raise ResourceError(f"schedule {number} runs; wait for its stream first")
        self._numbers.discard(number)


def _id(value: int | None) -> int:
    return lib.PROXYCCL_NO_ID if value is None else value


def _native_steps(schedule: Schedule) -> tuple[Any, list[Any]]:
    """Returns a ProxycclScheduleSteps, and the objects that must stay alive with it."""
    posts = ffi.new("ProxycclSchedulePost[]", len(schedule.posts))
    sends = ffi.new("ProxycclScheduleSend[]", len(schedule.sends))
    receives = ffi.new("ProxycclScheduleReceive[]", len(schedule.receives))
    for i, post in enumerate(schedule.posts):
        posts[i].channel, posts[i].memory, posts[i].offset = post.channel, post.memory, post.offset
    for i, send in enumerate(schedule.sends):
        native = sends[i]
        native.channel, native.post_channel = send.channel, _id(send.post_channel)
        native.src_memory, native.dst_memory = send.src_memory, _id(send.dst_memory)
        native.src_offset, native.dst_offset, native.bytes = send.src_offset, send.dst_offset, send.nbytes
        native.gate, native.gate_stage, native.stage = send.gate, _id(send.gate_stage), _id(send.stage)
    for i, receive in enumerate(schedule.receives):
        receives[i].channel, receives[i].sends, receives[i].stage = receive.channel, receive.sends, _id(receive.stage)
    steps = ffi.new("ProxycclScheduleSteps *")
    steps.posts, steps.post_count = posts, len(posts)
    steps.sends, steps.send_count = sends, len(sends)
    steps.receives, steps.receive_count = receives, len(receives)
    steps.joined = _id(schedule.joined)
    return steps, [posts, sends, receives]
