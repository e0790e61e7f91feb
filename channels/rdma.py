"""A rank's RDMA: its device, a queue pair to each peer that needs one, and the keys of what it registered."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.proxy.service import Connection
from proxyccl.proxy.verbs.devices import choose_device, process_numa_node, rdma_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registration, Registrations

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator


class Rdma:
    """All ranks make it together, those that need no queue pair too, if any rank does.

    The control segments are registered here, so that a peer's proxy can signal their words.

    Args:
        communicator: whose ranks.
        peers: the ranks that RDMA leads to.
        options: device, queue pairs and their settings.
        exchange: whether any rank has such peers; the same on all.

    Raises:
        ArgumentError: an option names something that is not there, or a peer's answer makes no sense.
        RuntimeUnavailableError: this rank has no device that can be used.
    """

    def __init__(self, communicator: Communicator, peers: list[int], options: RdmaOptions, *, exchange: bool) -> None:
        self._communicator = communicator
        self._device: VerbsDevice | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._theirs: dict[int, dict[str, Any]] = {}
        if not exchange:
            return
        try:
            self._bring_up(peers, options)
        except ProxyCCLError:
            self.close()
            raise

    def _bring_up(self, peers: list[int], options: RdmaOptions) -> None:
        answer: dict[str, Any] = {}
        failure: ProxyCCLError | None = None
        try:
            if peers:
                answer = self._open(peers, options)
        except ProxyCCLError as error:
            failure = error
        answers = self._exchange(answer, failure)
        failure = None
        try:
            for peer in peers:
                self._theirs[peer] = answers[peer]
                address = answers[peer].get("endpoints", {}).get(str(self._communicator.rank))
                if address is None:
                    own = self._communicator.rank
                    raise ArgumentError("transport", f"rank {peer} has no queue pair for rank {own}")
                self._endpoints[peer].connect(bytes.fromhex(address), self._communicator.timeout)
        except ProxyCCLError as error:
            failure = error
        self._exchange({}, failure)  # nobody sends to a queue pair that is not ready to receive

    def _exchange(self, answer: dict[str, Any], failure: ProxyCCLError | None) -> list[dict[str, Any]]:
        """Every rank's answer. A failure is raised here behind the exchange, and on the other ranks too: none waits for
        a rank that has given up.
        """
        told = answer if failure is None else {"failure": str(failure)}
        answers = [json.loads(data) for data in self._communicator.all_gather_bytes(json.dumps(told).encode(), "rdma")]
        if failure is not None:
            raise failure
        for peer, theirs in enumerate(answers):
            if "failure" in theirs:
                raise RuntimeUnavailableError(f"no RDMA on rank {peer}: {theirs['failure']}")
        return answers

    def _open(self, peers: list[int], options: RdmaOptions) -> dict[str, Any]:
        comm, segment = self._communicator, self._communicator.control
        near = comm.runtime.numa_node()
        if near is None:
            near = process_numa_node()
        beside = sum(comm.topology.same_host(rank) for rank in range(comm.rank))  # rehearsed nodes share devices
        choice = choose_device(rdma_devices(), options, near, local_rank=beside)
        self._device = VerbsDevice.open(choice, options)
        self._registrations = Registrations(self._device)
        registered = self._registrations.register(segment.host_pointer, segment.memory.nbytes)
        self._endpoints = {peer: self._device.endpoint() for peer in peers}
        return {
            "segment": segment.host_pointer,
            "rkey": registered.rkey,
            "endpoints": {peer: endpoint.address.hex() for peer, endpoint in self._endpoints.items()},
        }

    @property
    def used(self) -> bool:
        """Whether this rank has a device open."""
        return self._device is not None

    def queue_pairs(self, peer: int) -> tuple[int, int]:
        """The numbers of the two queue pairs between this rank and a peer that RDMA leads to: the own, the peer's."""
        endpoint = self._endpoints[peer]
        assert endpoint.peer is not None
        return endpoint.qp_number, endpoint.peer.qp_number

    def connect(self, peer: int) -> Connection:
        """The proxy's way to a peer over its queue pair."""
        options = self._endpoints[peer].engine_options(self._theirs[peer]["rkey"])
        return self._communicator.proxy.connect_verbs(options, peer=peer)

    def register(self, ptr: int, nbytes: int, allocation: bytes) -> Registration:
        """Registers memory of the communicator's runtime.

        Args:
            ptr: its address.
            nbytes: its size.
            allocation: what tells its allocation from all others; empty where nothing does.
        """
        runtime = self._communicator.runtime
        dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
        return self._registrations.register(ptr, nbytes, dmabuf, allocation=allocation or None)

    def release(self, registration: Registration) -> None:
        """Ends one use of a registration."""
        self._registrations.release(registration)

    def semaphore(self, peer: int, channel: int) -> int:
        """The address, as the peer knows it, of the word that signals to a channel of the peer count up."""
        return int(self._theirs[peer]["segment"]) + self._communicator.control.semaphore_offset(channel)

    def close(self) -> None:
        """Frees queue pairs, registrations and the device. The proxy must have ended."""
        if self._device is None:
            return
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._registrations.close()
        self._device.close()
        self._device = None
