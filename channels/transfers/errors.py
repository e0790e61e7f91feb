"""The exceptions of agents and their transfers."""

from __future__ import annotations

from proxyccl.device.errors import ProtocolError, ProxyCCLError


class TransferError(ProxyCCLError):
    """A transfer failed, or can't be started. `peer` is the other agent's name, or "" if there is none."""

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class DisconnectedError(TransferError):
    """The peer's process has ended, or the peer was closed or can't be reached."""


class NoPathError(TransferError):
    """None of the allowed paths can transfer data between the two sides' memory."""


class UnknownAgentError(TransferError, LookupError):
    """No agent of this name was added, or the agent was removed."""


class NotRegisteredError(TransferError, LookupError):
    """A block does not lie within registered memory of its agent."""


class NotGrantedError(TransferError, LookupError):
    """A block of a transfer does not lie within a block of the grant, or the grant is for transfers in the other
    direction."""


class StaleReadError(TransferError):
    """The owner has revoked granted blocks before a read of them was complete, so their data must not be used.

    Attributes:
        stale: the number of the grant's generation of each stale block, by the block's index in the read.
        whole: the indices of the blocks whose data arrived whole.
    """

    def __init__(self, message: str, peer: str, stale: dict[int, int], whole: list[int]) -> None:
        super().__init__(message, peer)
        self.stale, self.whole = stale, whole


class CorruptReadError(TransferError):
    """The data that a read has received differs from the checksums of its grant.

    Attributes:
        corrupt: the indices of the blocks whose data differs. The other blocks' data is right.
    """

    def __init__(self, message: str, peer: str, corrupt: list[int]) -> None:
        super().__init__(message, peer)
        self.corrupt = corrupt


class StaleWriteError(TransferError):
    """The owner has revoked granted blocks before a write of them was complete. The blocks of the write may have been
    written in part.

    Attributes:
        stale: the number of the grant's generation of each stale block, by the block's index in the write.
    """

    def __init__(self, message: str, peer: str, stale: dict[int, int]) -> None:
        super().__init__(message, peer)
        self.stale = stale


class FreedMemoryError(TransferError):
    """A block's memory is still registered, but its owner has freed it."""


class NameTakenError(TransferError):
    """An agent of this name was added, and must be removed first."""


class NotStartedError(TransferError):
    """The transfer was never started."""


class ActiveError(TransferError):
    """The transfer is still active, so it can't be started, or could not be canceled in time."""


class CanceledError(TransferError):
    """The transfer was canceled, or this process closed its agent."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A wait reached its time-out. The transfer continues."""


class MetadataError(ProtocolError):
    """The bytes are not an agent's metadata."""
