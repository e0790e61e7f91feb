"""All transports, by name."""

from __future__ import annotations

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.transports import copy, fabric, verbs
from proxyccl.proxy.transports.transport import RemoteFunctions, Transport

TRANSPORTS: dict[str, Transport] = {
    record.name: record for record in (copy.TRANSPORT, verbs.TRANSPORT, verbs.STAGED, fabric.TRANSPORT, fabric.STAGED)
}
"""All transports. If several reach a peer, the first of them is preferred."""


def find_transport(name: str) -> Transport:
    """Returns the transport with a name. Raises ArgumentError if there is none."""
    if name not in TRANSPORTS:
        raise ArgumentError("transport", f"{name!r} is unknown; expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def find_copying_transport(name: str) -> Transport:
    """Returns the transport with a name. Raises ArgumentError unless the transport copies within a host."""
    found = find_transport(name)
    if found.is_remote:
        copying = (each.name for each in TRANSPORTS.values() if not each.is_remote)
        raise ArgumentError("transport", f"{name!r} is remote; expected one of {', '.join(copying)}")
    return found


def remote_functions(name: str) -> RemoteFunctions:
    """Returns the functions of the remote transport with a name. Raises ArgumentError if there is none."""
    found = TRANSPORTS.get(name)
    if found is None or found.remote is None:
        remote = (each.name for each in TRANSPORTS.values() if each.is_remote)
        raise ArgumentError("transport", f"{name!r} is not remote; expected one of {', '.join(remote)}")
    return found.remote


def missing_transports() -> dict[str, str]:
    """The requirements that this machine lacks for each remote transport, in words; empty if none."""
    remote = {name: each.remote.missing for name, each in TRANSPORTS.items() if each.remote is not None}
    answers = {missing: missing() for missing in remote.values()}  # the transports of one device have the same function
    return {name: answers[missing] for name, missing in remote.items()}


def text_of_status(status: int) -> str:
    """A failed transfer's status in words, if only one transport can return it; otherwise empty."""
    found = next((each for each in TRANSPORTS.values() if status in each.statuses), None)
    return found.status_text(status) if found is not None else ""
