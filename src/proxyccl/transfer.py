"""Agents, which may join and leave, and transfers between agents' memory: ``from proxyccl.transfer import Agent``.

This module contains only the public names. docs/transfers.md is an introduction.
"""

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.blocks import strided
from proxyccl.channels.transfers.errors import (
    ActiveError,
    CanceledError,
    CorruptReadError,
    DisconnectedError,
    FreedMemoryError,
    MetadataError,
    NameTakenError,
    NoPathError,
    NotGrantedError,
    NotRegisteredError,
    NotStartedError,
    StaleReadError,
    StaleWriteError,
    TransferError,
    TransferTimeoutError,
    UnknownAgentError,
)
from proxyccl.channels.transfers.grants import Grant
from proxyccl.channels.transfers.host_memory import shared_empty
from proxyccl.channels.transfers.paths import Path
from proxyccl.channels.transfers.regions import Region
from proxyccl.channels.transfers.transfer import State, Times, Transfer

__all__ = [
    "ActiveError",
    "Agent",
    "CanceledError",
    "CorruptReadError",
    "DisconnectedError",
    "FreedMemoryError",
    "Grant",
    "MetadataError",
    "NameTakenError",
    "NoPathError",
    "NotGrantedError",
    "NotRegisteredError",
    "NotStartedError",
    "Path",
    "Region",
    "StaleReadError",
    "StaleWriteError",
    "State",
    "Times",
    "Transfer",
    "TransferError",
    "TransferTimeoutError",
    "UnknownAgentError",
    "shared_empty",
    "strided",
]
