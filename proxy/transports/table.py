"""All transports, by name."""

from __future__ import annotations

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.transports import copy, fabric, verbs
from proxyccl.proxy.transports.transport import RemoteFunctions, Transport

TRANSPORTS: dict[str, Transport] = {
    record.name: record for record in (copy.TRANSPORT, verbs.TRANSPORT, verbs.STAGED, fabric.TRANSPORT, fabric.STAGED)
}
"""All transports by name, in order of preference: of the transports that reach a peer, the first is used."""


def find_transport(name: str) -> Transport:
    """Returns the transport with this name. Raises ArgumentError if there is no such transport."""
    if name not in TRANSPORTS:
        raise ArgumentError("transport", f"{name!r} is unknown; expected one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def find_copying_transport(name: str) -> Transport:
    """Returns the transport with this name. Raises ArgumentError if no such transport copies within a host."""
    found = find_transport(name)
    if found.is_remote:
        copying = (each.name for each in TRANSPORTS.values() if not each.is_remote)
        raise ArgumentError("transport", f"{name!r} is remote; expected one of {', '.join(copying)}")
    return found


def remote_functions(name: str) -> RemoteFunctions:
    """Returns the functions of the remote transport with this name. Raises ArgumentError if there is no such remote
    transport.
    """
    found = TRANSPORTS.get(name)
    if found is None or found.remote is None:
        remote = (each.name for each in TRANSPORTS.values() if each.is_remote)
        raise ArgumentError("transport", f"{name!r} is not remote; expected one of {', '.join(remote)}")
    return found.remote


def missing_transports() -> dict[str, str]:
    """Returns, for each remote transport, the requirements that this machine lacks, as text; "" if it lacks none."""
    remote = {name: each.remote.missing for name, each in TRANSPORTS.items() if each.remote is not None}
    # Transports of the same device share this function, so it is called only once.
    answers = {missing: missing() for missing in remote.values()}
    return {name: answers[missing] for name, missing in remote.items()}


def text_of_status(status: int) -> str:
    """Returns a text for a failed transfer's status, or "" if the status does not identify a transport."""
    found = next((each for each in TRANSPORTS.values() if status in each.statuses), None)
    return found.status_text(status) if found is not None else ""
