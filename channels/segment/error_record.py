"""The error record of a control block, and the exception that it becomes on each rank."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.segment.calls import CALL_FIELDS
from proxyccl.device._native import lib
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
from proxyccl.device.gpu.lost_context import LOST_CONTEXT
from proxyccl.proxy.codec import Message
from proxyccl.proxy.transports.table import text_of_status
from proxyccl.proxy.trigger import Operation, operation_name

NO_PEER: int = lib.PROXYCCL_NO_PEER
DIFFERENT_CALL = CALL_FIELDS[0]
"""The argument that a mismatch names when ranks make different calls: collectives, or exchanges of the bootstrap."""
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
    lib.PROXYCCL_WAIT_EXECUTION: "an operation of its execution plan",
}
"""What a kernel's wait waits for, by ProxycclWaitKind."""

PLAN_WAITS = {
    lib.PROXYCCL_WAIT_PLAN_POST: "rank {peer} to join plan {plan}",
    lib.PROXYCCL_WAIT_PLAN_DATA: "the data of rank {peer} in plan {plan}",
    lib.PROXYCCL_WAIT_PLAN_SEND: "the end of its sends to rank {peer} in plan {plan}",
    lib.PROXYCCL_WAIT_PLAN_GATE: "its stream to open the gate of plan {plan}",
}
"""What a proxy waits for in a plan, by ProxycclWaitKind."""

SM_CALLS = {
    lib.PROXYCCL_SM_PUT: "put",
    lib.PROXYCCL_SM_GET: "get",
    lib.PROXYCCL_SM_PUT_PACKETS: "putPackets",
    lib.PROXYCCL_SM_GET_PACKETS: "getPackets",
}
"""Methods of an SmChannel, by the `operation` of a record."""
SM_MEMORIES = {
    lib.PROXYCCL_SM_PEER_MEMORY: "the peer's memory",
    lib.PROXYCCL_SM_OWN_MEMORY: "the own memory",
    lib.PROXYCCL_SM_PACKET_BUFFER: "the packet buffer",
}
"""What a range of an SmChannel leaves, by the `wait` of a record."""


class ErrorRecord(Message, frozen=True):
    """A ProxycclErrorRecord of control.h, read."""

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
        if record.wait in PLAN_WAITS:
            what = PLAN_WAITS[record.wait].format(peer=record.peer, plan=record.expected)
            return WaitTimeoutError(f"the proxy of {who} waited too long for {what}", operation="plan", **details)
        what = WAITS.get(record.wait, "its peers")
        if record.wait == lib.PROXYCCL_WAIT_EXECUTION:
            what, on = _execution_place(record.channel or 0), ""
            details["channel"] = None
        message = f"{who} waited too long for {what}{peer}{on}: expected {record.expected}, saw {record.seen}"
        return WaitTimeoutError(message, operation=f"wait for {what}", **details)
    if code == lib.PROXYCCL_ERROR_PEER_LOST:
        return PeerLostError(f"the process of rank {record.peer} ended (seen by {who})", operation="watch", **details)
    if code == lib.PROXYCCL_ERROR_PROXY_LOST:
        message = f"the node daemon of {who} is lost"
        if record.channel is not None:
            message = f"a handler{on} holds up the proxy of {who}"
        elif record.status:
            message = f"the proxy of {who} hangs"
        return ProxyLostError(_join(message, cause), operation="watch", **details)
    operation = operation_name(Operation(record.operation & 15))
    if code == lib.PROXYCCL_ERROR_TRANSPORT:
        operation = operation if record.operation else "a transfer"  # the completion that failed may be of several
        direction = "from" if record.operation & Operation.GET else "to"
        to = f" {direction} rank {record.peer}" if record.peer is not None else ""
        message = f"{who}'s proxy: {operation}{to}{on} failed with status {record.status}"
        cause = cause or text_of_status(record.status)
        return TransportError(_join(message, cause), operation=operation, offset=record.offset, **details)
    if code == lib.PROXYCCL_ERROR_BAD_TRIGGER:
        extent = f" of {record.size} bytes at offset {record.offset}" if record.operation & Operation.DATA else ""
        message = f"{who} pushed a trigger that was refused: {operation}{extent}{on}"
        return TriggerError(_join(message, cause), operation=operation, offset=record.offset, **details)
    if code == lib.PROXYCCL_ERROR_BAD_PLAN:
        message = f"the proxy of {who} refused plan {record.expected}{peer and f' with rank {record.peer}'}"
        return TriggerError(_join(message, cause), operation="plan", **details)
    if code == lib.PROXYCCL_ERROR_OUT_OF_RANGE:
        call = SM_CALLS.get(record.operation, "a call")
        message = (
            f"{who} called {call} on its SmChannel to rank {record.peer}: {record.size} bytes at offset "
            f"{record.offset} leave {SM_MEMORIES.get(record.wait, 'the memory')} of {record.seen} bytes"
        )
        return TriggerError(message, operation=call, offset=record.offset, **details)
    if code == lib.PROXYCCL_ERROR_SHARED_WAIT:
        message = (
            f"two threads of {who} waited at once for {WAITS.get(record.wait, 'a signal')}{peer}{on}; one thread calls "
            "wait(), and the others of its block go on behind __syncthreads()"
        )
        return TriggerError(message, operation="wait", **details)
    if code == lib.PROXYCCL_ERROR_SIGNAL_VALUE:
        message = (
            f"{who} signalled rank {record.peer} with the value {record.seen}; expected one above the count of "
            f"signals, {record.expected}"
        )
        return TriggerError(message, operation="signal", **details)
    if code == lib.PROXYCCL_ERROR_INVALID_FLAG:
        return TriggerError(
            f"a kernel of {who} used packet flag 0, which fresh memory holds", operation="packet", **details
        )
    if code == lib.PROXYCCL_ERROR_HANDLER:
        return HandlerError(_join(f"a handler on {who} raised{on}", cause), operation="handler", **details)
    if code == lib.PROXYCCL_ERROR_TRANSFER_SIZE:
        message = f"{who} receives {record.expected} bytes{peer}, which sends {record.seen}"
        return MismatchError(message, argument="size", rank=record.rank, peer=record.peer)
    if code == lib.PROXYCCL_ERROR_MISMATCH:
        argument = CALL_FIELDS[record.wait]
        what = "make different calls" if argument == DIFFERENT_CALL else f"call a collective with different {argument}"
        message = f"{argument}: {who} and rank {record.peer} {what}"
        return MismatchError(_join(message, cause), argument=argument, rank=record.rank, peer=record.peer)
    if code == lib.PROXYCCL_ERROR_PARENT:
        message = f"the communicator that this one was split from has ended (seen by {who})"
        return AbortedError(message, operation="abort", **details)
    if code == lib.PROXYCCL_ERROR_CONTEXT_LOST:
        what = LOST_CONTEXT.get(record.status, "the driver failed")
        message = f"{who} lost its context on the GPU: {what} (status {record.status})"
        return ContextLostError(_join(message, cause), operation="context", **details)
    return AbortedError(_join(f"{who} ended the communicator", cause), operation="abort", **details)


def _execution_place(place: int) -> str:
    """An operation of an execution plan, from the place that a step has (execution.h)."""
    bits = lib.PROXYCCL_PLACE_OPERATION_BITS
    return f"operation {place & (1 << bits) - 1} of threadblock {place >> bits} of its execution plan"


def _join(message: str, cause: str) -> str:
    return f"{message}: {cause}" if cause else message
