"""Connects a rank to peers on other hosts: exchanges the endpoints of each pair of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from proxyccl.channels.joining.meeting import Meeting
from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.proxy.codec import Codec, Message, Uint32
from proxyccl.proxy.daemon.client import Proxy, RemoteContext
from proxyccl.proxy.interface import EndpointInfo, ExposedMemory
from proxyccl.proxy.placement import Place, process_numa_node
from proxyccl.proxy.transports.table import TRANSPORTS


class _Answer(Message, frozen=True):
    """A rank's message to the other ranks during the set-up of remote links."""

    failure: str = ""  # the reason why this rank can't continue; empty if it can
    # By transport, the reason why the network device can't register the GPU's memory; empty if it can.
    unsupported_reasons: dict[str, str] = msgspec.field(default_factory=dict)
    wanted: list[Uint32] = msgspec.field(default_factory=list)  # the peers for which this rank still needs an endpoint
    # This rank's new endpoints, each listed once even if several peers share it.
    endpoints: list[EndpointInfo] = msgspec.field(default_factory=list)
    # By peer, the index in `endpoints` of the endpoint for that peer.
    for_peers: dict[int, Uint32] = msgspec.field(default_factory=dict)

    def endpoint_for(self, rank: int) -> EndpointInfo | None:
        number = self.for_peers.get(rank, len(self.endpoints))
        return self.endpoints[number] if number < len(self.endpoints) else None


_ANSWER = Codec(_Answer, 16 << 20, "remote set-up answer")


class RemoteLinks:
    """Sets up remote links: first `probe`, then `connect_endpoints` for the peers that are used. If any two ranks need
    remote links, all ranks call both methods together.

    Args:
        meeting: the ranks.
        proxy: returns this rank's proxy.
        core_share: as for `Proxy.open_remote`.

    Attributes:
        by_peer: the transport to each peer, set after `probe`.
    """

    def __init__(self, meeting: Meeting, proxy: Callable[[], Proxy], core_share: int) -> None:
        self._meeting, self._control, self._exchange = meeting, meeting.control, meeting.exchange
        self._proxy, self._core_share = proxy, core_share
        self._context: RemoteContext | None = None
        self.by_peer: dict[int, str] = {}
        self._own: dict[int, EndpointInfo] = {}
        self._theirs: dict[int, EndpointInfo] = {}

    def probe(self, transports: dict[int, str]) -> list[dict[str, str]]:
        """Opens the transports' devices, and checks whether they can register this rank's device memory.

        Args:
            transports: by peer, the transport that is chosen before the result of `probe` is known.

        Returns:
            For each rank, by transport, the reason why the rank's network device can't register device memory; "" if
            the device can, or need not register it.

        Raises:
            ArgumentError: an option names a device that does not exist.
            RuntimeUnavailableError: a rank has no device that can be used.
        """

        def answer() -> _Answer:
            used = _remote_transports(transports)
            if not used:
                return _Answer()
            context = self._open()
            return _Answer(unsupported_reasons={name: context.unsupported_reason(name) for name in used})

        return [theirs.unsupported_reasons for theirs in self._together(answer)]

    def connect_endpoints(self, peers: Collection[int]) -> None:
        """Makes the missing endpoints for some peers on other hosts, and pinned memory if transfers are staged. All
        ranks call this together, each with the peers that it will use. Both ranks of a pair make endpoints even if only
        one of them needs the connection.

        Raises:
            ArgumentError: a peer's answer is invalid.
            ResourceError: the device or the system has too few resources left.
            RuntimeUnavailableError: the call failed on another rank.
        """
        rank = self._exchange.rank
        remote = self.peers
        wanted = [peer for peer in peers if peer in remote and peer not in self._theirs]
        wishes = self._together(lambda: _Answer(wanted=wanted))
        if not any(theirs.wanted for theirs in wishes):
            return
        callers = {peer for peer, theirs in enumerate(wishes) if rank in theirs.wanted}
        new = sorted({*wanted, *callers} & remote)
        answers = self._together(lambda: self._make_endpoints(new))

        def connect() -> _Answer:
            for peer in new:
                theirs = answers[peer].endpoint_for(rank)
                if theirs is None:
                    raise ArgumentError("transport", f"rank {peer} has no endpoint for rank {rank}")
                self.context.connect_endpoint(peer, theirs, self._exchange.timeout)
                self._theirs[peer] = theirs
            return _Answer()

        self._together(connect)  # a queue pair must be ready to receive before its peer sends

    def _together(self, step: Callable[[], _Answer]) -> list[_Answer]:
        """Runs a step on this rank, and exchanges the results with all ranks. If the step fails on any rank, all ranks
        raise an error after the exchange, so that no rank waits for the failed rank.
        """
        failure: ProxyCCLError | None = None
        try:
            mine = step()
        except ProxyCCLError as error:
            failure, mine = error, _Answer(failure=str(error))
        answers = self._exchange.all_gather(mine, _ANSWER, "remote set-up")
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # avoids a reference cycle through the traceback and this frame
        for peer, theirs in enumerate(answers):
            if theirs.failure:
                raise RuntimeUnavailableError(f"no remote transport on rank {peer}: {theirs.failure}")
        return answers

    def _open(self) -> RemoteContext:
        first = self._control.semaphore_offset(0)
        lower = range(self._exchange.rank)
        self._context = self._proxy().open_remote(
            self._meeting.options.transports,
            range(first, first + self._control.semaphores_bytes),
            near=Place(self._meeting.runtime.pci_address, process_numa_node()),
            # If several nodes are simulated on one host, they may share network devices.
            local_rank=sum(self._meeting.topology.same_host(rank) for rank in lower),
            core_share=self._core_share,
        )
        return self._context

    @property
    def context(self) -> RemoteContext:
        """The open devices. Raises ClosedError if no device is open."""
        if self._context is None:
            raise ClosedError("no network device is open")
        return self._context

    def _make_endpoints(self, peers: Sequence[int]) -> _Answer:
        numbers: dict[EndpointInfo, int] = {}
        for_peers = {}
        for peer in peers:
            if peer not in self._own:
                self._own[peer] = self.context.make_endpoint(peer, self.by_peer[peer])
            for_peers[peer] = numbers.setdefault(self._own[peer], len(numbers))
        return _Answer(endpoints=list(numbers), for_peers=for_peers)

    @property
    def peers(self) -> set[int]:
        return {peer for peer, transport in self.by_peer.items() if TRANSPORTS[transport].is_remote}

    @property
    def transports(self) -> list[str]:
        """The remote transports in use, in the order of `TRANSPORTS`."""
        return _remote_transports(self.by_peer) if self._context is not None else []

    @property
    def used(self) -> bool:
        return self._context is not None

    def queue_pairs(self, peer: int) -> tuple[int, int]:
        """Returns the queue pair numbers of this rank and of a peer for their connection over verbs."""
        from proxyccl.proxy.verbs.address import EndpointAddress

        own, theirs = (EndpointAddress.decode(ends[peer].endpoint).qp_number for ends in (self._own, self._theirs))
        return own, theirs

    def withdraw(self, memory: ExposedMemory) -> None:
        if self._context is not None:
            self._context.withdraw(memory)

    def semaphore(self, peer: int, channel: int) -> int:
        """Returns the address on the peer of the word that counts signals to the peer's channel."""
        return self._theirs[peer].segment + self._control.semaphore_offset(channel)

    def close(self) -> None:
        """Frees endpoints, registrations and the device. The proxy must be closed."""
        if self._context is not None:
            self._context.close()
            self._context = None


def _remote_transports(transports: dict[int, str]) -> list[str]:
    used = set(transports.values())
    return [name for name, transport in TRANSPORTS.items() if transport.is_remote and name in used]
