"""The exceptions of agents and their transfers."""

from __future__ import annotations

from proxyccl.device.errors import ProtocolError, ProxyCCLError


class TransferError(ProxyCCLError):
    """A transfer failed, or can't begin. `peer` is the other agent's name, "" if no other agent is involved."""

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class DisconnectedError(TransferError):
    """The peer has ended, has closed its agent, or can't be reached. A later agent may take its name."""


class NoPathError(TransferError):
    """No path moves data between these kinds of memory, or between these devices and hosts."""


class UnknownAgentError(TransferError, LookupError):
    """No agent of this name was added, or it was removed."""


class NotRegisteredError(TransferError, LookupError):
    """A block does not lie within memory that its agent has registered."""


class FreedMemoryError(TransferError):
    """A block's memory is registered, but no longer mapped: the owner freed the memory before deregistering it."""


class NameTakenError(TransferError):
    """Another agent of this name was added, and has not been removed."""


class NotStartedError(TransferError):
    """The transfer was never started."""


class ActiveError(TransferError):
    """The transfer is still active, so it can't be started again."""


class CanceledError(TransferError):
    """The transfer was canceled, or this process closed its agent."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A wait reached its time-out. The operation that it waited for goes on."""


class MetadataError(ProtocolError):
    """The bytes are not an agent's metadata."""
