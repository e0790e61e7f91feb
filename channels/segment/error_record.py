"""Converts the error record of a control block to the exception that each rank raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from proxyccl.channels.segment.calls import CALL_FIELDS
from proxyccl.device._native import lib
from proxyccl.device.driver import LOST_CONTEXT
from proxyccl.device.errors import (
    AbortedError,
    CommunicatorError,
    ContextLostError,
    HandlerError,
    MismatchError,
    PeerLostError,
    ProxyLostError,
    TransportError,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.proxy.codec import Message
from proxyccl.proxy.transports.table import text_of_status
from proxyccl.proxy.trigger import Operation, operation_name

NO_PEER: int = lib.PROXYCCL_NO_PEER
MOST_CAUSE_BYTES = 1000
_MORE = " …"
DIFFERENT_CALL = CALL_FIELDS[0]
"""The field that a mismatch names when ranks make different calls, of collectives or exchanges of the bootstrap."""
WAITS = {
    lib.PROXYCCL_WAIT_RING_ROOM: "room in the trigger ring",
    lib.PROXYCCL_WAIT_RING_SYNC: "the proxy to take a trigger",
    lib.PROXYCCL_WAIT_FLUSH: "a flush",
    lib.PROXYCCL_WAIT_COMPLETION: "the completion of its operations",
    lib.PROXYCCL_WAIT_SM_SIGNAL: "a signal (SmChannel)",
    lib.PROXYCCL_WAIT_PROXY_SIGNAL: "a signal (ProxyChannel)",
    lib.PROXYCCL_WAIT_PACKET: "a packet",
    lib.PROXYCCL_WAIT_GRID: "the other blocks of the grid",
    lib.PROXYCCL_WAIT_CONDITION: "a condition of its kernel",
    lib.PROXYCCL_WAIT_STAGE: "data that its proxy receives",
    lib.PROXYCCL_WAIT_EXECUTION: "an operation of its execution plan",
}
"""The event that a kernel waits for, in words, by ProxycclWaitKind."""

SCHEDULE_WAITS = {
    lib.PROXYCCL_WAIT_SCHEDULE_POST: "rank {peer} to join schedule {schedule}",
    lib.PROXYCCL_WAIT_SCHEDULE_DATA: "the data of rank {peer} in schedule {schedule}",
    lib.PROXYCCL_WAIT_SCHEDULE_SEND: "the end of its sends to rank {peer} in schedule {schedule}",
    lib.PROXYCCL_WAIT_SCHEDULE_GATE: "its stream to open the gate of schedule {schedule}",
}
"""The event that a proxy waits for in a schedule, in words, by ProxycclWaitKind."""

SM_CALLS = {
    lib.PROXYCCL_SM_PUT: "put",
    lib.PROXYCCL_SM_GET: "get",
    lib.PROXYCCL_SM_PUT_PACKETS: "putPackets",
    lib.PROXYCCL_SM_GET_PACKETS: "getPackets",
    lib.PROXYCCL_SM_COPY_TO_PACKETS: "copyToPackets",
    lib.PROXYCCL_SM_COPY_FROM_PACKETS: "copyFromPackets",
}
"""Methods of an SmChannel and functions of mscclpp/packet_device.hpp, by the `operation` of a record."""
SM_MEMORIES = {
    lib.PROXYCCL_SM_PEER_MEMORY: "the peer's memory",
    lib.PROXYCCL_SM_OWN_MEMORY: "the local memory",
    lib.PROXYCCL_SM_PACKET_BUFFER: "the packet buffer",
}
"""The names of the memories whose bounds a kernel checks, by the `wait` of a record."""


class ErrorRecord(Message, frozen=True):
    """A copy of a ProxycclErrorRecord (control.h)."""

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
    cause: str = ""
    """Further details that the rank's CPU adds when it files the record: text, shortened by `bounded`."""


def exception_from(record: ErrorRecord, own_rank: int, cause: str = "") -> CommunicatorError:
    """Returns the exception that this rank raises for an error record. `cause`: details, if this rank itself has
    failed.
    """
    account = _Account(record, own_rank, cause if cause and record.rank == own_rank else record.cause)
    if record.code in _EXCEPTIONS:
        return _EXCEPTIONS[record.code](account)
    text = _TEXTS.get(record.code, "{of.who} ended the communicator{of.because}")
    return account.error(*_KINDS.get(record.code, (AbortedError, "abort")), text.format(of=account))


def bounded(text: str) -> str:
    """Shortens a text to at most MOST_CAUSE_BYTES, at the end of a line unless the first line is too long."""
    if len(text.encode(errors="replace")) <= MOST_CAUSE_BYTES:
        return text
    room = MOST_CAUSE_BYTES - len(_MORE.encode())
    begin = text.encode(errors="replace")[:room].decode(errors="ignore")
    lines, newline, _ = begin.rpartition("\n")
    return f"{lines if newline else begin}{_MORE}"


def raised(error: BaseException) -> str:
    """Describes an error that a rank raised, for the other ranks."""
    text = str(traceback.TracebackException(type(error), error, None))  # works even if str(error) fails
    return f"it raised {type(error).__name__}{text and ': '}{text}"


class _Account:
    """An error record in words.

    Attributes:
        cause: as for `exception_from`; empty if the cause is not known.
        who: the rank that noticed the failure, as text.
        peer: " from rank" and the rank that the error concerns; "" if there is none.
        on: " on channel" and the channel that the error concerns; "" if there is none.
        wait: the event that a kernel waits for, as text.
        because: ": " and the cause; "" if the cause is not known.
    """

    def __init__(self, record: ErrorRecord, own_rank: int, cause: str) -> None:
        self.record, self.cause = record, cause
        self.who = "this rank" if record.rank == own_rank else f"rank {record.rank}"
        self.peer = f" from rank {record.peer}" if record.peer is not None else ""
        self.on = f" on channel {record.channel}" if record.channel is not None else ""
        self.wait = WAITS.get(record.wait, "a signal")
        self.because = f": {cause}" if cause else ""

    def error(
        self, kind: type[CommunicatorError], operation: str, message: str, **details: int | None
    ) -> CommunicatorError:
        known = {"rank": self.record.rank, "peer": self.record.peer, "channel": self.record.channel}
        return kind(message, operation=operation, **(known | details))

    def mismatch(self, argument: str, message: str) -> MismatchError:
        return MismatchError(message, argument=argument, rank=self.record.rank, peer=self.record.peer)


def _timed_out(of: _Account) -> CommunicatorError:
    record = of.record
    if record.wait == lib.PROXYCCL_WAIT_NONE:
        message = f"{of.who} waited too long in the bootstrap{of.peer and f' for a call{of.peer}'}"
        return of.error(WaitTimeoutError, "bootstrap", message)
    if record.wait in SCHEDULE_WAITS:
        what = SCHEDULE_WAITS[record.wait].format(peer=record.peer, schedule=record.expected)
        return of.error(WaitTimeoutError, "schedule", f"the proxy of {of.who} waited too long for {what}")
    what, on, details = WAITS.get(record.wait, "its peers"), of.on, {}
    if record.wait == lib.PROXYCCL_WAIT_EXECUTION:
        threadblock, number = divmod(record.channel or 0, 1 << lib.PROXYCCL_PLACE_OPERATION_BITS)
        what = f"operation {number} of threadblock {threadblock} of its execution plan"
        on, details = "", {"channel": None}
    message = f"{of.who} waited too long for {what}{of.peer}{on}: expected {record.expected}, saw {record.seen}"
    return of.error(WaitTimeoutError, f"wait for {what}", message, **details)


def _proxy_lost(of: _Account) -> CommunicatorError:
    message = f"the node daemon of {of.who} is lost"
    if of.on:
        message = f"a handler{of.on} holds up the proxy of {of.who}"
    elif of.record.status:
        message = f"the proxy of {of.who} hangs"
    return of.error(ProxyLostError, "watch", message + of.because)


def _transfer_failed(of: _Account) -> CommunicatorError:
    record = of.record
    # One failed completion may cover several operations, so the message names none.
    operation = _operation(record) if record.operation else "a transfer"
    direction = "from" if record.operation & Operation.GET else "to"
    to = f" {direction} rank {record.peer}" if record.peer is not None else ""
    cause = of.cause or text_of_status(record.status)
    message = f"{of.who}'s proxy: {operation}{to}{of.on} failed with status {record.status}{cause and f': {cause}'}"
    return of.error(TransportError, operation, message, offset=record.offset)


def _bad_trigger(of: _Account) -> CommunicatorError:
    record, operation = of.record, _operation(of.record)
    extent = f" of {record.size} bytes at offset {record.offset}" if record.operation & Operation.DATA else ""
    direction = "from" if record.operation & Operation.GET else "to"
    to = f" {direction} rank {record.peer}" if record.peer is not None else ""
    message = f"{of.who} pushed a trigger that was refused: {operation}{extent}{to}{of.on}"
    cause, memory = of.because, SM_MEMORIES.get(record.wait)
    if memory is not None and not cause:  # the kernel refused the memory with id `expected`
        size = f"of {record.seen} bytes" if record.seen else f"(memory id {record.expected}, which is not registered)"
        cause = f": the transfer leaves {memory} {size}"
    return of.error(TriggerError, operation, message + cause, offset=record.offset)


def _bad_schedule(of: _Account) -> CommunicatorError:
    message = f"the proxy of {of.who} refused schedule {of.record.expected}{of.peer and f' with rank {of.record.peer}'}"
    return of.error(TriggerError, "schedule", message + of.because)


def _out_of_range(of: _Account) -> CommunicatorError:
    record = of.record
    call = SM_CALLS.get(record.operation, "a call")
    on = f" on its SmChannel to rank {record.peer}" if record.peer is not None else ""
    memory = SM_MEMORIES.get(record.wait, "the memory")
    unit = record.expected
    if unit and (record.offset % unit or record.size % unit):
        problem = f"of {memory}; expected multiples of {unit} bytes, as a packet is never split"
    else:
        problem = f"leave {memory} of {record.seen} bytes"
    message = f"{of.who} called {call}{on}: {record.size} bytes at offset {record.offset} {problem}"
    return of.error(TriggerError, call, message, offset=record.offset)


def _transfer_size(of: _Account) -> CommunicatorError:
    record = of.record
    return of.mismatch("size", f"{of.who} receives {record.expected} bytes{of.peer}, which sends {record.seen}")


def _mismatch(of: _Account) -> CommunicatorError:
    argument = CALL_FIELDS[of.record.wait]
    return of.mismatch(argument, f"{argument}: {of.cause or f'{of.who} and rank {of.record.peer} differ'}")


def _context_lost(of: _Account) -> CommunicatorError:
    status = of.record.status
    what = LOST_CONTEXT.get(status, "the driver failed")
    message = f"{of.who} lost its context on the GPU: {what} (status {status}){of.because}"
    return of.error(ContextLostError, "context", message)


_EXCEPTIONS: dict[int, Callable[[_Account], CommunicatorError]] = {
    lib.PROXYCCL_ERROR_TIMEOUT: _timed_out,
    lib.PROXYCCL_ERROR_PROXY_LOST: _proxy_lost,
    lib.PROXYCCL_ERROR_TRANSPORT: _transfer_failed,
    lib.PROXYCCL_ERROR_BAD_TRIGGER: _bad_trigger,
    lib.PROXYCCL_ERROR_BAD_SCHEDULE: _bad_schedule,
    lib.PROXYCCL_ERROR_OUT_OF_RANGE: _out_of_range,
    lib.PROXYCCL_ERROR_TRANSFER_SIZE: _transfer_size,
    lib.PROXYCCL_ERROR_MISMATCH: _mismatch,
    lib.PROXYCCL_ERROR_CONTEXT_LOST: _context_lost,
}
"""By ProxycclErrorCode, the function that returns the exception. The exceptions of other codes have only a text."""
_KINDS: dict[int, tuple[type[CommunicatorError], str]] = {
    lib.PROXYCCL_ERROR_PEER_LOST: (PeerLostError, "watch"),
    lib.PROXYCCL_ERROR_SHARED_WAIT: (TriggerError, "wait"),
    lib.PROXYCCL_ERROR_SIGNAL_VALUE: (TriggerError, "signal"),
    lib.PROXYCCL_ERROR_INVALID_FLAG: (TriggerError, "packet"),
    lib.PROXYCCL_ERROR_HANDLER: (HandlerError, "handler"),
}
_TEXTS = {
    lib.PROXYCCL_ERROR_PEER_LOST: "the process of rank {of.record.peer} ended (seen by {of.who})",
    lib.PROXYCCL_ERROR_SHARED_WAIT: "two threads of {of.who} waited at once for {of.wait}{of.peer}{of.on}; one thread "
    "calls wait(), and the others of its block continue after __syncthreads()",
    lib.PROXYCCL_ERROR_SIGNAL_VALUE: "{of.who} signalled rank {of.record.peer} with the value {of.record.seen}; "
    "expected one above the count of signals, {of.record.expected}",
    lib.PROXYCCL_ERROR_INVALID_FLAG: "a kernel of {of.who} used packet flag 0, which fresh memory holds",
    lib.PROXYCCL_ERROR_HANDLER: "a handler on {of.who} raised{of.on}{of.because}",
    lib.PROXYCCL_ERROR_PARENT: "the communicator that this one was split from has ended (seen by {of.who})",
}
"""The texts of these exceptions. A code without a text means that a rank ended the communicator."""


def _operation(record: ErrorRecord) -> str:
    return operation_name(Operation(record.operation & 15))
