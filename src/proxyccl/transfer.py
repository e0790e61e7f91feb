"""Agents, which come and go, and transfers between their memory: ``from proxyccl.transfer import Agent``.

This module holds the public names and nothing else. docs/transfers.md is an introduction.
"""

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.blocks import strided
from proxyccl.channels.transfers.errors import (
    ActiveError,
    CanceledError,
    DisconnectedError,
    FreedMemoryError,
    MetadataError,
    NameTakenError,
    NoPathError,
    NotRegisteredError,
    NotStartedError,
    TransferError,
    TransferTimeoutError,
    UnknownAgentError,
)
from proxyccl.channels.transfers.host_memory import shared_empty
from proxyccl.channels.transfers.paths import Path
from proxyccl.channels.transfers.regions import Region
from proxyccl.channels.transfers.transfer import State, Times, Transfer

__all__ = [
    "ActiveError",
    "Agent",
    "CanceledError",
    "DisconnectedError",
    "FreedMemoryError",
    "MetadataError",
    "NameTakenError",
    "NoPathError",
    "NotRegisteredError",
    "NotStartedError",
    "Path",
    "Region",
    "State",
    "Times",
    "Transfer",
    "TransferError",
    "TransferTimeoutError",
    "UnknownAgentError",
    "shared_empty",
    "strided",
]
