"""Transfers between two agents."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from msgspec import Struct

from proxyccl.channels.timeouts import timeout_from
from proxyccl.channels.transfers.engine_calls import raise_status, wait_in_slices
from proxyccl.channels.transfers.errors import (
    ActiveError,
    CanceledError,
    DisconnectedError,
    FreedMemoryError,
    NotRegisteredError,
    NotStartedError,
    TransferError,
    TransferTimeoutError,
)
from proxyccl.channels.transfers.stream_turns import Turn, require_no_capture
from proxyccl.device.base_runtime import StreamLike
from proxyccl.device.errors import ClosedError, KernelError
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.channels.transfers.blocks import Rows
    from proxyccl.channels.transfers.copier import Copier
    from proxyccl.channels.transfers.device_memory import Devices
    from proxyccl.channels.transfers.ledger import Ledger
    from proxyccl.channels.transfers.paths import Link, Path
    from proxyccl.proxy._transfers import ProxycclGrantedPointer, ProxycclTransferPointer


class State(Enum):
    """The state of a transfer."""

    NEW = lib.PROXYCCL_TRANSFER_NEW
    ACTIVE = lib.PROXYCCL_TRANSFER_ACTIVE
    DONE = lib.PROXYCCL_TRANSFER_DONE
    CANCELED = lib.PROXYCCL_TRANSFER_CANCELED
    LOST = lib.PROXYCCL_TRANSFER_LOST
    REFUSED = lib.PROXYCCL_TRANSFER_REFUSED
    FAILED = lib.PROXYCCL_TRANSFER_FAILED
    STALE = lib.PROXYCCL_TRANSFER_STALE
    """The owner revoked a granted block before the transfer was complete."""
    CORRUPT = -1
    """The data that was read differs from the grant's checksums. Only a `Check` finds this state."""


class Granted(Protocol):
    """The granted blocks of a transfer. Any thread may call the methods."""

    def raise_stale(self, *, started: bool = True) -> None:
        """Raises the error of the state STALE or CORRUPT or, if `started` is False, of a start that was refused."""


class Check(Granted, Protocol):
    """A check that follows the copies of a transfer."""

    def begin(self, message: bytes | None, start: Callable[[], int]) -> None:
        """Calls `start`, which starts the copies and returns the time of the start, and sends `message` after a
        successful check. Raises ActiveError during a check, and the errors of `start`.
        """

    def poll(self, started: int) -> State:
        """Begins the check of the copies that were started at the time `started`, and have ended, unless the check has
        begun. Returns ACTIVE, DONE, STALE, CORRUPT, LOST or CANCELED.
        """

    def wait(self, seconds: float) -> None:
        """Waits until the check has ended. Raises nothing."""

    def cancel(self, timeout: float | None) -> None:
        """Cancels the check if it is active. Has the argument and the error of `Transfer.cancel`."""


_OUTSTANDING: list[object] = []
"""Memory of dropped transfers that an adapter of an unresponsive peer may still use."""

_TURN = 0
"""The index, in a transfer's kept objects, of the words of its last start on a stream."""

_STATES = {state.value: state for state in State}
_DONE = lib.PROXYCCL_TRANSFER_DONE
_FAULTS: dict[int, tuple[type[TransferError], str]] = {
    lib.PROXYCCL_FAULT_DEREGISTERED: (
        NotRegisteredError,
        "agent {peer} has deregistered its memory at {address:#x}",
    ),
    lib.PROXYCCL_FAULT_ENDED_HERE: (NotRegisteredError, "this agent has deregistered its memory at {address:#x}"),
    lib.PROXYCCL_FAULT_FREED: (
        FreedMemoryError,
        "agent {peer} has freed its memory at {address:#x} without deregistering it",
    ),
    lib.PROXYCCL_FAULT_FREED_HERE: (
        FreedMemoryError,
        "this agent's memory at {address:#x} was freed without being deregistered",
    ),
    lib.PROXYCCL_FAULT_PROTECTED: (
        TransferError,
        "memory of agent {peer} at {address:#x} can't be {access}, or this agent's, although it is mapped: it is "
        "protected, or its file was truncated",
    ),
}
_FABRIC_ERRORS = 256
"""The lowest error number of libfabric's own errors."""


class Times(Struct, frozen=True):
    """Times of a transfer's last start, in ns of `time.monotonic_ns`. A time is 0 if the transfer has not got that far.

    Attributes:
        posted: when `start` was called.
        returned: when `start` returned.
        ended: when the transfer ended.
    """

    posted: int
    returned: int
    ended: int


class Transfer:
    """Blocks to read from or write to a peer's memory. `Agent.prepare` makes a transfer, which can be started many
    times.

    Any thread may use a transfer. A transfer keeps the peer's link alive, but not the memory of the blocks.

    Attributes:
        peer: the other agent's name.
        writes: whether the transfer writes to the peer's memory, rather than reads it.
        blocks: the number of blocks, where adjacent blocks count as one.
        nbytes: the total size of the blocks in bytes.
        path: the path that the transfer uses.
    """

    def __init__(
        self,
        handle: ProxycclTransferPointer,
        link: Link | None,
        peer: str,
        writes: bool,
        lists: tuple[Rows, Rows],
        path: Path,
        devices: Devices,
        *,
        copier: Copier | None = None,
        is_queued: bool = False,
        kept: object = None,
    ) -> None:
        if not handle:
            raise MemoryError("there is no memory for a transfer")
        self.peer = peer
        self.writes = writes
        self.blocks = len(lists[0])
        self.nbytes = int(lists[0][:, 1].sum())
        self.path = path
        self._handle = handle
        self._devices, self._copier, self._is_queued = devices, copier, is_queued
        self._link = link
        self._closed = False
        self._process = forks.here()
        self._granted: Granted | None = None
        self._check: Check | None = None
        self._kept: list[object] = [None, lists, copier, kept]
        # The finalizer keeps the lists that the engine reads alive as long as any thread may use the handle.
        forks.finalizer(self, _release, handle, self._kept)

    def __repr__(self) -> str:
        direction = "to" if self.writes else "from"
        state = "closed" if self._closed else _STATES[lib.proxyccl_transfer_state(self._open())].name.lower()
        return f"Transfer({self.nbytes} bytes {direction} {self.peer} by {self.path.name}, {state})"

    def start(self, message: bytes | None = None, *, stream: StreamLike = None) -> Self:
        """Starts the transfer, and returns without waiting for its end.

        Args:
            message: a message that the peer receives after all data; None to send no message. With a grant, the message
                is sent only if the read is neither stale nor corrupt; if the peer is on another host or the grant has
                checksums, the call that finds the transfer done (`done`, `wait` or `state`) sends the message.
            stream: a device's stream. The transfer begins after the stream's earlier work, and the stream's later work
                waits until the transfer has ended or failed. If a device copies, `stream` must be a stream of that
                device. If `stream` is None, the transfer does not wait for any stream.

        Raises:
            ActiveError: the transfer is active.
            ArgumentError: the message is longer than 256 MiB, or the stream is invalid or being captured into a graph.
            ClosedError: the transfer was closed, or this process is a forked child.
            StaleReadError, StaleWriteError: a granted block was revoked already. Only peers on this host are checked
                before the start.
        """
        if self._check is None:
            self._post(message, stream)
        else:
            if message is not None and len(message) > lib.PROXYCCL_LONGEST_MESSAGE:
                raise_status(errno.EMSGSIZE, self.peer)

            def start() -> int:
                self._post(None, stream)
                return self.times.posted

            self._check.begin(message, start)
        return self

    def _post(self, message: bytes | None, stream: StreamLike) -> None:
        handle = self._open()
        data, nbytes = ffi.NULL if message is None else message, len(message) if message else 0
        if stream is None:
            status = lib.proxyccl_transfer_post(handle, data, nbytes, ffi.NULL, ffi.NULL)
        elif self._is_queued:
            assert self._copier is not None
            queue = require_no_capture(self._copier.runtime, stream)
            status = lib.proxyccl_transfer_post(handle, data, nbytes, ffi.new("uint64_t *", queue), ffi.NULL)
        else:
            copier = self._copier or self._devices.of_stream(stream)
            queue = require_no_capture(copier.runtime, stream)
            turn = self._kept[_TURN] = Turn(copier)
            status = turn.start(handle, data, nbytes, queue)
        if status == errno.ESTALE and self._granted is not None:
            self._granted.raise_stale(started=False)
        raise_status(status, self.peer)

    @property
    def state(self) -> State:
        """The transfer's state. Reading the state does not raise an error even if the transfer has failed."""
        if self._check is None:
            return _STATES[lib.proxyccl_transfer_state(self._open())]
        outcome = lib.proxyccl_transfer_outcome(self._open())
        return self._check.poll(outcome.times.posted) if outcome.state == _DONE else _STATES[outcome.state]

    def done(self) -> bool:
        """Returns whether all data has arrived. On the path "process_vm" this call may itself copy a piece.

        Raises:
            NotStartedError: the transfer was never started.
            DisconnectedError, NotRegisteredError, FreedMemoryError, CanceledError, TransferError: the transfer failed
                or was canceled.
            StaleReadError, StaleWriteError: the owner revoked a granted block before the transfer was complete.
            CorruptReadError: the data differs from the checksums of the grant.
        """
        state = lib.proxyccl_transfer_help(self._open())
        if state == _DONE and self._check is None:
            return True
        return self._outcome(_STATES[state] if self._check is None else self.state)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all data has arrived.

        Args:
            timeout: the longest wait in seconds; None for ``PROXYCCL_TIMEOUT``, or if that isn't set 30 s.

        Raises:
            TransferTimeoutError: the transfer is still active.
            NotStartedError, TransferError: as for `done`.
        """
        if self._outcome(self.state):
            return
        bounded = timeout_from(timeout)
        handle, deadline = self._open(), time.monotonic() + bounded
        state = wait_in_slices(lambda ns: lib.proxyccl_transfer_wait(handle, ns), State.ACTIVE.value, bounded)
        if self._check is not None and self.state is State.ACTIVE:
            self._check.wait(deadline - time.monotonic())
        if not self._outcome(_STATES[state] if self._check is None else self.state):
            raise TransferTimeoutError(
                f"the transfer with agent {self.peer} is still active after {bounded:g} s{self._stalled()}", self.peer
            )

    def cancel(self, timeout: float | None = None) -> None:
        """Cancels the transfer if it is active. When this returns, the transfer no longer accesses local memory.

        Args:
            timeout: the longest wait, in seconds, for requests to libfabric, which can't be canceled; None for
                ``PROXYCCL_TIMEOUT``, or if that isn't set 30 s.

        Raises:
            ActiveError: some requests have not completed, and may still write. The transfer ends as canceled when the
                last request completes. Call `cancel` again to wait for this end.
        """
        handle = self._open()
        bounded = timeout_from(timeout)
        if wait_in_slices(lambda ns: lib.proxyccl_transfer_cancel(handle, ns), errno.EBUSY, bounded):
            raise ActiveError(
                f"the transfer with agent {self.peer} by {self.path.name} still has requests outstanding after "
                f"{bounded:g} s; they can't be taken back, and may still write{self._stalled()}",
                self.peer,
            )
        if self._check is not None:
            self._check.cancel(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Cancels the transfer if it is active, and makes it unusable. Has the arguments and errors of `cancel`."""
        if not self._closed:
            self.cancel(timeout)
            self._closed = True

    @property
    def times(self) -> Times:
        """The times of the transfer's last start."""
        times = lib.proxyccl_transfer_outcome(self._open()).times
        return Times(times.posted, times.returned, times.ended)

    def _open(self) -> ProxycclTransferPointer:
        self._process.require("the transfer")
        if self._closed:
            raise ClosedError(f"the transfer with agent {self.peer} was closed")
        return self._handle

    def _stalled(self) -> str:
        return "" if self._link is None else self._link.stalled

    def _outcome(self, state: State) -> bool:
        match state:
            case State.DONE:
                return True
            case State.ACTIVE:
                return False
            case State.NEW:
                raise NotStartedError(f"the transfer with agent {self.peer} was never started", self.peer)
            case State.CANCELED:
                raise CanceledError(f"the transfer with agent {self.peer} was canceled", self.peer)
            case State.STALE | State.CORRUPT:
                assert self._granted is not None
                self._granted.raise_stale()
            case State.LOST:
                assert self._link is not None
                raise DisconnectedError(f"agent {self.peer}: {self._link.lost}", self.peer)
        outcome = lib.proxyccl_transfer_outcome(self._open())
        status, fault = outcome.error, outcome.fault
        if fault.kind in _FAULTS:
            kind, text = _FAULTS[fault.kind]
            access = "written" if self.writes else "read"
            raise kind(text.format(peer=self.peer, address=fault.address, access=access), self.peer)
        reason = os.strerror(status) if status < _FABRIC_ERRORS else f"libfabric's error {status}"
        if status < 0 and self._copier is not None:
            try:
                self._copier.runtime.check(-status, "a copy")
            except KernelError as error:
                reason = str(error)
        raise TransferError(f"the transfer with agent {self.peer} by {self.path.name} failed: {reason}", self.peer)


def has_ended(transfer: Transfer, seconds: float) -> bool:
    """Waits up to `seconds` until a transfer is inactive, and returns whether it is. Nothing accesses the memory of an
    inactive transfer. Only threads of the library may call this.
    """
    if transfer._closed:
        return True
    return State(lib.proxyccl_transfer_wait(transfer._handle, int(seconds * 1e9))) is not State.ACTIVE


def set_guard(transfer: Transfer, remote: bool, ledger: Ledger, rows: Rows) -> None:
    """Makes a transfer check registrations of its local or remote side. `rows` are (number of a registration in the
    ledger, address of a block in its region). Call `set_guard` before the first start."""
    kept = np.ascontiguousarray(rows)
    transfer._kept.append((ledger, kept))
    pointer = ffi.cast("uint64_t *", kept.ctypes.data)
    lib.proxyccl_transfer_guard(transfer._open(), remote, ledger.pointer, pointer, len(kept))


def set_check(transfer: Transfer, check: Check) -> Link | None:
    """Makes a transfer end only after a check. Returns the transfer's link. Call `set_check` before the first start."""
    transfer._granted = transfer._check = check
    return transfer._link


def set_grant(transfer: Transfer, granted: Granted, in_engine: ProxycclGrantedPointer) -> None:
    """Makes the engine check a transfer's grant. `granted` keeps the memory and the place of `in_engine`. Call
    `set_grant` before the first start.
    """
    transfer._granted = granted
    transfer._kept.append(granted)
    lib.proxyccl_transfer_set_grant(transfer._open(), in_engine)


def set_label(transfer: Transfer, number: int) -> Transfer:
    """Sets the number that stands for the peer and the path in a transfer's records (`AgentSeen.labels`)."""
    lib.proxyccl_transfer_set_label(transfer._open(), number)
    return transfer


def _release(handle: ProxycclTransferPointer, kept: object) -> None:
    if lib.proxyccl_transfer_release(handle):
        _OUTSTANDING.append(kept)
