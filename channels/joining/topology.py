"""Computes which ranks share a host, which ranks form a node, and by which transport each pair of ranks is
connected."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from proxyccl.channels.segment.process_descriptors import PeerProcess
from proxyccl.device.arguments.integers import find_integer, find_items
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.hosts import host_name
from proxyccl.proxy.processes import cores_of, encode_cores
from proxyccl.proxy.transports.table import TRANSPORTS

_WITHIN_HOST = next(name for name, transport in TRANSPORTS.items() if not transport.is_remote)
_BETWEEN_HOSTS = [name for name, transport in TRANSPORTS.items() if transport.is_remote]
_REHEARSING = [
    name for name, transport in TRANSPORTS.items() if transport.remote is not None and transport.remote.rehearses
]

TransportChoice = str | Mapping[tuple[int, int], str] | None
"""A transport for all pairs of ranks, or for some pairs. With None, and for pairs that are not named, the library
chooses.
"""


class RankInfo(Message, frozen=True):
    """A rank's message to the other ranks about its process, device and transports."""

    host: str
    process: PeerProcess
    runtime: str
    device_id: str
    cores: str = ""  # the cores that the rank may run on (`encode_cores`)
    # By remote transport, what the rank lacks to use the transport, in words; "" if nothing is missing.
    missing: dict[str, str] = msgspec.field(default_factory=dict)
    transport: str = ""  # the transports that the rank's caller chose, in canonical form (`encode_choice`)
    # The number of consecutive ranks per node that the rank's caller chose; None if a node is a host.
    local_world_size: Annotated[int, Meta(ge=1)] | None = None
    # By remote transport, the reason why the rank's network adapter can't register its GPU's memory. A transport has no
    # entry if registration works or was not tested.
    unsupported: dict[str, str] = msgspec.field(default_factory=dict)
    # The reason why the rank can't use the node daemon; empty if the rank can, or did not ask for the daemon.
    daemon_missing: str = ""

    @classmethod
    def own(cls, runtime: Runtime) -> RankInfo:
        """Returns the message of this process, without the fields that the caller's options determine."""
        cores = encode_cores(cores_of(os.getpid()))
        return cls(host_name(), PeerProcess.own(), runtime.name, runtime.device_id, cores)

    def missing_for(self, transport: str) -> str:
        """Returns what the rank lacks to use a remote transport; "" if nothing is missing."""
        return self.missing.get(transport, "not asked for")

    @property
    def abilities(self) -> tuple[tuple[bool, bool], ...]:
        """For each transport, whether the rank lacks a requirement of the transport, and whether the transport can't
        register the memory of the rank's GPU.
        """
        return tuple((bool(self.missing_for(name)), bool(self.unsupported.get(name))) for name in TRANSPORTS)


RANK_INFO = Codec(RankInfo, 1 << 20)
_CHOICE = Codec[str | list[tuple[int, int, str]]](str | list[tuple[int, int, str]], 16 << 20, name="transport choice")


class Topology(Struct, frozen=True, dict=True):
    """The hosts, nodes and transports of a communicator's ranks, as seen from one rank."""

    rank: int  # this rank
    ranks: tuple[RankInfo, ...]  # every rank's message
    # For each rank the number of its node. A node is a host or, with ``PROXYCCL_LOCAL_WORLD_SIZE``, a group of
    # consecutive ranks.
    nodes: tuple[int, ...]
    # For each rank, whether this rank's kernels can access that rank's memory, because both ranks are on one node and
    # their devices have peer access.
    accessible: tuple[bool, ...]
    # By pair of ranks (the lower rank first), the transport that the caller chose.
    forced: Mapping[tuple[int, int], str]
    forced_for_all: str = ""  # the transport that the caller chose for all pairs; "" if the caller chose none

    @classmethod
    def find(cls, rank: int, ranks: Sequence[RankInfo], runtime: Runtime) -> Topology:
        """Computes the topology from all ranks' messages.

        Raises:
            ArgumentError: ranks use different runtimes or chose different transports or sizes of nodes, or ranks of one
                process use the same GPU.
            RuntimeUnavailableError: a rank's caller asked for the node daemon, which that rank can't use.
        """
        for peer, info in enumerate(ranks):
            if info.daemon_missing:
                raise RuntimeUnavailableError(f"rank {peer}: {info.daemon_missing}")
        kinds = {info.runtime for info in ranks}
        if len(kinds) > 1:
            raise ArgumentError("runtime", f"all ranks must use the same runtime; found {', '.join(sorted(kinds))}")
        if runtime.name != "host":
            _refuse_shared_context(ranks)
        for option in ("transport", "local_world_size"):
            _require_same_choice(ranks, option)
        local_world_size = ranks[0].local_world_size
        if local_world_size is None:
            hosts = list(dict.fromkeys(info.host for info in ranks))
            nodes = tuple(hosts.index(info.host) for info in ranks)
        else:
            nodes = tuple(i // local_world_size for i in range(len(ranks)))
        accessible = tuple(
            peer == rank
            or (
                nodes[peer] == nodes[rank] and info.host == ranks[rank].host and runtime.can_access_peer(info.device_id)
            )
            for peer, info in enumerate(ranks)
        )
        chosen = _CHOICE.decode((ranks[0].transport or "[]").encode(), "rank 0")
        forced_for_all = chosen if isinstance(chosen, str) else ""
        forced = {(a, b): name for a, b, name in chosen} if not isinstance(chosen, str) else {}
        return cls(rank, tuple(ranks), nodes, accessible, forced, forced_for_all)

    def require_accessible(self, peers: Sequence[int], argument: str) -> None:
        """Raises ArgumentError if this rank's kernels can't access the memory of a rank in `peers`."""
        apart = [f"rank {peer}, {self._why_apart(peer)}" for peer in peers if not self.accessible[peer]]
        if apart:
            raise ArgumentError(
                argument,
                f"kernels of rank {self.rank} can't load and store the memory of {'; of '.join(apart)}; use a "
                "ProxyChannel (Communicator.proxy_channels)",
            )

    def _why_apart(self, peer: int) -> str:
        if self.ranks[peer].host != self.ranks[self.rank].host:
            return f"on host {self.ranks[peer].host.partition('/')[0]}"
        if self.nodes[peer] != self.nodes[self.rank]:
            return "on another node, as local_world_size counts them"
        return f"whose device {self.ranks[peer].device_id} is not a peer of {self.ranks[self.rank].device_id}"

    def part(self, members: Sequence[int]) -> Topology:
        """Returns the topology of the ranks in `members`, which are renumbered by their indices in `members`."""
        number = {member: i for i, member in enumerate(members)}
        pairs = {pair: name for pair, name in self.forced.items() if set(pair) <= number.keys()}
        return Topology(
            number[self.rank],
            tuple(self.ranks[member] for member in members),
            tuple(self.nodes[member] for member in members),
            tuple(self.accessible[member] for member in members),
            {(min(ends), max(ends)): pairs[a, b] for a, b in pairs for ends in [(number[a], number[b])]},
            self.forced_for_all,
        )

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this rank's node, including this rank, in ascending order."""
        return [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    def node_members(self) -> list[list[int]]:
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            members.setdefault(node, []).append(rank)
        return list(members.values())

    def has_levels(self) -> bool:
        """Whether there are several nodes, each with the same number of ranks, and that number is at least 2."""
        sizes = {len(members) for members in self.node_members()}
        return self.node_count > 1 and len(sizes) == 1 and sizes != {1}

    @property
    def local_rank(self) -> int:
        return self.node_ranks.index(self.rank)

    @property
    def local_world_size(self) -> int:
        return len(self.node_ranks)

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    @property
    def spans_hosts(self) -> bool:
        return len({info.host for info in self.ranks}) > 1

    def may_touch(self, first: int, second: int) -> bool:
        """Returns whether two ranks are on one node; if one of them is this rank, their devices must also have peer
        access."""
        if first == self.rank:
            return self.accessible[second]
        if second == self.rank:
            return self.accessible[first]
        return self.nodes[first] == self.nodes[second] and self.ranks[first].host == self.ranks[second].host

    def same_host(self, peer: int) -> bool:
        return self.ranks[peer].host == self.ranks[self.rank].host

    def transport(self, first: int, second: int) -> str:
        """Returns the transport between two ranks. Ranks of one node use the copy transport. Ranks of different nodes
        use the first remote transport in `TRANSPORTS` that can register both ranks' memory; if they share a host
        without RDMA adapters, they use the copy transport.

        Raises:
            RuntimeUnavailableError: no transport connects the two ranks.
        """
        pair = (self.ranks[first], self.ranks[second])
        same_host = pair[0].host == pair[1].host
        chosen = self.forced_for_all or self.forced.get((min(first, second), max(first, second)))
        if chosen is not None and not TRANSPORTS[chosen].is_remote:
            if not same_host:
                raise RuntimeUnavailableError(
                    f"transport: no {chosen} between ranks {first} and {second}: they do not share a host"
                )
            return chosen
        if chosen is None and self.nodes[first] == self.nodes[second]:
            return _WITHIN_HOST
        candidates = [chosen] if chosen is not None else _REHEARSING if same_host else _BETWEEN_HOSTS
        usable = [name for name in candidates if not any(info.missing_for(name) for info in pair)]
        if usable:
            return next((name for name in usable if not any(info.unsupported.get(name) for info in pair)), usable[0])
        if chosen is None and same_host:
            return _WITHIN_HOST
        lacking = next(rank for rank in (first, second) if any(map(self.ranks[rank].missing_for, candidates)))
        missing = dict.fromkeys(filter(None, map(self.ranks[lacking].missing_for, candidates)))
        raise RuntimeUnavailableError(
            f"no remote transport between ranks {first} and {second}: rank {lacking} lacks it: {'; '.join(missing)}"
        )

    def transports(self) -> dict[int, str]:
        """Returns, by rank, the transport to each other rank. Raises RuntimeUnavailableError if a rank can't be
        reached."""
        return {peer: self.transport(self.rank, peer) for peer in range(self.world_size) if peer != self.rank}

    def has_remote_pairs(self) -> bool:
        """Returns whether any pair of ranks uses a remote transport. Raises RuntimeUnavailableError on all ranks if a
        pair has no transport.
        """
        return any(TRANSPORTS[transport].is_remote for transport in self.all_transports)

    def stages_remote_pairs(self) -> bool:
        """Returns whether some pairs use remote transports, and all of these transports copy data through staging
        buffers."""
        remote = [functions for name in self.all_transports if (functions := TRANSPORTS[name].remote) is not None]
        return bool(remote) and all(functions.stages for functions in remote)

    @functools.cached_property
    def all_transports(self) -> frozenset[str]:
        """The transports that pairs of ranks use. Raises RuntimeUnavailableError, on all ranks, if a pair has none."""
        return frozenset(self.transport(a, b) for a, b in self._pairs_of_each_kind())

    def _pairs_of_each_kind(self) -> Iterator[tuple[int, int]]:
        """Yields enough pairs of ranks to find every transport that any pair uses. Unless the caller chose transports
        for pairs, few pairs are enough, because a pair's transport depends only on the two ranks' hosts, nodes and
        abilities.
        """
        if self.forced:
            yield from ((a, b) for a in range(self.world_size) for b in range(a))
            return
        first_of_node: dict[int, int] = {}
        beside: tuple[int, int] | None = None
        on_host: dict[str, dict[object, dict[int, int]]] = {}  # by host, abilities and node: the first rank with these
        for rank, (info, node) in enumerate(zip(self.ranks, self.nodes, strict=True)):
            first = first_of_node.setdefault(node, rank)
            beside = (rank, first) if beside is None and rank != first else beside
            _keep_two(on_host.setdefault(info.host, {}).setdefault(info.abilities, {}), node, rank)
        if beside is not None:
            yield beside
        on_hosts: dict[object, dict[str, dict[int, int]]] = {}  # by abilities, host and node: the first rank with these
        for host, by_abilities in on_host.items():
            yield from _pairs_of(by_abilities.values())
            for abilities, ranks in by_abilities.items():
                _keep_two(on_hosts.setdefault(abilities, {}), host, ranks)
        yield from _pairs_of(ranks for by_host in on_hosts.values() for ranks in by_host.values())

    def with_unsupported_reasons(self, unsupported: Sequence[Mapping[str, str]]) -> Topology:
        """Returns a copy of this topology with the given `RankInfo.unsupported` for each rank."""
        ranks = tuple(
            replace(info, unsupported=dict(reasons)) for info, reasons in zip(self.ranks, unsupported, strict=True)
        )
        return replace(self, ranks=ranks)

    def all_accessible(self) -> bool:
        return all(self.accessible)


def _refuse_shared_context(ranks: Sequence[RankInfo]) -> None:
    # Some driver calls, such as loading a kernel, wait for all kernels of a context. If two ranks shared a context,
    # such a call of one rank would never return while a kernel of the other rank waits for the calling rank.
    first: dict[tuple[bytes, str], int] = {}
    for rank, info in enumerate(ranks):
        other = first.setdefault((info.process.token, info.device_id), rank)
        if other != rank:
            raise ArgumentError(
                "device",
                f"ranks {other} and {rank} are threads of one process on the same GPU; give each its own device, "
                "or make them processes",
            )


P = TypeVar("P", bound=Hashable)
V = TypeVar("V")


def _keep_two(kept: dict[P, V], place: P, value: V) -> None:
    if len(kept) < 2:
        kept.setdefault(place, value)


def _pairs_of(ranks: Iterable[Mapping[int, int]]) -> Iterator[tuple[int, int]]:
    yield from itertools.combinations(sorted((rank for each in ranks for rank in each.values()), reverse=True), 2)


def encode_choice(choice: TransportChoice, world_size: int) -> str:
    """Encodes a choice of transports, so that equal choices have equal texts. If `choice` is None, encodes
    ``PROXYCCL_TRANSPORT``.

    Raises:
        ArgumentError: a transport or a pair of ranks is invalid.
    """
    argument = "transport"
    if choice is None:
        choice, argument = os.environ.get("PROXYCCL_TRANSPORT") or {}, "PROXYCCL_TRANSPORT"
    if isinstance(choice, str):
        _require_transport(argument, choice)
        return _CHOICE.encode(choice).decode()
    pairs: dict[tuple[int, int], str] = {}
    if not isinstance(choice, Mapping):
        raise ArgumentError(argument, f"must be a name, or a dict of names by pairs of ranks, not {choice!r}")
    for pair, name in choice.items():
        _require_transport(argument, name)
        given = [find_integer(rank) for rank in find_items(pair) or ()]
        ranks = sorted(rank for rank in given if rank is not None and 0 <= rank < max(world_size, 2))
        if len(given) != 2 or len(ranks) != 2 or ranks[0] == ranks[1]:
            raise ArgumentError(argument, f"{pair!r} is not a pair of different ranks of this communicator")
        pairs[ranks[0], ranks[1]] = name
    return _CHOICE.encode(sorted((*pair, name) for pair, name in pairs.items())).decode()


def _require_transport(argument: str, name: object) -> None:
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ArgumentError(argument, f"{name!r} is not one of {', '.join(TRANSPORTS)}")


def _require_same_choice(ranks: Sequence[RankInfo], option: str) -> None:
    first = getattr(ranks[0], option)
    for rank, info in enumerate(ranks):
        if (chosen := getattr(info, option)) != first:
            raise ArgumentError(option, f"rank {rank} chose {chosen}, rank 0 {first}")


def chosen_local_world_size(choice: int | None, world_size: int) -> int | None:
    """Returns the number of ranks per node, which is `choice`, or if that is None ``PROXYCCL_LOCAL_WORLD_SIZE``.
    Returns None if neither is given.

    Raises:
        ArgumentError: the number does not divide the number of ranks, or the variable is not a positive integer.
    """
    if choice is None:
        text = os.environ.get("PROXYCCL_LOCAL_WORLD_SIZE")
        if not text:
            return None
        if not text.isdecimal() or int(text) < 1:
            raise ArgumentError("PROXYCCL_LOCAL_WORLD_SIZE", f"must be a positive integer, not {text!r}")
        choice = int(text)
    number = find_integer(choice)
    if number is None or number < 1 or world_size % number:
        raise ArgumentError("local_world_size", f"{choice!r} does not divide the world size {world_size}")
    return number
