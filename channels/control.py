"""How ranks tell each other to stop, and find out that one of them has.

Each rank owns a control segment in pinned shared memory: the control block that its kernels poll, the words that
proxies signal, its proxy's counters, and a log of its recent collective calls. The ranks of the same host map each
other's, and a rank that fails raises the abort of all of them before its own, in a kernel as on the CPU. Those of other
hosts are told over sockets, by a watcher thread, which also sees a peer's process end.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxyccl.device._native import ffi, lib
from proxyccl.device.errors import (
    AbortedError,
    CommunicatorError,
    HandlerError,
    MismatchError,
    PeerLostError,
    ProxyLostError,
    TransportError,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy._engine import lib as engine_lib
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.transport_status import status_text
from proxyccl.proxy.trigger import MAX_CHANNELS, Operation

NO_PEER: int = lib.PROXYCCL_NO_PEER
LAST_QUESTION: int = lib.PROXYCCL_LAST_QUESTION
CALL_ABORTED: int = engine_lib.PROXYCCL_CALL_ABORTED
CALL_DIFFERS: int = engine_lib.PROXYCCL_CALL_DIFFERS
WAITS = {
    lib.PROXYCCL_WAIT_RING_ROOM: "room in the trigger ring",
    lib.PROXYCCL_WAIT_RING_SYNC: "the proxy to take a trigger",
    lib.PROXYCCL_WAIT_FLUSH: "a flush",
    lib.PROXYCCL_WAIT_SM_SIGNAL: "a signal (SmChannel)",
    lib.PROXYCCL_WAIT_PROXY_SIGNAL: "a signal (ProxyChannel)",
    lib.PROXYCCL_WAIT_PACKET: "a packet",
    lib.PROXYCCL_WAIT_GRID: "the other blocks of the grid",
}


@dataclass(frozen=True)
class ErrorRecord:
    """An error record of control.h, read."""

    code: int
    rank: int
    peer: int | None = None
    wait: int = 0
    operation: int = 0
    channel: int | None = None
    status: int = 0
    expected: int = 0
    seen: int = 0
    offset: int = 0
    size: int = 0


@dataclass(frozen=True)
class KernelWait:
    """A ProxycclWait of control.h, read: what some threads of a kernel waited for when they were asked."""

    kind: int
    peer: int | None
    channel: int
    expected: int
    seen: int


CALL_FIELDS = ("collective", "dtype", "op", "algorithm", "root", "count")
"""What must agree between ranks: the fields of a ProxycclCall (calls.h), in order."""

_ALIGN = 4096


def _round(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


_CONTROL_OFFSET = 0
_SEMAPHORES_OFFSET = _round(ffi.sizeof("ProxycclControl"))
_CALLS_OFFSET = _SEMAPHORES_OFFSET + _round(8 * MAX_CHANNELS)
_SERVICE_OFFSET = _CALLS_OFFSET + _round(engine.sizeof("ProxycclCallEntry") * engine_lib.PROXYCCL_CALL_LOG_ENTRIES)
_LANDING_OFFSET = _SERVICE_OFFSET + _round(ProxyService.shared_bytes())
LANDING_BYTES = 128 * 1024
_PEERS_OFFSET = _LANDING_OFFSET + LANDING_BYTES


def segment_bytes(world_size: int = 1) -> int:
    """The size of a control segment of so many ranks."""
    return _PEERS_OFFSET + _round(8 * (world_size - 1))


class ControlSegment:
    """A rank's control segment, own or a peer's."""

    service_offset = _SERVICE_OFFSET
    semaphores_bytes = 8 * MAX_CHANNELS

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self._control = ffi.cast("ProxycclControl *", memory.host_ptr)
        self._peers: Mapping[int, ControlSegment] = {}
        self._peer_controls = ffi.NULL

    def initialise(self, rank: int, timeout: float) -> None:
        """Fills an own, fresh segment."""
        self._control.rank = rank
        self._control.timeout_ns = int(timeout * 1e9)

    def introduce(self, peers: Mapping[int, ControlSegment]) -> None:
        """Says which ranks an own segment's failure is told to: those of this host, by rank. No kernel runs yet."""
        self._peers = peers
        self._peer_controls = ffi.new("ProxycclControl *[]", [segment._control for segment in peers.values()])
        table = (ctypes.c_uint64 * len(peers)).from_address(self.memory.host_ptr + _PEERS_OFFSET)
        table[:] = [segment.device_pointer for segment in peers.values()]
        self._control.peers = ffi.cast("ProxycclControl *const *", self.memory.ptr + _PEERS_OFFSET)
        self._control.peer_count = len(peers)

    @property
    def device_pointer(self) -> int:
        """The device's address of the control block."""
        return self.memory.ptr

    @property
    def host_pointer(self) -> int:
        """The CPU's address of the control block."""
        return self.memory.host_ptr

    @staticmethod
    def semaphore_offset(channel: int) -> int:
        """Where in a segment the word lies that a peer's proxy signals for a channel."""
        return _SEMAPHORES_OFFSET + 8 * channel

    def semaphore_host(self, channel: int) -> int:
        """The CPU's address of that word."""
        return self.memory.host_ptr + self.semaphore_offset(channel)

    def semaphore_handle(self, channel: int) -> bytes:
        """By which another process maps that word alone."""
        return self.memory.export(self.semaphore_host(channel), 8)

    def reset_semaphore(self, channel: int) -> None:
        """Sets the word to what a new channel expects. Nobody may signal it meanwhile."""
        ctypes.c_uint64.from_address(self.semaphore_host(channel)).value = 0

    def semaphore_device(self, channel: int) -> int:
        """The device's address of the same word."""
        return self.memory.ptr + self.semaphore_offset(channel)

    @property
    def aborted(self) -> bool:
        """Whether this rank has failed, or has been told that another has, which comes before any kernel is stopped."""
        return bool(lib.proxyccl_control_abort(self._control) or lib.proxyccl_control_told(self._control))

    def raise_abort(self, record: ErrorRecord) -> None:
        """Files the record, unless one is filed, and raises the abort words of the ranks of this host, this one's last:
        they end every wait of kernels.
        """
        filed = ffi.new("ProxycclErrorRecord *")
        filed.code, filed.rank, filed.wait, filed.operation = record.code, record.rank, record.wait, record.operation
        filed.peer = NO_PEER if record.peer is None else record.peer
        filed.channel = MAX_CHANNELS if record.channel is None else record.channel
        filed.status, filed.expected, filed.seen = record.status, record.expected, record.seen
        filed.offset, filed.size = record.offset, record.size
        lib.proxyccl_control_raise(self._control, filed, self._peer_controls, len(self._peers))

    def record(self) -> ErrorRecord:
        """The error record; a rank that was told takes that of the one that told it.

        One that is still being written is waited for, briefly: its writer may be gone.
        """
        error = ffi.new("ProxycclErrorRecord *")
        told = lib.proxyccl_control_told(self._control)
        if told and lib.proxyccl_control_record(self._control, error) == lib.PROXYCCL_RECORD_EMPTY:
            self.raise_abort(self._peers[told - 1].record())
        deadline = time.monotonic() + 0.1
        while (
            lib.proxyccl_control_record(self._control, error) == lib.PROXYCCL_RECORD_CLAIMED
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        return ErrorRecord(
            code=error.code or lib.proxyccl_control_abort(self._control),
            rank=error.rank,
            peer=None if error.peer == NO_PEER else error.peer,
            wait=error.wait,
            operation=error.operation,
            channel=error.channel if error.channel < MAX_CHANNELS else None,
            status=error.status,
            expected=error.expected,
            seen=error.seen,
            offset=error.offset,
            size=error.size,
        )

    def ask(self, question: int) -> None:
        """Asks this rank's kernels what they wait for, under a number from 1 that was not used before; 0 ends that."""
        lib.proxyccl_control_ask(self._control, question)

    def waits(self, question: int) -> list[KernelWait]:
        """What has been answered: for each peer the wait of one thread. An abort asks LAST_QUESTION."""
        wait, found = ffi.new("ProxycclWait *"), []
        for place in range(lib.PROXYCCL_WAIT_PLACES):
            if lib.proxyccl_control_wait(self._control, place, question, wait):
                peer = None if wait.peer == NO_PEER else wait.peer
                found.append(KernelWait(wait.kind, peer, wait.channel, wait.expected, wait.seen))
        return found

    @property
    def landing(self) -> tuple[int, int]:
        """The addresses, for the device and for the CPU, of LANDING_BYTES for copies of what lies in device memory."""
        return self.memory.ptr + _LANDING_OFFSET, self.memory.host_ptr + _LANDING_OFFSET

    def semaphore(self, channel: int) -> int:
        """The count of signals that have come in on a ProxyChannel."""
        return ctypes.c_uint64.from_address(self.semaphore_host(channel)).value

    @property
    def calls_host(self) -> int:
        """The CPU's address of the log of collective calls."""
        return self.memory.host_ptr + _CALLS_OFFSET

    def close(self) -> None:
        """Unmaps the segment."""
        self._control = None
        self.memory.close()


class CallLog:
    """This rank's log of collective calls, beside those of the peers of its host (calls.h).

    Args:
        own: this rank's segment.
        peers: the segments of the others.
    """

    def __init__(self, own: ControlSegment, peers: dict[int, ControlSegment]) -> None:
        self._ranks = list(peers)
        logs = [engine.cast("ProxycclCallEntry *", segment.calls_host) for segment in peers.values()]
        self._logs = engine.new("const ProxycclCallEntry *[]", logs or [engine.NULL])
        self._callers = engine.new("ProxycclCallers *")
        self._callers.control = engine.cast("ProxycclControl *", own.host_pointer)
        self._callers.own = engine.cast("ProxycclCallEntry *", own.calls_host)
        self._callers.peers, self._callers.peer_count = self._logs, len(logs)
        self.issue: Callable[[Any, Any, int], int] = functools.partial(engine_lib.proxyccl_calls_issue, self._callers)
        """issue(call, launch, stream): `agree`, then a prepared launch; the launch's status."""

    def agree(self, call: Any) -> int:
        """Logs a call and compares it. 0, or one of CALL_ABORTED and CALL_DIFFERS."""
        return int(engine_lib.proxyccl_calls_agree(self._callers, call))

    def recent(self, count: int) -> list[tuple[int, tuple[int, ...]]]:
        """The last calls of this rank in order, each with its number, from 1. For any thread."""
        last, call, found = self._callers.sequence, engine.new("ProxycclCall *"), []
        for sequence in range(max(1, last - count + 1), last + 1):
            if engine_lib.proxyccl_calls_read(self._callers.own, sequence, call):
                found.append((sequence, tuple(call.fields)))
        return found

    def difference(self) -> tuple[int, tuple[int, ...]]:
        """After CALL_DIFFERS: the rank that made another call, and the fields of that."""
        return self._ranks[self._callers.differing], tuple(self._callers.different.fields)


def encode_fields(fields: tuple[int, ...]) -> Any:
    """A ProxycclCall."""
    return engine.new("ProxycclCall *", [fields])


def exception_from(record: ErrorRecord, own_rank: int, cause: str = "") -> CommunicatorError:
    """The exception for an error record, as this rank sees it. `cause` is what only the rank that failed knows."""
    details: dict[str, Any] = {"rank": record.rank, "peer": record.peer, "channel": record.channel}
    who = "this rank" if record.rank == own_rank else f"rank {record.rank}"
    peer = f" from rank {record.peer}" if record.peer is not None else ""
    on = f" on channel {record.channel}" if record.channel is not None else ""
    code = record.code
    if code == lib.PROXYCCL_ERROR_TIMEOUT:
        if record.wait == lib.PROXYCCL_WAIT_NONE:
            message = f"{who} waited too long in the bootstrap{peer and f' for a call{peer}'}"
            return WaitTimeoutError(message, operation="bootstrap", **details)
        what = WAITS.get(record.wait, "its peers")
        message = f"{who} waited too long for {what}{peer}{on}: expected {record.expected}, saw {record.seen}"
        return WaitTimeoutError(message, operation=f"wait for {what}", **details)
    if code == lib.PROXYCCL_ERROR_PEER_LOST:
        return PeerLostError(f"the process of rank {record.peer} ended (seen by {who})", operation="watch", **details)
    if code == lib.PROXYCCL_ERROR_PROXY_LOST:
        return ProxyLostError(_join(f"the node daemon of {who} is lost", cause), operation="watch", **details)
    operation = str(Operation(record.operation & 7).name or "").lower()
    if code == lib.PROXYCCL_ERROR_TRANSPORT:
        operation = operation if record.operation else "a transfer"  # the completion that failed may be of several
        to = f" to rank {record.peer}" if record.peer is not None else ""
        message = f"{who}'s proxy: {operation}{to}{on} failed with status {record.status}"
        if not cause and record.status >= engine_lib.PROXYCCL_VERBS_COMPLETION:
            cause = status_text("verbs", record.status)
        return TransportError(_join(message, cause), operation=operation, offset=record.offset, **details)
    if code == lib.PROXYCCL_ERROR_BAD_TRIGGER:
        message = (
            f"{who} pushed a trigger that was refused: {operation} of {record.size} bytes at offset {record.offset}{on}"
        )
        return TriggerError(_join(message, cause), operation=operation, offset=record.offset, **details)
    if code == lib.PROXYCCL_ERROR_INVALID_FLAG:
        return TriggerError(
            f"a kernel of {who} used packet flag 0, which fresh memory holds", operation="packet", **details
        )
    if code == lib.PROXYCCL_ERROR_HANDLER:
        return HandlerError(_join(f"a handler on {who} raised{on}", cause), operation="handler", **details)
    if code == lib.PROXYCCL_ERROR_MISMATCH:
        argument = CALL_FIELDS[record.wait] if record.wait < len(CALL_FIELDS) else None
        message = f"{argument}: {who} called a collective with another {argument} than rank {record.peer}"
        return MismatchError(_join(message, cause), argument=argument, rank=record.rank, peer=record.peer)
    return AbortedError(_join(f"{who} ended the communicator", cause), operation="abort", **details)


def _join(message: str, cause: str) -> str:
    return f"{message}: {cause}" if cause else message


class Link(Protocol):
    """A way to tell a rank of another host, and to hear from it (host_links.py)."""

    def fileno(self) -> int:
        """For poll()."""
        ...

    def send(self, record: ErrorRecord) -> None:
        """Passes an abort on."""
        ...

    def receive(self) -> ErrorRecord | str | None:
        """The peer's abort, "goodbye", "lost", or None for nothing yet."""
        ...

    def close(self) -> None:
        """Says goodbye."""
        ...


class Watcher:
    """A thread that sees peers' processes end and passes an abort of this rank on to other hosts.

    It sleeps in poll() otherwise.

    Args:
        rank: this rank.
        own: its segment.
        pids: their processes, where they are not this one.
        links: to the ranks of other hosts; the watcher closes them.
        on_abort: called in the thread once the abort has been passed on.
    """

    INTERVAL_MS = 20
    ENDING_MS = 1000

    def __init__(
        self,
        rank: int,
        own: ControlSegment,
        pids: dict[int, int],
        links: Mapping[int, Link],
        on_abort: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_abort = on_abort
        self._rank = rank
        self._own = own
        self._links = {link.fileno(): (peer, link) for peer, link in links.items()}
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}
        lost: list[int] = []
        for peer, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                lost.append(peer)
                continue
            self._descriptors[descriptor] = peer
            self._poll.register(descriptor, select.POLLIN)
        for descriptor in self._links:
            self._poll.register(descriptor, select.POLLIN)
        self._stop_read, self._stop_write = os.pipe()
        self._poll.register(self._stop_read, select.POLLIN)
        self._lost = lost
        self._thread = threading.Thread(target=self._run, name=f"proxyccl-watch-{rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for peer in self._lost:
            self._peer_lost(peer)
        while not self._own.aborted:
            for descriptor, _ in self._poll.poll(self.INTERVAL_MS):
                if descriptor == self._stop_read:
                    if not self._own.aborted:
                        return
                elif descriptor in self._links:
                    self._hear(descriptor)
                else:
                    self._poll.unregister(descriptor)
                    self._peer_lost(self._descriptors[descriptor])
        self.pass_on()
        self._on_abort()

    def _hear(self, descriptor: int) -> None:
        peer, link = self._links[descriptor]
        said = link.receive()
        if said is None:
            return
        self._poll.unregister(descriptor)
        if isinstance(said, ErrorRecord):
            self._own.raise_abort(said)
        elif said == "lost":
            self._peer_lost(peer)

    def _peer_lost(self, peer: int) -> None:
        self._own.raise_abort(ErrorRecord(lib.PROXYCCL_ERROR_PEER_LOST, self._rank, peer))

    def look_for_end(self, peer: int) -> None:
        """Files that a peer of this host is lost if its process ends now: for a rank whose transfer to it has failed.

        The system first takes the memory of a process that ends from the RDMA device, and only then tells of the end.
        """
        ending = select.poll()
        for descriptor, rank in self._descriptors.items():
            if rank == peer:
                ending.register(descriptor, select.POLLIN)
                if ending.poll(self.ENDING_MS):
                    self._peer_lost(peer)

    def pass_on(self) -> None:
        """Tells all ranks why this one failed; those of its host too, as the one that told it may have been killed."""
        record = self._own.record()
        self._own.raise_abort(record)
        for _, link in self._links.values():
            link.send(record)

    def close(self) -> None:
        """Ends the thread."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        if self._own.aborted:  # perhaps later than the thread looked
            self.pass_on()
        for _, link in self._links.values():
            link.close()
        for descriptor in (*self._descriptors, self._stop_read, self._stop_write):
            os.close(descriptor)


def create_segment(runtime: Runtime, rank: int, timeout: float, world_size: int = 1) -> ControlSegment:
    """A fresh segment for this rank."""
    segment = ControlSegment(runtime.allocate_pinned(segment_bytes(world_size)))
    segment.initialise(rank, timeout)
    return segment
