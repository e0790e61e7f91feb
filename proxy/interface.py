"""What a communicator asks of a proxy, whoever runs it: a service in the same process, or a daemon that is asked over a
socket.

Memory is named by its address in the caller's process and by a handle, as the proxy may be in another: each takes
the one that is good for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from proxyccl.device.runtime import Event, Stream
from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.trigger import Trigger

Handler = Callable[[Trigger], None]

Handle = Callable[[], bytes]
"""Gives the bytes by which another process opens memory; raises ArgumentError for memory that is private to its own."""


@dataclass(frozen=True)
class Connection:
    """A way to one peer. Belongs to one worker, and so do the channels over it: a connection has no locks.

    Attributes:
        number: among the proxy's, from 0.
        worker: number of its worker.
        peer: the rank that it leads to, or None where nobody said.
        transport: the transport's name.
        pointer: the engine's; None where the proxy is another process.
        owned: what is closed after it, in this order.
    """

    number: int
    worker: int
    peer: int | None
    transport: str
    pointer: Any = None
    owned: tuple[Stream | Event, ...] = ()


@dataclass(frozen=True)
class ChannelCounters:
    """What one channel did so far."""

    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int


@dataclass(frozen=True)
class ProxyFailure:
    """Why a worker ended on its own account.

    Attributes:
        code: an error code of control.h.
        channel: channel id, or None.
        trigger: the trigger that failed, or None.
        status: the transport's or driver's status.
        reason: in words.
        exception: what a handler raised, or None.
        peer: the peer of the connection that failed, or that the trigger was for; None where there is none.
    """

    code: int
    channel: int | None
    trigger: Trigger | None
    status: int
    reason: str
    exception: BaseException | None = None
    peer: int | None = None


@dataclass(frozen=True)
class VerbsOptions:
    """A queue pair and how to use it (verbs_transport.h).

    Attributes:
        qp: address of the ibv_qp, connected and ready to send. No other may use it, nor its queue of send completions.
        send_depth: work requests that its send queue takes.
        cq_depth: completions that its queue of send completions takes. Fewer than `send_depth` leave that much of the
            send queue unused.
        max_message: bytes that one request may carry; longer puts become several.
        signal_rkey: remote key of the memory that the peer's semaphore words lie in.
        fetch_add: signal by an atomic add of one, for a device that takes no inline data.
        scratch: with `fetch_add`, address of 8 registered bytes, aligned to 8, that receive the words' old values.
        scratch_lkey: their local key.
    """

    qp: int
    send_depth: int
    cq_depth: int
    max_message: int
    signal_rkey: int
    fetch_add: bool = False
    scratch: int = 0
    scratch_lkey: int = 0


@dataclass(frozen=True)
class StagedOptions:
    """A queue pair and the memory that stands between it and what it can't reach (staged_transport.h).

    Attributes:
        wire: the queue pair; its `signal_rkey` is of the peer's area.
        area: address of this end's, `staged_area_bytes` of zeroed pinned memory that is registered.
        device_area: the device's address of it.
        area_lkey: its local key.
        peer_area: the peer's, by the address that the peer has registered.
        ring_bytes: of the two rings in an area; the same on both ends, and a multiple of 64.
        chunk_bytes: of a put, are moved at a time.
        landings: address of the table of own memory that peers may have data put in (`Landings`).
        signals: address of the own words that the peer may signal.
        signals_bytes: their size.
    """

    wire: VerbsOptions
    area: int
    device_area: int
    area_lkey: int
    peer_area: int
    ring_bytes: int
    chunk_bytes: int
    landings: int
    signals: int
    signals_bytes: int


class Proxy(Protocol):
    """Drains a rank's rings and issues what their triggers ask for."""

    def fifo_for(self, channel: int) -> Fifo:
        """The ring that a channel's triggers go through."""
        ...

    @property
    def rings(self) -> list[Fifo]:
        """All rings of this rank's kernels."""
        ...

    @property
    def handling(self) -> dict[int, float]:
        """The channel of each handler that runs, and time.monotonic() when it began."""
        ...

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last flush that is complete on a channel."""
        ...

    def outstanding(self, channel: int) -> int | None:
        """Triggers of a channel's connection that are issued and not known to be complete; None where this process
        can't tell, and for a handler.
        """
        ...

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        ...

    @property
    def extents_pointer(self) -> int:
        """The device's address of the table that says for each memory id how many bytes follow it."""
        ...

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        ...

    def add_memory(self, base: int, nbytes: int, key: int = 0, *, handle: Handle | None = None) -> int:
        """Registers memory under a free id, or under consecutive ones if it is longer than 4 GiB. Returns the first.

        Raises ArgumentError for memory that the proxy can't reach, ResourceError when no ids are left.
        """
        ...

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Gives ids back. No trigger may name them any more."""
        ...

    def connect_copy(self, *, peer: int | None = None) -> Connection:
        """A connection that copies within the node."""
        ...

    def connect_verbs(self, options: VerbsOptions, *, peer: int | None = None) -> Connection:
        """A connection that writes to a peer's memory over a queue pair."""
        ...

    def connect_staged(self, options: StagedOptions, *, peer: int | None = None) -> Connection:
        """A connection that moves data through pinned memory on both sides."""
        ...

    def reserve_channel(self, connection: Connection) -> int:
        """A channel id for a connection's ring. Triggers on it are refused until `set_channel`."""
        ...

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: Handle | None = None
    ) -> None:
        """Puts a channel in use. `remote_semaphore` is the word that its signals count up."""
        ...

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Gives a connection's channel ids back."""
        ...

    def add_handler(self, handler: Handler) -> int:
        """A channel whose triggers are passed to a Python function of this process."""
        ...

    def drain(self, timeout: float, given_up: Callable[[], bool] = ...) -> bool:
        """Waits until what the rings held is done and nothing is outstanding; False if that did not come to be."""
        ...

    def close(self, timeout: float = ...) -> bool:
        """Drains the rings and frees everything; False if that did not end in time."""
        ...
