"""The transport `staged`: RDMA writes of verbs between pinned memory of two hosts, with a copy on either side.

It is for memory that the RDMA device can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable

from proxyccl.proxy import _engine
from proxyccl.proxy.interface import RdmaEndpointInfo, RdmaMemory
from proxyccl.proxy.staging import StagedOptions, StagingArea
from proxyccl.proxy.transports import staged_connection, verbs
from proxyccl.proxy.transports.engine_connection import EngineConnection, EngineRuntime
from proxyccl.proxy.transports.staged_connection import StagedEndpoint, connect_staged
from proxyccl.proxy.transports.transport import RdmaFunctions, Transport
from proxyccl.proxy.verbs.context import VerbsContext
from proxyccl.proxy.verbs.endpoint import VerbsOptions

ffi = _engine.ffi


def _connect(engine: EngineRuntime, options: StagedOptions) -> EngineConnection:
    wire = ffi.new("ProxycclVerbsOptions *")
    verbs.fill_verbs_options(wire, options.wire)
    return connect_staged(engine, TRANSPORT.name, options, wire, verbs.NEEDS)


def _status_text(status: int) -> str:
    return staged_connection.status_text(status, verbs.TRANSPORT.status_text)


class _Wire:
    """See `staged_connection.Wire`."""

    def __init__(self, device: VerbsContext) -> None:
        self._endpoint = device.device.endpoint()
        self.address = self._endpoint.address

    def connect(self, theirs: RdmaEndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        self._endpoint.connect(theirs.endpoint, timeout, given_up)

    def options(self, theirs: RdmaEndpointInfo) -> VerbsOptions:
        return self._endpoint.engine_options(theirs.rkey)

    def close(self) -> None:
        self._endpoint.close()


def _make_endpoint(device: VerbsContext) -> StagedEndpoint:
    options = device.options
    area = StagingArea(device.runtime, device.registrations, options.staging_bytes, options.staging_chunk)
    made = area.registration
    return StagedEndpoint(device, area, (made.lkey, made.rkey, made.address), lambda: _Wire(device))


def _unsupported_reason(device: VerbsContext) -> str:
    return ""  # what is registered is the host's


def _expose(device: VerbsContext, ptr: int, nbytes: int, handle: bytes) -> RdmaMemory:
    return staged_connection.expose(TRANSPORT.name, device, ptr, nbytes)


TRANSPORT = Transport(
    name="staged",
    connect=_connect,
    status_text=_status_text,
    statuses=staged_connection.STATUSES,
    rdma=RdmaFunctions(
        missing=verbs.missing_for_verbs,
        open=verbs.open_verbs,
        unsupported_reason=_unsupported_reason,
        make_endpoint=_make_endpoint,
        expose=_expose,
        withdraw=staged_connection.withdraw,
        registers_source=False,
        refusal="rank {rank}'s memory can't be staged: {reason}",
        withdraws_at_once=True,
    ),
)
