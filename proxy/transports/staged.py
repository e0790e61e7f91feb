"""The transport `staged`: RDMA writes between pinned memory of two hosts, with a copy on either side.

It is for memory that the device can't register (engine/staged_transport.h).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import RdmaEndpointInfo, RdmaMemory
from proxyccl.proxy.transports import verbs
from proxyccl.proxy.transports.copy import make_copy_options
from proxyccl.proxy.transports.engine_connection import (
    EngineConnection,
    EngineRuntime,
    create,
    fill,
    require_accepted,
)
from proxyccl.proxy.transports.transport import RdmaFunctions, Transport
from proxyccl.proxy.verbs.context import VerbsContext
from proxyccl.proxy.verbs.staging import StagedOptions, StagingArea

ffi, lib = _engine.ffi, _engine.lib

_REFUSALS = {
    lib.PROXYCCL_STAGED_BAD_COUNT: "the peer's count of messages is out of range",
    lib.PROXYCCL_STAGED_BAD_LENGTH: "a message of the peer does not fit the ring",
    lib.PROXYCCL_STAGED_BAD_RANGE: "the peer put data outside the memory that this rank offers",
    lib.PROXYCCL_STAGED_BAD_WORD: "the peer signalled an address that is no semaphore word of this rank",
}
"""Why the engine refused a peer's message, by ProxycclStagedRefusal."""


def _connect(engine: EngineRuntime, options: StagedOptions) -> EngineConnection:
    native_options = ffi.new("ProxycclStagedOptions *")
    verbs.fill_verbs_options(native_options.wire, options.wire)
    fill(
        native_options,
        options,
        ("area", "device_area", "area_lkey", "peer_area", "ring_bytes", "chunk_bytes", "signals", "signals_bytes"),
    )
    native_options.write_targets = ffi.cast("ProxycclRemoteWriteTarget *", options.write_targets)
    require_accepted(TRANSPORT.name, native_options, options, options.wire)
    with contextlib.ExitStack() as undo:
        out, out_stream, out_event = make_copy_options(engine.runtime, undo)
        into, in_stream, in_event = make_copy_options(engine.runtime, undo)
        native_options.copy_out, native_options.copy_in = out[0], into[0]
        pointer = create(engine, TRANSPORT.name, native_options, needs=verbs.NEEDS)
        undo.pop_all()
    return EngineConnection(pointer, (out_stream, in_stream, out_event, in_event))


def _status_text(status: int) -> str:
    """One of the statuses of `verbs`, or one that this transport adds."""
    if status >= lib.PROXYCCL_STAGED_REFUSED:
        return f"refused: {_REFUSALS[status - lib.PROXYCCL_STAGED_REFUSED]}"
    if status >= lib.PROXYCCL_STAGED_COPY_IN:
        return f"the copy from pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_IN}"
    if status >= lib.PROXYCCL_STAGED_COPY_OUT:
        return f"the copy into pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_OUT}"
    return verbs.TRANSPORT.status_text(status)


class _Endpoint:
    """See `RdmaEndpoint`."""

    def __init__(self, device: VerbsContext) -> None:
        self._device = device
        self._area = area = StagingArea(device.runtime, device.registrations, device.options)
        try:
            self._endpoint = device.device.endpoint()
        except ProxyCCLError:
            area.close()
            raise
        registered = area.registration
        self.info = RdmaEndpointInfo(
            self._endpoint.address, device.segment.host_ptr, registered.rkey, registered.address, area.ring_bytes
        )

    def connect(self, theirs: RdmaEndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        if not theirs.area:
            raise ArgumentError("peer", "its end of the connection is not staged; expected one that is, as this end")
        self._endpoint.connect(theirs.endpoint, timeout, given_up)

    def connection_options(self, theirs: RdmaEndpointInfo) -> StagedOptions:
        device = self._device
        return self._area.engine_options(
            self._endpoint.engine_options(theirs.rkey),
            theirs.area,
            theirs.ring_bytes,
            device.write_targets,
            device.segment.host_ptr + device.signals.start,
            len(device.signals),
        )

    def close(self) -> None:
        with contextlib.ExitStack() as steps:  # from the last to the first, each whatever becomes of the other
            steps.callback(self._area.close)
            steps.callback(self._endpoint.close)


def _unsupported_reason(device: VerbsContext) -> str:
    return ""  # what is registered is the host's


def _expose(device: VerbsContext, ptr: int, nbytes: int, handle: bytes) -> RdmaMemory:
    return RdmaMemory(TRANSPORT.name, ptr, device.write_targets.add(ptr, nbytes), 0, True, None)


def _withdraw(device: VerbsContext, memory: RdmaMemory) -> None:
    device.write_targets.remove(memory.key)


TRANSPORT = Transport(
    name="staged",
    connect=_connect,
    status_text=_status_text,
    statuses=range(lib.PROXYCCL_STAGED_COPY_OUT, 2 * lib.PROXYCCL_STAGED_REFUSED),
    rdma=RdmaFunctions(
        missing=verbs.missing_for_verbs,
        open=verbs.open_verbs,
        unsupported_reason=_unsupported_reason,
        make_endpoint=_Endpoint,
        expose=_expose,
        withdraw=_withdraw,
        registers_source=False,
        refusal="rank {rank}'s memory can't be staged: {reason}",
        withdraws_at_once=True,
    ),
)
