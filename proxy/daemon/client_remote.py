"""A rank's remote links in the node daemon: the same methods as in its own process, requested over the socket."""

from __future__ import annotations

from collections.abc import Callable

from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy.daemon.connection import DaemonConnection
from proxyccl.proxy.daemon.protocol import (
    Connected,
    ConnectEndpoint,
    ConnectRemote,
    Done,
    EndpointMade,
    Expose,
    Exposed,
    ExposePinned,
    MakeEndpoint,
    OpenRemote,
    RemoteSupport,
    RemoteUnsupportedReason,
    Withdraw,
)
from proxyccl.proxy.interface import Connection, EndpointInfo, ExposedMemory


class DaemonRemote:
    """See `proxyccl.proxy.interface.RemoteContext` for the methods.

    Args:
        daemon: the connection to the daemon, which opens a device for it.
        request: names the device.
        timeout: gives the seconds that the registration of memory may take.
    """

    def __init__(self, daemon: DaemonConnection, request: OpenRemote, timeout: Callable[[], float]) -> None:
        self._daemon = daemon
        self._timeout = timeout
        daemon.ask(request, Done)

    def unsupported_reason(self, transport: str) -> str:
        """The reason why a transport's device can't register the memory of the rank's GPU; empty if it can."""
        return self._daemon.ask(RemoteUnsupportedReason(transport), RemoteSupport).unsupported_reason

    def make_endpoint(self, peer: int, transport: str) -> EndpointInfo:
        """This rank's endpoint of a connection to a peer."""
        return self._daemon.ask(MakeEndpoint(peer, transport), EndpointMade).end

    def connect_endpoint(self, peer: int, theirs: EndpointInfo, timeout: float) -> None:
        """Makes the end ready to send to the peer's."""
        self._daemon.ask(ConnectEndpoint(peer, theirs, timeout), Done, takes=timeout)

    def open_connection(self, peer: int) -> Connection:
        """The daemon's connection to a peer, over a connected endpoint."""
        return self._daemon.ask(ConnectRemote(peer), Connected).connection(peer)

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> ExposedMemory:
        """Lets peers reach memory of this process, which the daemon maps."""
        if not handle:
            raise ArgumentError("memory", "the node daemon reaches memory only by a handle, and this has none")
        return self._exposed(transport, Expose(handle, nbytes, transport))

    def expose_pinned(self, memory: PinnedMemory, transport: str) -> ExposedMemory:
        """Lets peers reach pinned memory of this process, which the daemon maps."""
        return self._exposed(transport, ExposePinned(memory.handle, transport))

    def _exposed(self, transport: str, request: Expose | ExposePinned) -> ExposedMemory:
        exposed = self._daemon.ask(request, Exposed, takes=self._timeout())
        return ExposedMemory(
            transport, exposed.address, exposed.key, exposed.local_key, exposed.copied, owner=exposed.number
        )

    def withdraw(self, memory: ExposedMemory) -> None:
        """Ends either."""
        if self._daemon.is_open:
            self._daemon.ask(Withdraw(memory.owner), Done)

    def close(self) -> None:
        """Does nothing: the daemon frees it with the proxy."""
