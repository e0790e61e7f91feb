"""This agent's link to a peer."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from proxyccl.channels.transfers.engine_calls import raise_status
from proxyccl.channels.transfers.paths import Connected
from proxyccl.device.errors import ClosedError, ResourceError
from proxyccl.device.process import forks
from proxyccl.proxy._transfers import ffi, lib

if TYPE_CHECKING:
    from proxyccl.proxy._transfers import ProxycclAgentPointer, ProxycclLinkPointer


class Link:
    """A link that this agent opened. The engine frees the link when neither this object nor a transfer refers to it.

    Attributes:
        peer: the other agent's name.
        handle: the engine's.
        path: how the data moves.
        pid: the process that the kernel copies from and to; 0: it does not.
        carrier: the kind of socket, "unix" or "tcp".

    Args:
        agent: the engine's.
        peer, connected: the other agent, and the socket to it.
        secret: its secret.
        address: of this agent's endpoint of libfabric, which the peer will use; b"": it will not.
    """

    def __init__(
        self, agent: ProxycclAgentPointer, peer: str, secret: bytes, connected: Connected, address: bytes
    ) -> None:
        self.peer = peer
        self.path = connected.path
        self.pid = connected.pid
        self.carrier = connected.carrier
        handle = lib.proxyccl_link_create(
            agent, connected.socket, secret, connected.process, connected.pid, address, len(address)
        )
        if not handle:
            if ffi.errno == errno.ECANCELED:
                raise ClosedError("the agent was closed")
            if ffi.errno == errno.ENOMEM:
                raise MemoryError("there is no memory for a link")
            raise ResourceError(f"the link to agent {peer} can't be watched: {os.strerror(ffi.errno)}")
        self.handle: ProxycclLinkPointer = handle
        forks.finalizer(self, lib.proxyccl_link_release, handle)

    @property
    def lost(self) -> str:
        """Why the link can't carry data; "" while it works."""
        reason = lib.proxyccl_link_lost(self.handle)
        return ffi.string(reason).decode() if reason else ""

    def look(self) -> str:
        """Like `lost`, but polls the socket first, so that a disconnect shows at once."""
        reason = lib.proxyccl_link_look(self.handle)
        return ffi.string(reason).decode() if reason else ""

    def tell(self, message: bytes) -> None:
        """Sends a message.

        Raises:
            DisconnectedError: the link is lost.
            ArgumentError: the message is longer than 256 MiB.
            TransferError: the peer has not taken earlier messages for long.
        """
        raise_status(lib.proxyccl_link_tell(self.handle, message, len(message)), self.peer, self.lost)

    def end(self) -> None:
        """Ends the link. Its active transfers are lost."""
        lib.proxyccl_link_end(self.handle)
