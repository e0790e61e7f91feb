"""The exceptions of agents and their transfers."""

from __future__ import annotations

from proxyccl.device.errors import ProtocolError, ProxyCCLError


class TransferError(ProxyCCLError):
    """A transfer failed, or can't begin. `peer` is the other agent's name, "" if no other agent is involved."""

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class DisconnectedError(TransferError):
    """The peer has ended, has closed its agent, or can't be reached. Agents that join later may have its name."""


class NoPathError(TransferError):
    """Nothing moves data between these two kinds of memory, or between these two places."""


class UnknownAgentError(TransferError, LookupError):
    """No agent of this name was added, or it was removed."""


class NotRegisteredError(TransferError, LookupError):
    """A block does not lie within memory that its agent has registered."""


class FreedMemoryError(TransferError):
    """A block's memory is registered, but no longer mapped: its owner freed it before it deregistered it."""


class NameTakenError(TransferError):
    """Another agent of this name was added, and has not been removed."""


class NotStartedError(TransferError):
    """The transfer was never started."""


class ActiveError(TransferError):
    """The transfer is active, so it can't be started again."""


class CanceledError(TransferError):
    """The transfer was canceled, or this agent was closed."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A bounded wait ran out. The operation goes on."""


class MetadataError(ProtocolError):
    """The bytes are not an agent's metadata."""
