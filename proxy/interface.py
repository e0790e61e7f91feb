"""Types of the arguments and results of a proxy's methods, in this process and in the node daemon."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeAlias

from msgspec import Meta, structs
from msgspec.structs import replace

from proxyccl.proxy._engine import lib
from proxyccl.proxy.codec import Message, Uint32, Uint64
from proxyccl.proxy.trigger import Trigger

Handler = Callable[[Trigger], None]

HandleProvider = Callable[[], bytes]
"""Returns the bytes by which another process opens memory. Raises ArgumentError for memory that no other process can
open.
"""


Signals: TypeAlias = tuple[Uint64, Uint64]
"""How far a channel's two words have come: the fields of a ProxycclSignals (engine/engine.h). (0, 0) for a new channel.
"""


class Connection(Message, frozen=True):
    """A connection to one peer. One worker serves the connection and all its channels, so the state of connection and
    channels needs no lock.
    """

    number: Uint64  # the connection's number in the proxy, from 0
    worker: Uint64  # number of the worker that serves the connection
    peer: Uint64 | None  # the rank at the other end; None if unknown
    transport: str  # the transport's name
    # Whether the connection's channels copy from memory that only the caller's process can access.
    private: bool = False


class ChannelCounters(Message, frozen=True, kw_only=True):
    """A proxy's counters of one channel."""

    triggers: int = 0  # number of triggers, of all operations, that the proxy acted on
    puts: int = 0  # number of triggers that put data, plus schedules' sends that carried data
    bytes: int = 0  # number of bytes that the puts and gets moved
    signals: int = 0  # number of triggers that signalled, plus schedules' sends, which always signal
    flushes: int = 0  # number of triggers that flushed
    gets: int = 0  # number of triggers that got data

    @classmethod
    def of(cls, counters: Any, **others: Any) -> Self:
        """Reads a ProxycclCounters; `others` are the fields that the ProxycclCounters lacks."""
        read = {name: getattr(counters, name) for name in cls.__struct_fields__ if name not in others}
        return cls(**read, **others)


class ProxyFailure(Message, frozen=True):
    """The error that ended a worker."""

    code: Uint32  # a ProxycclErrorCode (control.h)
    channel: Uint64 | None  # id of the channel on which the error occurred; None if no channel is concerned
    words: tuple[Uint64, Uint64] | None  # the two words of the trigger that failed; None if no trigger failed
    # Status of the transport or the driver; 0 if neither failed.
    status: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    reason: str  # the error in words
    exception: BaseException | None = None  # the exception that a handler or thread raised, or None
    # The peer of the connection that failed, or of the failed trigger's connection; None without a connection.
    peer: Uint64 | None = None
    schedule: Uint32 = 0  # number of the schedule that failed; 0 if no schedule failed
    wait: Uint32 = 0  # after a time-out, the kind of wait: a ProxycclWaitKind (control.h)
    offset: Uint64 = 0  # the trigger's offset in the source or destination, if this memory caused the trigger's refusal

    @property
    def trigger(self) -> Trigger | None:
        """The trigger that failed; None if the failure does not concern a trigger."""
        return Trigger.decode(*self.words) if self.words is not None else None


Keys = Annotated[tuple[Uint64, ...], Meta(max_length=lib.PROXYCCL_RAILS)]
"""The keys of a memory on each of a rank's network adapters, in the adapters' order."""


class EndpointWire(Message, frozen=True):
    """A link of a connection in addition to the connection's first link. See `EndpointInfo` for the fields."""

    endpoint: bytes
    rkey: Uint64
    area: Uint64
    mail_rkey: Uint64 = 0
    spare: bytes = b""


class EndpointInfo(Message, frozen=True):
    """A message that tells a peer how to connect to this rank's endpoint."""

    endpoint: bytes  # the endpoint's address, encoded by its transport (for a queue pair an `EndpointAddress`)
    segment: Uint64  # address of the rank's control segment in requests of the peer's device
    rkey: Uint64  # remote key of the control segment or, if data is staged, of the staging area
    # Address of the staging area in requests of the peer's device or, with several adapters, of the memory in which the
    # peer reports a failed adapter.
    area: Uint64 = 0
    ring_bytes: Uint64 = 0  # bytes of each ring in the staging area; 0 if data is not staged
    # The rank's additional links, over other adapters or for staged data; the connection uses as many links as both
    # ranks offer.
    more: tuple[EndpointWire, ...] = ()
    mail_rkey: Uint64 = 0  # with several adapters, remote key of `area`
    # If data is staged over several adapters: address of the endpoint, on the next adapter, that serves this link after
    # a failure of this adapter.
    spare: bytes = b""

    def wires(self) -> list[EndpointInfo]:
        """Returns one `EndpointInfo` for each link of the connection."""
        others = (replace(self, **structs.asdict(each)) for each in self.more)
        return [replace(each, more=()) for each in (self, *others)]


class ExposedMemory(Message, frozen=True):
    """Memory of this rank that peers access by one transport; made by `ServiceRemote.expose`."""

    transport: str  # the transport's name
    address: Uint64  # address of the memory's first byte in peers' requests
    keys: Keys  # keys of the memory in peers' requests: remote keys, or the number of a target
    local_keys: Keys  # keys of the memory in this rank's requests; () if data is staged
    copied: bool  # whether the proxy also uses `address` for copies within the host
    owner: Any  # the state that `withdraw` needs


def issue_warning(text: str) -> None:
    """Issues a RuntimeWarning in this process, or logs the text if the warning raises an error, because the program's
    filters turn warnings into errors or its `showwarning` fails. The callers are threads, whose errors no program would
    catch.
    """
    try:
        # With Python's default filters, `warnings.warn` would print equal warnings only once.
        warnings.warn_explicit(text, RuntimeWarning, "<proxyccl>", 0, "proxyccl")
    except Exception:
        logging.getLogger("proxyccl").warning(text)
