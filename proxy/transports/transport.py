"""A transport, as Python sees it: one record of functions. The engine's side is transport.h.

A transport is one file here, one file in the engine, and a line in either table. Other modules use the transport's
record and never compare its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy.interface import EndpointInfo, ExposedMemory
from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.transports.engine_connection import EngineConnection, EngineRuntime


class TransportEndpoint(Protocol):
    """This rank's endpoint of a connection to one peer."""

    @property
    def info(self) -> EndpointInfo:
        """The rank's message to the peer about this endpoint."""
        ...

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        """See `RemoteContext.connect_endpoint`. The wait also ends once `given_up` returns True.

        Returns the options for `Transport.connect`. The endpoint must outlive that connection.
        """
        ...

    def close(self) -> None:
        """Frees the endpoint, which connections must no longer use."""
        ...


class RemoteFunctions(Struct, frozen=True):
    """A remote transport's functions. Their first argument is the device from `open`, which has a method `close`.

    Attributes:
        missing: returns the requirements that this machine lacks for the transport, in words; empty if none.
        open: opens the device. Transports with the same `open` share one device of a rank. Raises as the first call of
            `RemoteContext` does.
        unsupported_reason: returns why the device can't register the memory of the rank's GPU; "" if it can, or need
            not. Raises ResourceError.
        make_endpoint: makes an endpoint on the device.
        expose: lets peers reach memory of this rank; takes the device, address, size in bytes and handle. Raises as
            `RemoteContext.expose`.
        withdraw: undoes `expose` or `expose_pinned`.
        registers_source: whether a put's source must be exposed too.
        refusal: error text for memory of `{rank}` that could not be exposed because of `{reason}`.
        withdraws_at_once: whether `withdraw` only refuses later puts of peers, so that it may be called while workers
            still use the memory.
        expose_pinned: lets peers reach pinned memory of this rank, to and from which the CPU copies short data; None if
            nothing is copied on this side.
        rehearses: whether nodes that are rehearsed on one host use this transport by default.
    """

    missing: Callable[[], str]
    open: Callable[[RemoteSetup, TransportOptions], Any]
    unsupported_reason: Callable[[Any], str]
    make_endpoint: Callable[[Any], TransportEndpoint]
    expose: Callable[[Any, int, int, bytes], ExposedMemory]
    withdraw: Callable[[Any, ExposedMemory], None]
    registers_source: bool
    refusal: str
    withdraws_at_once: bool = False
    rehearses: bool = True
    expose_pinned: Callable[[Any, PinnedMemory], ExposedMemory] | None = None


def _no_error_text(connection: Any) -> str:
    return ""


class Transport(Struct, frozen=True):
    """A transport, which moves the data of connections.

    Attributes:
        name: the transport's name, for users and for the engine.
        connect: makes an engine's connection from the transport's options.
        status_text: returns a connection's status in words; "" for a status of the driver.
        statuses: the statuses that no other transport returns.
        error_text: returns details, beyond the status, of the error that ended a connection.
        remote: the functions of a remote transport; None for a transport within a host.
    """

    name: str
    connect: Callable[[EngineRuntime, Any], EngineConnection]
    status_text: Callable[[int], str]
    statuses: range
    remote: RemoteFunctions | None = None
    error_text: Callable[[Any], str] = _no_error_text

    @property
    def is_remote(self) -> bool:
        """Whether the transport reaches peers on other hosts, through endpoints and exposed memory."""
        return self.remote is not None
