"""The transports over verbs.

`verbs` makes RDMA writes and reads on one queue pair for each peer (engine/verbs_transport.h). `staged` makes RDMA
writes between pinned memory of the two hosts, with a copy at each end, for memory that the RDMA device can't register
(engine/staged_transport.h).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.remote_options import RdmaOptions, RemoteSetup, TransportOptions
from proxyccl.proxy.transports.rails import PEER_SECONDS, Rail
from proxyccl.proxy.transports.staged_connection import STATUSES, StagedEndpoint, staged_over
from proxyccl.proxy.transports.transport import DirectEndpoint, RemoteFunctions, Transport, Wire, connect
from proxyccl.proxy.verbs.requirements import NEEDS, missing

if TYPE_CHECKING:  # imported at run time only when the device is opened
    from proxyccl.proxy.verbs.endpoint import VerbsDevice
    from proxyccl.proxy.verbs.registrations import VerbsContext

ffi, lib = _engine.ffi, _engine.lib

_COMPLETIONS = (
    ("IBV_WC_SUCCESS", "no error"),
    ("IBV_WC_LOC_LEN_ERR", "the request is longer than its queue pair allows"),
    ("IBV_WC_LOC_QP_OP_ERR", "the queue pair can't carry out the request"),
    ("IBV_WC_LOC_EEC_OP_ERR", "the end-to-end context can't carry out the request"),
    ("IBV_WC_LOC_PROT_ERR", "the local memory is not registered for the request"),
    ("IBV_WC_WR_FLUSH_ERR", "the queue pair was in its error state already"),
    ("IBV_WC_MW_BIND_ERR", "the memory window can't be bound"),
    ("IBV_WC_BAD_RESP_ERR", "the peer's response is not one to the request"),
    ("IBV_WC_LOC_ACCESS_ERR", "the local memory does not allow the access"),
    ("IBV_WC_REM_INV_REQ_ERR", "the peer's device finds the request invalid"),
    ("IBV_WC_REM_ACCESS_ERR", "the peer's memory is not registered for the access"),
    ("IBV_WC_REM_OP_ERR", "the peer's device can't carry out the request"),
    ("IBV_WC_RETRY_EXC_ERR", "the peer's device does not answer: it is down, or no route leads to it"),
    ("IBV_WC_RNR_RETRY_EXC_ERR", "the peer's device stays not ready to receive"),
    ("IBV_WC_LOC_RDD_VIOL_ERR", "the reliable datagram domains differ"),
    ("IBV_WC_REM_INV_RD_REQ_ERR", "the peer's device finds the reliable datagram invalid"),
    ("IBV_WC_REM_ABORT_ERR", "the peer's device aborted the request"),
    ("IBV_WC_INV_EECN_ERR", "the number of the end-to-end context is invalid"),
    ("IBV_WC_INV_EEC_STATE_ERR", "the state of the end-to-end context is invalid"),
    ("IBV_WC_FATAL_ERR", "the device failed"),
    ("IBV_WC_RESP_TIMEOUT_ERR", "the peer's response did not come in time"),
    ("IBV_WC_GENERAL_ERR", "the device reports an error of another kind"),
    ("IBV_WC_TM_ERR", "tag matching failed"),
    ("IBV_WC_TM_RNDV_INCOMPLETE", "software must fetch the message"),
)
"""The names and meanings of infiniband/verbs.h's ibv_wc_status values, by value."""


def _status_text(status: int) -> str:
    if status == lib.PROXYCCL_VERBS_NO_INLINE:
        return "the device does not support inline data, in which values travel; put them from memory"
    if status == lib.PROXYCCL_VERBS_NO_READS:
        return "one of the two devices can't do RDMA reads; have the peer put the data"
    completion = status - lib.PROXYCCL_VERBS_COMPLETION
    if completion < 0:
        return os.strerror(status)
    if completion >= len(_COMPLETIONS):
        return f"work completion status {completion}"
    name, meaning = _COMPLETIONS[completion]
    return f"{name}, {meaning}"


def _recovery_limit(options: RdmaOptions) -> int:
    """Returns the longest time, in ns, that the recovery from a rail's failure may take without progress: the time
    after which the other rail's adapter would report a failure, plus `PEER_SECONDS` for the peer. By the specification
    of InfiniBand, an adapter sends a request again after at most four times its time-out.
    """
    return 4 * (4096 << options.timeout) * (options.retry_count + 1) + PEER_SECONDS * 10**9


def _open(setup: RemoteSetup, options: TransportOptions) -> VerbsContext:
    from proxyccl.proxy.verbs.registrations import VerbsContext

    return VerbsContext(setup, options.rdma)


def _make_wire(device: VerbsDevice, number: int = 0) -> Wire:
    endpoint = device.endpoint()

    def connect(theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        endpoint.connect(theirs.endpoint, timeout, given_up)
        return endpoint.engine_options(theirs.rkey)

    rail = Rail(device.name, endpoint.stop, endpoint.reconnect) if endpoint.signal == "write" and device.reads else None
    return Wire(endpoint.address, number, connect, endpoint.close, rail, device.speed)


def _make_endpoint(device: VerbsContext) -> DirectEndpoint:
    return DirectEndpoint(device, map(_make_wire, device.devices), limit_ns=_recovery_limit(device.options))


TRANSPORT = Transport(
    name="verbs",
    connect=lambda engine, options: connect(engine, "verbs", options, NEEDS),
    status_text=_status_text,
    statuses=range(lib.PROXYCCL_VERBS_COMPLETION, 2 * lib.PROXYCCL_VERBS_COMPLETION),
    remote=RemoteFunctions(
        missing=missing,
        open=_open,
        make_endpoint=_make_endpoint,
        refusal="rank {rank}'s memory can't be reached by RDMA: {reason}; "
        'transport="staged" takes data through pinned memory of the host',
    ),
)


def _make_wires(devices: Sequence[VerbsDevice]) -> list[Wire]:
    """Makes a wire on each device. With several devices that can recover from failures, also makes a second wire on the
    device that follows each.
    """
    wires = [_make_wire(each, number) for number, each in enumerate(devices)]
    if len(devices) > 1 and all(wire.rail is not None for wire in wires):
        wires += [_make_wire(devices[(number + 1) % len(devices)], number) for number in range(len(devices))]
    return wires


def _make_staged_endpoint(device: VerbsContext) -> StagedEndpoint:
    return StagedEndpoint(
        device,
        device.registrations_by_rail,
        lambda: _make_wires(device.devices),
        ring_bytes=device.options.staging_bytes,
        chunk_bytes=device.options.staging_chunk,
        credits_tell=False,
        limit_ns=_recovery_limit(device.options),
    )


STAGED = staged_over(TRANSPORT, "staged", needs=NEEDS, make_endpoint=_make_staged_endpoint, statuses=STATUSES)
