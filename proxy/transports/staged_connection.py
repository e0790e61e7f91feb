"""The code of the staged transports that does not depend on the wires' transport: connections, endpoints and statuses.

See engine/staged_transport.h.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from proxyccl.device.errors import ArgumentError
from proxyccl.device.ffi_types import fill
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import EndpointInfo, EndpointWire
from proxyccl.proxy.registrations import RegistrationCache, RemoteDevice
from proxyccl.proxy.remote_options import MOST_WIRES
from proxyccl.proxy.transports.copy import make_copy_options
from proxyccl.proxy.transports.rails import Mail, watched_rails
from proxyccl.proxy.transports.transport import (
    MAIL_BYTES,
    EngineConnection,
    EngineRuntime,
    RailsOptions,
    Transport,
    Wire,
    create,
)

ffi, lib = _engine.ffi, _engine.lib
_UNCUT = 2**32 - 1  # bytes from which a put of a wire would be cut: puts of messages are shorter

STATUSES = range(lib.PROXYCCL_STAGED_COPY_OUT, 2 * lib.PROXYCCL_STAGED_REFUSED)
"""The statuses that staged transports return in addition to the statuses of their wires' transports."""

_REFUSALS = {
    lib.PROXYCCL_STAGED_BAD_COUNT: "the peer's count of messages is out of range",
    lib.PROXYCCL_STAGED_BAD_LENGTH: "a message of the peer does not fit the ring",
    lib.PROXYCCL_STAGED_BAD_RANGE: "the peer put or got data outside the memory that this rank offers",
    lib.PROXYCCL_STAGED_BAD_WORD: "the peer signalled an address that is not a semaphore word of this rank",
    lib.PROXYCCL_STAGED_BAD_REQUEST: "the peer asks for more gets than may be outstanding, or sends data with one",
    lib.PROXYCCL_STAGED_BAD_ANSWER: "the peer sends more data than was requested",
}
"""For each ProxycclStagedRefusal, the reason why the engine refused a peer's message."""


class StagedWire(Struct, frozen=True):
    """The engine's options for a wire, which connects the staging areas of two ranks."""

    # The options struct of the wire's transport, or RailsOptions, with the key of the peer's staging area as the key
    # for signals.
    options: Any
    # `area_keys`, `peer_area`, `peer_area_keys`: as in ProxycclStagedWire.
    area_keys: Sequence[int]
    peer_area: int
    peer_area_keys: Sequence[int]
    number: int  # index of this rank's endpoint that the wire uses. One thread serves an endpoint's wires to all peers.


class StagedOptions(Struct, frozen=True):
    """The options of a staged connection."""

    native: Any  # a ProxycclStagedOptions
    wires: tuple[StagedWire, ...]  # the wires, at least one, in the same order as on the peer
    ends: int  # number of this rank's endpoints for wires; the connection may use fewer endpoints

    @classmethod
    def of(cls, wires: Sequence[StagedWire], ends: int, **fields: Any) -> StagedOptions:
        """Makes options with these wires; `fields` are other fields of ProxycclStagedOptions. Raises ArgumentError if
        there are more than `MOST_WIRES` wires, or a value does not fit its field.
        """
        if len(wires) > MOST_WIRES:
            raise ArgumentError("wires", f"must be at most {MOST_WIRES}, not {len(wires)}")
        over_rails = any(isinstance(wire.options, RailsOptions) for wire in wires)
        native = fill(ffi.new("ProxycclStagedOptions *"), wire_count=len(wires), over_rails=over_rails, **fields)
        for place, wire in zip(native.wires, wires, strict=False):
            keys = {"area_keys": wire.area_keys, "peer_area": wire.peer_area, "peer_area_keys": wire.peer_area_keys}
            fill(place, options=wire.options.native if over_rails else wire.options, **keys)
        return cls(native, tuple(wires), ends)


def _connect(engine: EngineRuntime, transport: str, options: StagedOptions, needs: str) -> EngineConnection:
    with contextlib.ExitStack() as undo:
        out, out_stream, out_event = make_copy_options(engine.runtime, undo)
        into, in_stream, in_event = make_copy_options(engine.runtime, undo)
        options.native.copy_out, options.native.copy_in = out[0], into[0]
        over_rails = [wire.options for wire in options.wires if isinstance(wire.options, RailsOptions)]
        rails = [part for each in over_rails for part in (each.native, *each.options)]
        parts = rails or [wire.options for wire in options.wires]
        pointer = create(engine, transport, options.native, *parts, needs=needs)
        undo.pop_all()
    links = [(lib.proxyccl_staged_link(pointer, i), each.rails, each.options) for i, each in enumerate(over_rails)]
    numbers = [wire.number for wire in options.wires] if options.ends > 1 else []
    polled = [(number, lib.proxyccl_staged_wire(pointer, i)) for i, number in enumerate(numbers)]
    owned = out_stream, in_stream, out_event, in_event
    return EngineConnection(pointer, owned, tuple(polled), options.ends, len(links), watched_rails(links))


def _status_text(status: int) -> str:
    if status >= lib.PROXYCCL_STAGED_REFUSED:
        return f"refused: {_REFUSALS[status - lib.PROXYCCL_STAGED_REFUSED]}"
    if status >= lib.PROXYCCL_STAGED_COPY_IN:
        return f"the copy from pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_IN}"
    return f"the copy into pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_OUT}"


class StagedEndpoint:
    """A `TransportEndpoint` that consists of wires and this rank's staging area: pinned memory with two rings, and with
    words that count both engines' progress.

    Args:
        device: the network device that the wires use.
        registrars: for each wire, the cache with which the staging area is registered.
        make_wires: makes the wires, in the order of `registrars`, and after them either nothing, or for each wire a
            wire on the next adapter that takes over after a failure.
        ring_bytes: bytes of each of this rank's two rings.
        chunk_bytes: maximum number of bytes of a put in one message.
        credits_tell: whether the peer's credit for a message implies that the message's write is complete on its wire.
        limit_ns: the longest recovery from a failure, as in ProxycclRailsOptions.

    Raises:
        ResourceError: the system or the device is out of memory or descriptors.
        RuntimeUnavailableError: the device can't register the runtime's pinned memory.
    """

    def __init__(
        self,
        device: RemoteDevice,
        registrars: Sequence[RegistrationCache],
        make_wires: Callable[[], Sequence[Wire]],
        *,
        ring_bytes: int,
        chunk_bytes: int,
        credits_tell: bool,
        limit_ns: int = 0,
    ) -> None:
        self._limit_ns = limit_ns
        self._device, self._chunk_bytes, self._credits_tell = device, chunk_bytes, credits_tell
        align = int(lib.PROXYCCL_STAGED_ALIGN)
        ring_bytes = ring_bytes // align * align
        with contextlib.ExitStack() as undo:
            nbytes = staged_area_bytes(ring_bytes) + len(registrars) * MAIL_BYTES
            self._area = area = device.setup.runtime.allocate_pinned(nbytes)
            undo.callback(area.close)
            made = []
            for registrar in registrars:
                registration = registrar.register(area.host_ptr, area.nbytes)
                undo.callback(registrar.release, registration)
                made.append(registration)
            wires = make_wires()
            for wire in wires:
                undo.callback(wire.close)
            self._wires, self._spares = wires[: len(registrars)], wires[len(registrars) :]
            self._close = undo.pop_all().close
        self._keys = [registration.local_key for registration in made]
        spares = [spare.address for spare in self._spares] or [b""] * len(made)
        first, *more = [
            EndpointWire(wire.address, registration.key, registration.address, spare=spare)
            for wire, registration, spare in zip(self._wires, made, spares, strict=True)
        ]
        segment = device.setup.segment.host_ptr
        self.info = EndpointInfo(
            first.endpoint, segment, first.rkey, first.area, ring_bytes, tuple(more), spare=first.spare
        )

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> StagedOptions:
        """Implements `TransportEndpoint.connect`. Both ranks use the smaller of their two ring sizes and the smaller of
        their two numbers of wires.
        """
        if not theirs.ring_bytes:
            raise ArgumentError("peer", "its end of the connection is not staged, but this end is")
        ring_bytes, setup = min(self.info.ring_bytes, theirs.ring_bytes), self._device.setup
        ends = theirs.wires()
        # With different numbers of adapters, a wire and its spare could join adapters of separate networks.
        is_spared = self._spares and len(ends) == len(self._wires) and all(end.spare for end in ends)
        wires = []
        for i, (wire, end) in enumerate(zip(self._wires, ends, strict=False)):
            options = wire.connect(end, timeout, given_up)
            following = ends[(i + 1) % len(ends)]
            keys, peer_keys = [self._keys[i]], [end.rkey]
            if is_spared:
                keys.append(self._keys[(i + 1) % len(self._keys)])
                peer_keys.append(following.rkey)
                spare = self._spares[i]
                rails = [each.rail for each in (wire, spare) if each.rail is not None]
                both = options, spare.connect(replace(following, endpoint=end.spare), timeout, given_up)
                mails = (
                    Mail(_mail_address(self._area.host_ptr, self.info.ring_bytes, i), keys),
                    Mail(_mail_address(end.area, theirs.ring_bytes, i), peer_keys),
                )
                options = RailsOptions.of(both, (1, 1), rails, mails, cut=_UNCUT, limit_ns=self._limit_ns)
            wires.append(StagedWire(options, keys, end.area, peer_keys, wire.number))
        return StagedOptions.of(
            wires,
            len(self._wires),
            credits_tell=self._credits_tell,
            area=self._area.host_ptr,
            device_area=self._area.ptr,
            ring_bytes=ring_bytes,
            chunk_bytes=min(self._chunk_bytes, ring_bytes // 2),
            write_targets=self._device.write_targets.table,
            signals=setup.segment.host_ptr + setup.signals.start,
            signals_bytes=len(setup.signals),
        )

    def close(self) -> None:
        """Frees the wires and the staging area, which no outstanding copy or request may use."""
        self._close()


def staged_area_bytes(ring_bytes: int) -> int:
    """Returns the number of bytes of a staging area with rings of `ring_bytes`."""
    return int(lib.PROXYCCL_STAGED_WORDS_BYTES) + 2 * ring_bytes


def _mail_address(area: int, ring_bytes: int, wire: int) -> int:
    """Returns the address, after the rings of a staging area, of the memory for reports of a wire's failed rails."""
    return area + staged_area_bytes(ring_bytes) + wire * MAIL_BYTES


def staged_over(
    wire: Transport,
    name: str,
    *,
    needs: str,
    make_endpoint: Callable[[Any], StagedEndpoint],
    statuses: range = range(0),
) -> Transport:
    """Makes the staged transport whose wires are connections of the transport `wire`. `needs`: a text with the build
    requirements of `wire`. `make_endpoint` and `statuses` are fields of the new transport.
    """
    assert wire.remote is not None  # a wire's transport is always remote
    return Transport(
        name,
        connect=lambda engine, options: _connect(engine, name, options, needs),
        status_text=lambda status: _status_text(status) if status in STATUSES else wire.status_text(status),
        statuses=statuses,
        remote=replace(
            wire.remote,
            make_endpoint=make_endpoint,
            refusal="rank {rank}'s memory can't be staged: {reason}",
            stages=True,
        ),
    )
