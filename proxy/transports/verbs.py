"""The transport `verbs`: RDMA writes on one queue pair for each peer (engine/verbs_transport.h)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo, ExposedMemory
from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.transports.engine_connection import EngineConnection, create
from proxyccl.proxy.transports.transport import RemoteFunctions, Transport
from proxyccl.proxy.verbs.requirements import missing

if TYPE_CHECKING:  # imported at run time only when the device is opened
    from proxyccl.proxy.verbs.context import VerbsContext

lib = _engine.lib

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
"""By ibv_wc_status of infiniband/verbs.h: its name and its meaning."""


NEEDS = "libibverbs' headers (Debian, Ubuntu: apt install libibverbs-dev; Fedora: dnf install rdma-core-devel)"
"""The build requirements of this transport."""


def _status_text(status: int) -> str:
    """An errno in words, or an ibv_wc_status above PROXYCCL_VERBS_COMPLETION."""
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


class _Endpoint:
    """See `TransportEndpoint`."""

    def __init__(self, device: VerbsContext) -> None:
        segment = device.segment
        registration = device.registrations.register(segment.host_ptr, segment.nbytes)
        self._endpoint = device.device.endpoint()
        self.info = EndpointInfo(self._endpoint.address, segment.host_ptr, registration.rkey)

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        if theirs.ring_bytes:
            raise ArgumentError("peer", "its end of the connection is staged, but this end is not")
        self._endpoint.connect(theirs.endpoint, timeout, given_up)
        return self._endpoint.engine_options(theirs.rkey)

    def close(self) -> None:
        self._endpoint.close()


def missing_for_verbs() -> str:
    """The requirements of RDMA by verbs that this machine lacks, in words; empty if none."""
    return missing() or ""


def open_verbs(setup: RemoteSetup, options: TransportOptions) -> VerbsContext:
    """Opens the device, which `verbs` and `staged` share."""
    from proxyccl.proxy.verbs.context import VerbsContext

    return VerbsContext(setup, options.rdma)


def _unsupported_reason(device: VerbsContext) -> str:
    from proxyccl.proxy.verbs.device_memory import unsupported_reason

    return unsupported_reason(device.registrations, device.runtime, device.options.gpu_writes)


def _expose(device: VerbsContext, ptr: int, nbytes: int, handle: bytes) -> ExposedMemory:
    from proxyccl.proxy.verbs.device_memory import register_device_memory

    gpu_writes = device.options.gpu_writes
    made = register_device_memory(device.registrations, device.runtime, gpu_writes, ptr, nbytes, handle or None)
    return ExposedMemory(TRANSPORT.name, made.address, made.rkey, made.lkey, made.address == ptr, made)


def _withdraw(device: VerbsContext, memory: ExposedMemory) -> None:
    device.registrations.release(memory.owner)


TRANSPORT = Transport(
    name="verbs",
    connect=lambda engine, options: EngineConnection(create(engine, "verbs", options, needs=NEEDS)),
    status_text=_status_text,
    statuses=range(lib.PROXYCCL_VERBS_COMPLETION, 2 * lib.PROXYCCL_VERBS_COMPLETION),
    remote=RemoteFunctions(
        missing=missing_for_verbs,
        open=open_verbs,
        unsupported_reason=_unsupported_reason,
        make_endpoint=_Endpoint,
        expose=_expose,
        withdraw=_withdraw,
        registers_source=True,
        refusal="rank {rank}'s memory can't be reached by RDMA: {reason}; "
        'transport="staged" takes data through pinned memory of the host',
    ),
)
