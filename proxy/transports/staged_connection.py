"""The common part of the transports through pinned memory, with any wire: connections, endpoints, targets and statuses.

See engine/staged_transport.h.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo, EndpointWire, ExposedMemory
from proxyccl.proxy.staging import MOST_WIRES, RemoteWriteTargets, StagedOptions, StagedWire, StagingArea
from proxyccl.proxy.transports.copy import make_copy_options
from proxyccl.proxy.transports.engine_connection import (
    EngineConnection,
    EngineRuntime,
    create,
    fill,
    require_accepted,
)
from proxyccl.proxy.transports.transport import Transport

ffi, lib = _engine.ffi, _engine.lib

STATUSES = range(lib.PROXYCCL_STAGED_COPY_OUT, 2 * lib.PROXYCCL_STAGED_REFUSED)
"""The statuses that staging adds to a wire's."""

_REFUSALS = {
    lib.PROXYCCL_STAGED_BAD_COUNT: "the peer's count of messages is out of range",
    lib.PROXYCCL_STAGED_BAD_LENGTH: "a message of the peer does not fit the ring",
    lib.PROXYCCL_STAGED_BAD_RANGE: "the peer put or got data outside the memory that this rank offers",
    lib.PROXYCCL_STAGED_BAD_WORD: "the peer signalled an address that is not a semaphore word of this rank",
    lib.PROXYCCL_STAGED_BAD_REQUEST: "the peer asks for more gets than may be outstanding, or sends data with one",
    lib.PROXYCCL_STAGED_BAD_ANSWER: "the peer sends more data than was requested",
}
"""The reason why the engine refused a peer's message, by ProxycclStagedRefusal."""


def _connect(
    engine: EngineRuntime, transport: str, options: StagedOptions, native_wire: Callable[[Any], Any], needs: str
) -> EngineConnection:
    native_options = ffi.new("ProxycclStagedOptions *")
    wires = [native_wire(wire.options) for wire in options.wires]
    if len(wires) > MOST_WIRES:
        raise ArgumentError("wires", f"must be at most {MOST_WIRES}, not {len(wires)}")
    for native, wire, made in zip(native_options.wires, options.wires, wires, strict=False):
        fill(native, wire, ("area_key", "peer_area", "peer_area_key"))
        native.options = made
    native_options.wire_count = len(wires)
    fill(
        native_options,
        options,
        ("credits_tell", "area", "device_area", "ring_bytes", "chunk_bytes", "signals", "signals_bytes"),
    )
    native_options.write_targets = ffi.cast("ProxycclRemoteWriteTarget *", options.write_targets)
    require_accepted(transport, native_options, options, *(wire.options for wire in options.wires))
    with contextlib.ExitStack() as undo:
        out, out_stream, out_event = make_copy_options(engine.runtime, undo)
        into, in_stream, in_event = make_copy_options(engine.runtime, undo)
        native_options.copy_out, native_options.copy_in = out[0], into[0]
        pointer = create(engine, transport, native_options, needs=needs)
        undo.pop_all()
    numbers = [wire.number for wire in options.wires] if options.ends > 1 else []
    polled = [(number, lib.proxyccl_staged_wire(pointer, i)) for i, number in enumerate(numbers)]
    return EngineConnection(pointer, (out_stream, in_stream, out_event, in_event), tuple(polled), options.ends)


def _status_text(status: int) -> str:
    if status >= lib.PROXYCCL_STAGED_REFUSED:
        return f"refused: {_REFUSALS[status - lib.PROXYCCL_STAGED_REFUSED]}"
    if status >= lib.PROXYCCL_STAGED_COPY_IN:
        return f"the copy from pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_IN}"
    return f"the copy into pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_OUT}"


class Wire(Protocol):
    """This rank's end of the link between two staging areas."""

    @property
    def address(self) -> bytes:
        """Its address for the peer."""
        ...

    @property
    def number(self) -> int:
        """See `StagedWire`."""
        ...

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        """Connects it to the peer's. See `RemoteContext.connect_endpoint`."""
        ...

    def options(self, theirs: EndpointInfo) -> Any:
        """Options of the wire's own transport, for signals to the peer's area."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...


class StagedDevice(Protocol):
    """Staging's interface to the wire's device."""

    @property
    def segment(self) -> PinnedMemory:
        """The rank's control segment."""
        ...

    @property
    def signals(self) -> range:
        """The range in it, in bytes, of the words that peers' proxies may signal."""
        ...

    @property
    def write_targets(self) -> RemoteWriteTargets:
        """Memory that peers' staged puts may write."""
        ...


class StagedEndpoint:
    """See `TransportEndpoint`: wires, and this rank's staging area at their end, which it owns.

    Args:
        device: the wires' device.
        area: the area.
        keys: of the area, for each wire: for its own requests, for the peer's, and the address that goes with the
            latter.
        make_wires: makes the wires, in that order. If it fails, the area is closed.
        credits_tell: as in `StagedOptions`.
    """

    def __init__(
        self,
        device: StagedDevice,
        area: StagingArea[Any],
        keys: Sequence[tuple[int, int, int]],
        make_wires: Callable[[], Sequence[Wire]],
        *,
        credits_tell: bool,
    ) -> None:
        self._device, self._area, self._credits_tell = device, area, credits_tell
        self._keys = [key for key, _, _ in keys]
        try:
            self._wires = make_wires()
        except ProxyCCLError:
            area.close()
            raise
        first, *more = [
            EndpointWire(wire.address, remote_key, address)
            for wire, (_, remote_key, address) in zip(self._wires, keys, strict=True)
        ]
        self.info = EndpointInfo(
            first.endpoint, device.segment.host_ptr, first.rkey, first.area, area.ring_bytes, tuple(more)
        )

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        """See `TransportEndpoint`."""
        if not theirs.ring_bytes:
            raise ArgumentError("peer", "its end of the connection is not staged, but this end is")
        for wire, end in zip(self._wires, theirs.wires(), strict=False):  # as many as both have
            wire.connect(end, timeout, given_up)

    def connection_options(self, theirs: EndpointInfo) -> StagedOptions:
        """See `TransportEndpoint`."""
        base, words = self._device.segment.host_ptr, self._device.signals
        wires = [
            StagedWire(wire.options(end), key, end.area, end.rkey, wire.number)
            for wire, key, end in zip(self._wires, self._keys, theirs.wires(), strict=False)
        ]
        return self._area.engine_options(
            wires,
            self._credits_tell,
            theirs.ring_bytes,
            self._device.write_targets,
            range(base + words.start, base + words.stop),
        )

    def close(self) -> None:
        """Frees the wires and the area."""
        with contextlib.ExitStack() as steps:  # from the last to the first, each regardless of the others
            steps.callback(self._area.close)
            for wire in self._wires:
                steps.callback(wire.close)


def _expose(transport: str, device: StagedDevice, ptr: int, nbytes: int, host_ptr: int = 0) -> ExposedMemory:
    return ExposedMemory(transport, ptr, device.write_targets.add(ptr, nbytes, host_ptr), 0, True, None)


def _withdraw(device: StagedDevice, memory: ExposedMemory) -> None:
    device.write_targets.remove(memory.key)


def staged_over(
    wire: Transport,
    name: str,
    *,
    native_options: Callable[[Any], Any],
    needs: str,
    make_endpoint: Callable[[Any], StagedEndpoint],
    statuses: range = range(0),
    error_text: Callable[[Any], str] | None = None,
) -> Transport:
    """The transport by pinned memory over a wire, on the wire's device.

    Args:
        wire: the transport of the wire.
        name: of the transport by pinned memory.
        native_options: makes the struct of C from the wire's options. Raises ArgumentError for a value that does not
            fit, by the field's name.
        needs: what a build of the engine needs for the wire.
        make_endpoint: makes an endpoint on the device.
        statuses: as in `Transport`.
        error_text: likewise; None for the wire's.
    """
    assert wire.remote is not None  # a wire leads to another host
    return Transport(
        name,
        connect=lambda engine, options: _connect(engine, name, options, native_options, needs),
        status_text=lambda status: _status_text(status) if status in STATUSES else wire.status_text(status),
        statuses=statuses,
        error_text=error_text or wire.error_text,
        remote=replace(
            wire.remote,
            unsupported_reason=lambda device: "",  # the memory that is registered is the host's
            make_endpoint=make_endpoint,
            expose=lambda device, ptr, nbytes, handle: _expose(name, device, ptr, nbytes),
            expose_pinned=lambda device, pinned: _expose(name, device, pinned.ptr, pinned.nbytes, pinned.host_ptr),
            withdraw=_withdraw,
            registers_source=False,
            refusal="rank {rank}'s memory can't be staged: {reason}",
            withdraws_at_once=True,
        ),
    )
