"""Control segments: shared memory through which the ranks of a host learn that a rank has failed.

Each rank owns a segment in pinned shared memory: the control block that its kernels poll, the words that proxies
signal, its proxy's counters, a log of its recent collective calls, its announcements, and its rendezvous. The ranks of
one host map each other's segments. When a rank fails, its kernel or its CPU sets the abort words of the host's other
ranks before the rank's own abort word.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import Struct

from proxyccl.channels.segment.announcements import TABLE_BYTES, Announcements
from proxyccl.channels.segment.error_record import MOST_CAUSE_BYTES, NO_PEER, ErrorRecord
from proxyccl.channels.segment.rendezvous import Rendezvous, wait_at_most
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy._engine import lib as engine_lib
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.trigger import MAX_CHANNELS

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclErrorRecordPointer  # this name exists only in the stub, not in cffi

LAST_QUESTION: int = lib.PROXYCCL_LAST_QUESTION


class Presence(IntEnum):
    """Whether a rank may still access its peers' memory (ProxycclPresence of control.h)."""

    PRESENT = lib.PROXYCCL_PRESENT
    CLOSING_ANOTHER = lib.PROXYCCL_CLOSING_ANOTHER
    LEFT = lib.PROXYCCL_LEFT
    STOPPED = lib.PROXYCCL_STOPPED


class KernelWait(Struct, frozen=True):
    """The contents of a ProxycclWait (control.h): a wait that a kernel describes for a report (see `ask`)."""

    kind: int
    peer: int | None
    channel: int | None
    expected: int
    seen: int


_COPIED_FIELDS = ("rank", "wait", "operation", "status", "expected", "seen", "offset", "size")
"""The fields that an `ErrorRecord` and a ProxycclErrorRecord hold alike."""
_ALIGN = 4096


def _round(nbytes: int) -> int:
    return round_up(nbytes, _ALIGN)


_SEMAPHORES_OFFSET = _round(ffi.sizeof("ProxycclControl"))
CALLS_OFFSET = _SEMAPHORES_OFFSET + _round(8 * MAX_CHANNELS)
COUNTS_OFFSET = CALLS_OFFSET + engine.sizeof("ProxycclCallEntry") * engine_lib.PROXYCCL_CALL_LOG_ENTRIES
"""Offsets of the call log and of the numbers of calls by collective."""
MemoryPurpose = Literal["arrays", "channels", "experts", "plans", "results", "scratch", "staging", "transfers"]
"""A purpose for which a rank allocates device memory (channels/DESIGN.md)."""
MEMORY_PURPOSES: tuple[MemoryPurpose, ...] = get_args(MemoryPurpose)
_MEMORY_OFFSET = COUNTS_OFFSET + engine.sizeof("ProxycclCallCount") * (engine_lib.PROXYCCL_CALL_KINDS + 1)
_SERVICE_OFFSET = _round(_MEMORY_OFFSET + 8 * len(MEMORY_PURPOSES))
_READBACK_OFFSET = _SERVICE_OFFSET + _round(ProxyService.shared_bytes())
READBACK_BYTES = 128 * 1024
_ANNOUNCEMENTS_OFFSET = _READBACK_OFFSET + READBACK_BYTES
_RENDEZVOUS_OFFSET = _ANNOUNCEMENTS_OFFSET + _round(TABLE_BYTES)
_CAUSE_OFFSET = _RENDEZVOUS_OFFSET + _round(Rendezvous.nbytes())
_REQUEST_OFFSET = _CAUSE_OFFSET + 4 + MOST_CAUSE_BYTES
_BELL_OFFSET = _CAUSE_OFFSET + round_up(8 + MOST_CAUSE_BYTES, 8)
_PEERS_OFFSET = _round(_BELL_OFFSET + 8)


def segment_bytes(world_size: int = 1) -> int:
    """Returns the size of a control segment for this number of ranks."""
    return _PEERS_OFFSET + _round(8 * (world_size - 1))


class ControlSegment:
    """The control segment of this rank or of a peer.

    Attributes:
        rendezvous: the messages and invitations of the segment's rank.
    """

    service_offset = _SERVICE_OFFSET
    semaphores_bytes = 8 * MAX_CHANNELS

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self._control = ffi.cast("ProxycclControl *", memory.host_ptr)
        self._peers: Mapping[int, ControlSegment] = {}
        self._peer_controls = ffi.new("ProxycclControl *[]", 0)
        self._memory_usage = (ctypes.c_uint64 * len(MEMORY_PURPOSES)).from_address(memory.host_ptr + _MEMORY_OFFSET)
        self._request = ctypes.c_uint32.from_address(memory.host_ptr + _REQUEST_OFFSET)
        self._filing = threading.RLock()  # reentrant: a signal handler may store a record while the lock is held
        self.rendezvous = Rendezvous(memory.host_ptr + _RENDEZVOUS_OFFSET)

    def initialise(self, rank: int, timeout: float) -> None:
        self._control.rank = rank
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        self._control.timeout_ns = int(seconds * 1e9)

    def introduce(self, peers: Mapping[int, ControlSegment]) -> None:
        """Sets the segments whose ranks this rank notifies of a failure. No kernel may run yet."""
        self._peers = peers
        self._peer_controls = ffi.new("ProxycclControl *[]", [segment._control for segment in peers.values()])
        table = (ctypes.c_uint64 * len(peers)).from_address(self.memory.host_ptr + _PEERS_OFFSET)
        table[:] = [segment.device_pointer for segment in peers.values()]
        self._control.peers = ffi.cast("ProxycclControl **", self.memory.ptr + _PEERS_OFFSET)
        self._control.peer_count = len(peers)

    @property
    def device_pointer(self) -> int:
        return self.memory.ptr

    @property
    def host_pointer(self) -> int:
        return self.memory.host_ptr

    @staticmethod
    def semaphore_offset(channel: int) -> int:
        """Returns the offset in a segment of the word that a peer's proxy signals for a channel."""
        return _SEMAPHORES_OFFSET + 8 * channel

    def semaphore_host(self, channel: int) -> int:
        return self.memory.host_ptr + self.semaphore_offset(channel)

    def semaphore_handle(self, channel: int) -> bytes:
        """Returns the handle by which another process maps only the word of `semaphore_offset`."""
        return self.memory.export(self.semaphore_host(channel), 8)

    def reset_semaphore(self, channel: int) -> None:
        """Sets the channel's word to 0, the count that a new channel expects. No peer may signal the word during the
        call."""
        ctypes.c_uint64.from_address(self.semaphore_host(channel)).value = 0

    def semaphore_device(self, channel: int) -> int:
        return self.memory.ptr + self.semaphore_offset(channel)

    @property
    def aborted(self) -> bool:
        """Whether this rank has failed, or another rank has notified it of a failure. Ranks are notified before any
        kernel stops. False if the segment is closed.
        """
        control = vars(self).get("_control")
        return control is not None and bool(
            lib.proxyccl_control_abort(control) or lib.proxyccl_control_failed_rank(control)
        )

    def raise_abort(self, record: ErrorRecord) -> None:
        """Stores the record, unless the segment has one already, and sets the abort words of the ranks of this host,
        this rank's word last. Once a rank's abort word is set, all waits of the rank's kernels fail.
        """
        filed = ffi.new("ProxycclErrorRecord *", {name: getattr(record, name) for name in ("code", *_COPIED_FIELDS)})
        filed.peer = NO_PEER if record.peer is None else record.peer
        filed.channel = MAX_CHANNELS if record.channel is None else record.channel
        with self._filing:
            if record.cause and lib.proxyccl_control_record(self._control, filed) == lib.PROXYCCL_RECORD_EMPTY:
                # The pairing abort publishes the cause together with the record.
                text = record.cause.encode(errors="replace")[:MOST_CAUSE_BYTES]
                ctypes.memmove(self._cause + 4, text, len(text))
                ctypes.c_uint32.from_address(self._cause).value = len(text)
            lib.proxyccl_control_raise(self._control, filed, self._peer_controls, len(self._peers))

    @property
    def _cause(self) -> int:
        """The CPU's address of the record's cause: a length in bytes, then the text."""
        return self.memory.host_ptr + _CAUSE_OFFSET

    def record(self) -> ErrorRecord:
        """Returns the error record. If another rank has failed, first copies that rank's record to this segment.

        Waits at most 0.1 s for a record that is being written, because its writer may have died.
        """
        error = ffi.new("ProxycclErrorRecord *")
        told = lib.proxyccl_control_failed_rank(self._control)
        if told and lib.proxyccl_control_record(self._control, error) == lib.PROXYCCL_RECORD_EMPTY:
            self.raise_abort(self._peers[told - 1].record())

        def is_written() -> bool:
            return bool(lib.proxyccl_control_record(self._control, error) != lib.PROXYCCL_RECORD_CLAIMED)

        wait_at_most(is_written, time.monotonic() + 0.1)
        return self._read_record(error)

    def filed(self) -> ErrorRecord | None:
        """Returns the error record, or None if this segment has no complete record. Unlike `record`, writes nothing, so
        observers may call this method.
        """
        error = ffi.new("ProxycclErrorRecord *")
        if lib.proxyccl_control_record(self._control, error) != lib.PROXYCCL_RECORD_VALID:
            return None
        return self._read_record(error)

    def _read_record(self, error: ProxycclErrorRecordPointer) -> ErrorRecord:
        length = min(ctypes.c_uint32.from_address(self._cause).value, MOST_CAUSE_BYTES)
        return ErrorRecord(
            **{name: getattr(error, name) for name in _COPIED_FIELDS},
            code=error.code or lib.proxyccl_control_abort(self._control),
            peer=None if error.peer == NO_PEER else error.peer,
            channel=error.channel if error.channel < MAX_CHANNELS else None,
            cause=ctypes.string_at(self._cause + 4, length).decode(errors="replace") if error.code else "",
        )

    def request_report(self) -> None:
        """For a peer: asks the segment's rank to write a report. The store is relaxed, because it publishes no other
        data.
        """
        self._request.value = 1

    def take_report_request(self) -> bool:
        """For the segment's rank: returns whether a peer has asked for a report since the previous call of this
        method.
        """
        if not self._request.value:
            return False
        self._request.value = 0
        return True

    @property
    def bell(self) -> int:
        """The bell of the thread that watches for the segment's rank (`WatchThread`); 0 before the thread starts. The
        accesses are relaxed, because a thread that is not woken wakes by itself.
        """
        return ctypes.c_uint64.from_address(self.memory.host_ptr + _BELL_OFFSET).value

    @bell.setter
    def bell(self, bell: int) -> None:
        ctypes.c_uint64.from_address(self.memory.host_ptr + _BELL_OFFSET).value = bell

    def set_memory_usage(self, usage: Mapping[str, int]) -> None:
        """Stores the bytes of this rank's device memory for each of MEMORY_PURPOSES."""
        self._memory_usage[:] = [usage[purpose] for purpose in MEMORY_PURPOSES]

    @property
    def memory_usage(self) -> dict[str, int]:
        """The bytes that the segment's rank last stored for each purpose, without the purposes that use none."""
        return {purpose: nbytes for purpose, nbytes in zip(MEMORY_PURPOSES, self._memory_usage, strict=True) if nbytes}

    @property
    def presence(self) -> Presence:
        """Whether the segment's rank may still access its peers' memory."""
        return Presence(lib.proxyccl_control_presence(self._control))

    def set_presence(self, presence: Presence, exchanges: int = 0) -> None:
        """Sets this rank's `presence` and, if the presence is LEFT, also its `exchanges`."""
        lib.proxyccl_control_set_presence(self._control, presence, exchanges)

    @property
    def exchanges(self) -> int:
        """The number of the bootstrap's exchanges in which the segment's rank took part; valid once its presence is
        LEFT.
        """
        return lib.proxyccl_control_exchanges(self._control)

    def ask(self, question: int) -> None:
        """Asks this rank's kernels to describe their waits. `question` is a new number from 1 on; 0 withdraws the
        question.
        """
        lib.proxyccl_control_ask(self._control, question)

    def waits(self, question: int) -> list[KernelWait]:
        """Returns the kernels' answers to a question: for each peer, the wait of one thread. After an abort, kernels
        answer LAST_QUESTION without being asked.
        """
        wait, found = ffi.new("ProxycclWait *"), []
        for place in range(lib.PROXYCCL_WAIT_PLACES):
            if lib.proxyccl_control_wait(self._control, place, question, wait):
                peer = None if wait.peer == NO_PEER else wait.peer
                channel = wait.channel if wait.channel < MAX_CHANNELS else None
                found.append(KernelWait(wait.kind, peer, channel, wait.expected, wait.seen))
        return found

    @property
    def readback_buffer(self) -> tuple[int, int]:
        """The device's and the CPU's address of a buffer of READBACK_BYTES, to which reports copy device memory."""
        return self.memory.ptr + _READBACK_OFFSET, self.memory.host_ptr + _READBACK_OFFSET

    def semaphore(self, channel: int) -> int:
        """Returns the count of signals that a ProxyChannel has received."""
        return ctypes.c_uint64.from_address(self.semaphore_host(channel)).value

    @property
    def announcements(self) -> Announcements:
        return Announcements(self.memory.host_ptr + _ANNOUNCEMENTS_OFFSET)

    def host_address(self, offset: int) -> int:
        return self.memory.host_ptr + offset

    def close(self) -> None:
        vars(self).pop("_control", None)  # a later call then raises an error instead of crashing
        self.memory.close()


def create_segment(runtime: Runtime, rank: int, timeout: float, world_size: int = 1) -> ControlSegment:
    segment = ControlSegment(runtime.allocate_pinned(segment_bytes(world_size)))
    segment.initialise(rank, timeout)
    return segment
