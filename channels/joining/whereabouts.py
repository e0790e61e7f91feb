"""Each rank's host, and whether the ranks of a host can reach each other's memory at all."""

from __future__ import annotations

from collections.abc import Sequence

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.hosts import host_name
from proxyccl.proxy.processes import pid_namespace


class Whereabouts(Message, frozen=True):
    """Where a rank is.

    Attributes:
        host: a name that no other host has (`host_name`).
        pid_namespace: as `proxyccl.proxy.processes.pid_namespace`.
    """

    host: str
    pid_namespace: str

    @classmethod
    def own(cls) -> Whereabouts:
        """Those of this process."""
        return cls(host_name(), pid_namespace())


WHEREABOUTS = Codec(Whereabouts, 4096)

_WAY_OUT = "they open each other's memory through /proc/PID/fd; start them in one PID namespace, for containers with"
_CONTAINERS = "docker run --pid=host or --pid=container:NAME, in Kubernetes with hostPID or shareProcessNamespace"


def require_shared_namespaces(ranks: Sequence[Whereabouts]) -> None:
    """Ranks of a host must know each other's processes by the same numbers.

    Raises:
        RuntimeUnavailableError: they don't, on all ranks alike; it names them, and says how to start them.
    """
    for host in dict.fromkeys(rank.host for rank in ranks):
        members: dict[str, list[int]] = {}
        for rank, place in enumerate(ranks):
            if place.host == host:
                members.setdefault(place.pid_namespace, []).append(rank)
        if "" in members and sum(map(len, members.values())) > 1:
            raise RuntimeUnavailableError(
                f"{_named(members[''])}: /proc does not show this PID namespace, and ranks open each other's memory "
                "through /proc/PID/fd; mount it there: mount -t proc proc /proc, or unshare --mount-proc"
            )
        if len(members) > 1:
            groups = " and ".join(_named(each) for each in members.values())
            name = host.partition("/")[0]
            raise RuntimeUnavailableError(
                f"{groups} of host {name} are in different PID namespaces, but {_WAY_OUT} {_CONTAINERS}"
            )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
