"""A rank's RDMA: an end of a connection for each peer that needs one, and what peers tell of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.proxy.interface import Connection, RdmaContext, RdmaEnd, RdmaMemory
from proxyccl.proxy.verbs.address import EndpointAddress
from proxyccl.proxy.verbs.devices import process_numa_node
from proxyccl.proxy.verbs.options import RdmaOptions

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator


class Rdma:
    """Brought up by all ranks together where any two need it: `probe`, then `connect_ends`, which those ranks call too
    that need no connection.

    Args:
        communicator: whose ranks.
        options: device, queue pairs and their settings.
    """

    def __init__(self, communicator: Communicator, options: RdmaOptions) -> None:
        self._communicator = communicator
        self._options = options
        self._context: RdmaContext | None = None
        self._transports: dict[int, str] = {}
        self._own: dict[int, RdmaEnd] = {}
        self._theirs: dict[int, RdmaEnd] = {}

    def probe(self, transports: dict[int, str]) -> list[str]:
        """Opens the device, and tries whether it can register this rank's device memory.

        Args:
            transports: to every other rank, as far as they are known.

        Returns:
            For each rank why its device can't; empty if it can, or need not.

        Raises:
            ArgumentError: an option names something that is not there.
            RuntimeUnavailableError: a rank has no device that can be used.
        """

        def answer() -> dict[str, Any]:
            if not _rdma_peers(transports):
                return {}
            context = self._open()
            return {"refusal": context.refusal() if "verbs" in transports.values() else ""}

        return [str(theirs.get("refusal", "")) for theirs in self._exchange(answer)]

    def connect_ends(self, transports: dict[int, str]) -> None:
        """Makes a queue pair to each peer that RDMA leads to, and pinned memory where it is staged.

        Args:
            transports: to every other rank.

        Raises:
            ArgumentError: a peer's answer makes no sense.
            ResourceError: the device or the system has no room.
            RuntimeUnavailableError: it failed on another rank.
        """
        self._transports = transports
        answers = self._exchange(self._make_ends)

        def connect() -> dict[str, Any]:
            for peer in _rdma_peers(transports):
                theirs = answers[peer].get("ends", {}).get(str(self._communicator.rank))
                if theirs is None:
                    own = self._communicator.rank
                    raise ArgumentError("transport", f"rank {peer} has no queue pair for rank {own}")
                self._theirs[peer] = RdmaEnd.decode(theirs)
                self._opened().connect_end(peer, self._theirs[peer], self._communicator.timeout)
            return {}

        self._exchange(connect)  # nobody sends to a queue pair that is not ready to receive

    def _exchange(self, step: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Every rank's answer. A failure is raised here behind the exchange, and on the other ranks too: none waits for
        a rank that has given up.
        """
        failure: ProxyCCLError | None = None
        try:
            told = step()
        except ProxyCCLError as error:
            failure, told = error, {"failure": str(error)}
        answers = [json.loads(data) for data in self._communicator.all_gather_bytes(json.dumps(told).encode(), "rdma")]
        if failure is not None:
            raise failure
        for peer, theirs in enumerate(answers):
            if "failure" in theirs:
                raise RuntimeUnavailableError(f"no RDMA on rank {peer}: {theirs['failure']}")
        return answers

    def _open(self) -> RdmaContext:
        comm = self._communicator
        near = comm.runtime.numa_node()
        first = comm.control.semaphore_offset(0)
        self._context = comm.proxy.open_rdma(
            self._options,
            range(first, first + comm.control.semaphores_bytes),
            near=process_numa_node() if near is None else near,
            local_rank=sum(comm.topology.same_host(rank) for rank in range(comm.rank)),  # nodes may share devices
        )
        return self._context

    def _opened(self) -> RdmaContext:
        if self._context is None:
            raise ClosedError("no RDMA device is open")
        return self._context

    def _make_ends(self) -> dict[str, Any]:
        self._own = {
            peer: self._opened().make_end(peer, self._transports[peer]) for peer in _rdma_peers(self._transports)
        }
        return {"ends": {peer: end.encode() for peer, end in self._own.items()}}

    def reaches(self, transport: str) -> bool:
        """Whether it leads to any peer in that way: "verbs" or "staged"."""
        return self._context is not None and transport in self._transports.values()

    @property
    def used(self) -> bool:
        """Whether this rank has a device open."""
        return self._context is not None

    def queue_pairs(self, peer: int) -> tuple[int, int]:
        """The numbers of the two queue pairs between this rank and a peer that RDMA leads to: the own, the peer's."""
        own, theirs = (EndpointAddress.decode(ends[peer].endpoint).qp_number for ends in (self._own, self._theirs))
        return own, theirs

    def connect(self, peer: int) -> Connection:
        """The proxy's way to a peer over its queue pair."""
        return self._opened().open_connection(peer)

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> RdmaMemory:
        """Lets peers reach memory of the communicator's runtime. See `RdmaContext.expose`."""
        return self._opened().expose(ptr, nbytes, transport, handle)

    def withdraw(self, memory: RdmaMemory) -> None:
        """Ends `expose`."""
        if self._context is not None:
            self._context.withdraw(memory)

    def semaphore(self, peer: int, channel: int) -> int:
        """The address, as the peer knows it, of the word that signals to a channel of the peer count up."""
        return self._theirs[peer].segment + self._communicator.control.semaphore_offset(channel)

    def close(self) -> None:
        """Frees queue pairs, registrations and the device. The proxy must have ended."""
        if self._context is not None:
            self._context.close()
            self._context = None


def _rdma_peers(transports: dict[int, str]) -> list[int]:
    return [peer for peer, transport in transports.items() if transport != "copy"]
