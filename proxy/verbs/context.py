"""What one rank has on an RDMA device, for a service in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxyccl.device.errors import ArgumentError, ProxyCCLError, ResourceError
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import Connection, RdmaEnd, RdmaMemory
from proxyccl.proxy.verbs.devices import choose_device, rdma_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registration, Registrations
from proxyccl.proxy.verbs.staging import Landings, StagingArea, refusal, register_device_memory

if TYPE_CHECKING:
    from proxyccl.proxy.service import ProxyService

_TRANSPORTS = ("verbs", "staged")
_MOST_ENDS: int = _engine.lib.PROXYCCL_MAX_CONNECTIONS


@dataclass
class _End:
    endpoint: Endpoint
    area: StagingArea | None
    theirs: RdmaEnd | None = None
    used: bool = False  # a connection is open over it


class VerbsContext:
    """See `proxyccl.proxy.interface.RdmaContext` for the methods, and `Proxy.open_rdma` for what is not said here.

    Ends and memories belong to a protection domain of its own, so keys of another context are worth nothing here.

    Args:
        service: whose connections it makes.
        runtime: whose device memory peers reach.
        segment: the control segment.
    """

    def __init__(
        self,
        service: ProxyService,
        runtime: Runtime,
        segment: PinnedMemory,
        options: RdmaOptions,
        signals: range,
        *,
        near: int | None,
        local_rank: int,
    ) -> None:
        if not 0 <= signals.start <= signals.stop <= segment.nbytes:
            raise ArgumentError("signals", f"must lie within the {segment.nbytes} bytes of the control segment")
        self._service = service
        self._runtime = runtime
        self._segment = segment
        self._signals = signals
        self._options = options
        self._ends: dict[int, _End] = {}
        self._landings = Landings()
        self._device = VerbsDevice.open(choose_device(rdma_devices(), options, near, local_rank=local_rank), options)
        self._registrations = Registrations(self._device)

    def refusal(self) -> str:
        """Why the device can't register the runtime's device memory; empty if it can."""
        return refusal(self._registrations, self._runtime)

    def make_end(self, peer: int, transport: str) -> RdmaEnd:
        """This rank's end of a way to a peer."""
        _require_transport(transport)
        if peer in self._ends:
            raise ArgumentError("peer", f"there is an end for rank {peer} already")
        if len(self._ends) == _MOST_ENDS:
            raise ResourceError(f"a rank has at most {_MOST_ENDS} RDMA connections")
        segment, area = self._segment, None
        if transport == "staged":
            area = StagingArea(self._runtime, self._registrations, self._options)
            registered = area.registration
        else:
            registered = self._registrations.register(segment.host_ptr, segment.nbytes)
        try:
            endpoint = self._device.endpoint()
        except ProxyCCLError:
            if area is not None:
                area.close()
            raise
        self._ends[peer] = _End(endpoint, area)
        if area is None:
            return RdmaEnd(endpoint.address, segment.host_ptr, registered.rkey)
        return RdmaEnd(endpoint.address, segment.host_ptr, registered.rkey, registered.address, area.ring_bytes)

    def connect_end(
        self, peer: int, theirs: RdmaEnd, timeout: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Makes the end ready to send to the peer's. Once `given_up` is true nobody need wait."""
        end = self._end(peer)
        if (end.area is not None) != bool(theirs.area):
            raise ArgumentError("peer", f"rank {peer} stages data, or this rank does, and the other does not")
        end.endpoint.connect(theirs.endpoint, timeout, given_up)
        end.theirs = theirs

    def open_connection(self, peer: int) -> Connection:
        """The service's way to a peer."""
        end = self._end(peer)
        theirs = end.theirs
        if theirs is None or end.used:
            raise ArgumentError(
                "peer", f"the end for rank {peer} is {'in use already' if end.used else 'not connected'}"
            )
        wire = end.endpoint.engine_options(theirs.rkey)
        end.used = True
        if end.area is None:
            return self._service.connect_verbs(wire, peer=peer)
        first = self._segment.host_ptr + self._signals.start
        options = end.area.engine_options(
            wire, theirs.area, theirs.ring_bytes, self._landings, first, len(self._signals)
        )
        return self._service.connect_staged(options, peer=peer)

    def _end(self, peer: int) -> _End:
        if peer not in self._ends:
            raise ArgumentError("peer", f"there is no end for rank {peer}")
        return self._ends[peer]

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> RdmaMemory:
        """Lets peers reach memory."""
        _require_transport(transport)
        if transport == "staged":
            return RdmaMemory(transport, ptr, self._landings.add(ptr, nbytes), 0, True, None)
        made = register_device_memory(self._registrations, self._runtime, ptr, nbytes, handle or None)
        return RdmaMemory(transport, made.address, made.rkey, made.lkey, made.address == ptr, made)

    def withdraw(self, memory: RdmaMemory) -> None:
        """Ends `expose`."""
        if isinstance(memory.owner, Registration):
            self._registrations.release(memory.owner)
        else:
            self._landings.remove(memory.key)

    def close(self) -> None:
        """Frees queue pairs, registrations and the device."""
        with contextlib.ExitStack() as steps:  # from the last to the first, each whatever becomes of the others
            steps.callback(self._device.close)
            steps.callback(self._registrations.close)
            for end in self._ends.values():
                if end.area is not None:
                    steps.callback(end.area.close)
                steps.callback(end.endpoint.close)
            self._ends.clear()


def _require_transport(transport: str) -> None:
    if transport not in _TRANSPORTS:
        raise ArgumentError("transport", f"must be one of {', '.join(_TRANSPORTS)}, not {transport!r}")
