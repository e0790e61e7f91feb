"""Who is where: which ranks share a host, which of them count as one node, and whose memory a kernel here can touch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime


def host_name() -> str:
    """This machine's name, and its boot id, which tells apart hosts of one name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


@dataclass(frozen=True)
class RankInfo:
    """What a rank tells the others of itself."""

    host: str
    pid: int
    runtime: str
    device_id: str

    @classmethod
    def own(cls, runtime: Runtime) -> RankInfo:
        """This process on this machine."""
        return cls(host_name(), os.getpid(), runtime.name, runtime.device_id)

    def encode(self) -> bytes:
        """As bytes for the bootstrap."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankInfo:
        """The inverse of `encode`."""
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Topology:
    """The ranks of a communicator, as seen from one of them.

    Attributes:
        rank: the one it is seen from.
        ranks: all of them.
        nodes: for each rank the number of its node. Nodes are hosts, or groups of consecutive ranks where
            ``PROXYCCL_LOCAL_WORLD_SIZE`` rehearses several on one machine.
        accessible: for each rank whether kernels here can touch its memory: same node, and the devices are peers.
    """

    rank: int
    ranks: tuple[RankInfo, ...]
    nodes: tuple[int, ...]
    accessible: tuple[bool, ...]

    @classmethod
    def find(cls, rank: int, ranks: Sequence[RankInfo], runtime: Runtime, local_world_size: int | None) -> Topology:
        """Works the topology out from what all ranks told.

        Raises:
            ArgumentError: ranks use different runtimes, ranks of one process the same GPU, or local_world_size does
                not divide the number of ranks.
        """
        kinds = {info.runtime for info in ranks}
        if len(kinds) > 1:
            raise ArgumentError("runtime", f"all ranks must use the same runtime; found {', '.join(sorted(kinds))}")
        if runtime.name != "host":
            _refuse_shared_context(ranks)
        if local_world_size is None:
            hosts = list(dict.fromkeys(info.host for info in ranks))
            nodes = tuple(hosts.index(info.host) for info in ranks)
        else:
            if not isinstance(local_world_size, int) or local_world_size < 1 or len(ranks) % local_world_size:
                raise ArgumentError(
                    "local_world_size", f"{local_world_size!r} does not divide the world size {len(ranks)}"
                )
            nodes = tuple(i // local_world_size for i in range(len(ranks)))
        accessible = tuple(
            peer == rank
            or (
                nodes[peer] == nodes[rank] and info.host == ranks[rank].host and runtime.can_access_peer(info.device_id)
            )
            for peer, info in enumerate(ranks)
        )
        return cls(rank, tuple(ranks), nodes, accessible)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this rank's node, in order."""
        return [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]

    @property
    def local_rank(self) -> int:
        """This rank's number within its node."""
        return self.node_ranks.index(self.rank)

    @property
    def local_world_size(self) -> int:
        """Number of ranks of this node."""
        return len(self.node_ranks)

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes))

    def same_host(self, peer: int) -> bool:
        """Whether the peer runs under the same kernel, whatever node it counts to."""
        return self.ranks[peer].host == self.ranks[self.rank].host

    def all_accessible(self) -> bool:
        """Whether every rank's memory can be touched from here."""
        return all(self.accessible)


def _refuse_shared_context(ranks: Sequence[RankInfo]) -> None:
    # A driver lets some calls, loading a kernel for one, wait for all that runs in a context; with another rank's
    # kernel in it, which waits for this one's, they never return.
    first: dict[tuple[str, int, str], int] = {}
    for rank, info in enumerate(ranks):
        other = first.setdefault((info.host, info.pid, info.device_id), rank)
        if other != rank:
            raise ArgumentError(
                "device",
                f"ranks {other} and {rank} are threads of one process on the same GPU; give each a device of its own, "
                "or make them processes",
            )


def local_world_size_from_environment() -> int | None:
    """``PROXYCCL_LOCAL_WORLD_SIZE``, or None.

    Raises:
        ArgumentError: it is no positive integer.
    """
    text = os.environ.get("PROXYCCL_LOCAL_WORLD_SIZE")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError("PROXYCCL_LOCAL_WORLD_SIZE", f"must be a positive integer, not {text!r}")
    return int(text)
