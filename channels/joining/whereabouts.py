"""Finds each rank's host, and how the ranks of a host pass each other descriptors of memory.

Processes of one PID namespace open each other's descriptors in /proc. Processes in different containers pass
descriptors over a Unix socket that both can reach.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.daemon.introduced import offer
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.hosts import host_name, same_host, told_apart_by


class Whereabouts(Message, frozen=True):
    """A rank's message about its host and namespaces."""

    host: str  # the result of `host_name`
    process: PeerProcess  # the rank's process
    # For each kind of socket that the rank can use, the best first, a text "kind details", which is equal on ranks that
    # can reach each other by such a socket.
    sockets: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()  # for each other kind, the reason why the rank can't use it

    @classmethod
    def own(cls) -> Whereabouts:
        directory, no_directory = sockets.usable_directory()
        daemon, no_daemon = _daemon()
        found = (sockets.shared_network(), directory, daemon)
        lacking = (no_directory, no_daemon)
        return cls(host_name(), PeerProcess.own(), tuple(filter(None, found)), tuple(filter(None, lacking)))

    def sees(self, other: Whereabouts) -> bool:
        """Returns whether the two ranks can open each other's descriptors in /proc, or are in one process."""
        own, theirs = self.process, other.process
        return own.view == theirs.view if own.view else own.token == theirs.token

    def way(self, other: Whereabouts) -> str | None:
        """Returns the means by which two ranks pass descriptors: "" for /proc, else the kind of socket; None if the two
        ranks can't pass descriptors.
        """
        if self.sees(other):
            return ""
        return next((kind.partition(" ")[0] for kind in self.sockets if kind in other.sockets), None)


WHEREABOUTS = Codec(Whereabouts, 4096)

_DAEMON_SECONDS = 1.0


def _daemon() -> tuple[str, str]:
    try:
        path = socket_path()
    except ArgumentError as error:
        return "", str(error)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        info = Path(path).stat()
        connection.settimeout(_DAEMON_SECONDS)
        connection.connect(str(path))
        return f"daemon {info.st_dev}:{info.st_ino}", ""
    return "", f"no node daemon at {path}"


def find_hosts(ranks: Sequence[Whereabouts]) -> list[str]:
    """Returns the name of each rank's host: the `host` of the lowest rank on that host.

    Raises:
        ArgumentError: ``PROXYCCL_HOSTS`` differs between ranks; raised on all ranks.
        RuntimeUnavailableError: ranks of one host share neither /proc nor a socket. All ranks raise this error, which
            names these ranks and says how to start them.
    """
    choices = [told_apart_by(place.host) for place in ranks]
    for rank, choice in enumerate(choices):
        if choice != choices[0]:
            found = f"rank 0 has {choices[0]!r}, rank {rank} {choice!r}"
            raise ArgumentError("PROXYCCL_HOSTS", f"must be the same on all ranks; {found}")
    first: dict[str, str] = {}
    hosts = [first.setdefault(rank.host.partition("/")[2], rank.host) for rank in ranks]
    for host in first.values():
        _require_ways([(rank, place) for rank, place in enumerate(ranks) if same_host(place.host, host)])
    return hosts


def open_ways(ranks: Sequence[Whereabouts], hosts: Sequence[str], rank: int, timeout: float) -> dict[int, str]:
    """Prepares this process to exchange descriptors with ranks of its host that can't open them in /proc.

    Args:
        ranks: every rank's message.
        hosts: the result of `find_hosts`.
        rank: this rank.
        timeout: the longest wait for an answer of the node daemon, in seconds.

    Returns:
        By rank, for each rank of the host whose descriptors can't be opened in /proc, the kind of socket for
        descriptors.

    Raises:
        ResourceError: no file descriptor or thread is left.
        RuntimeUnavailableError: no socket can be made in the directory of sockets, or the node daemon does not answer.
    """
    of_host = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    ways = {peer: way for peer in of_host if (way := ranks[rank].way(ranks[peer]))}
    if ways:
        server = serve()
        if "directory" in ways.values():
            try:
                server.listen_in_directory()
            except OSError as error:
                raise RuntimeUnavailableError(f"no socket can be made in {sockets.directory()}: {error}") from None
        if "daemon" in ways.values():
            offer(socket_path(), timeout)
    return ways


def _require_ways(of_host: Sequence[tuple[int, Whereabouts]]) -> None:
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, place in of_host:
        alike.setdefault((place.process.view or place.process, place.sockets), []).append(rank)
    by_rank = dict(of_host)
    for members, others in itertools.combinations(alike.values(), 2):
        one, other = by_rank[members[0]], by_rank[others[0]]
        if one.way(other) is None:
            raise RuntimeUnavailableError(_apart(members, one, others, other))


def _apart(members: Sequence[int], one: Whereabouts, others: Sequence[int], other: Whereabouts) -> str:
    name, other_name = (place.host.partition("/")[0] for place in (one, other))
    where = f"host {name}" if name == other_name else f"one machine ({name}, {other_name})"
    lacking = "; ".join(
        f"{_named(ranks)}: {', '.join(place.lacking)}"
        for ranks, place in ((members, one), (others, other))
        if place.lacking
    )
    proc = "PID (or user) namespace" if one.process.view or other.process.view else "/proc that shows them"
    return (
        f"{_named(members)} and {_named(others)} are on {where}, but can't pass each other descriptors of memory: they "
        f"share no {proc}, network namespace or directory of sockets{f' ({lacking})' if lacking else ''}. "
        "Mount one directory into all containers and name it by PROXYCCL_SOCKETS (or mount the node daemon's socket, "
        "PROXYCCL_DAEMON_SOCKET), or start them with --network=host or --pid=host (hostNetwork, hostPID). "
        "PROXYCCL_HOSTS=name makes each container a separate host, for RDMA or libfabric"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
