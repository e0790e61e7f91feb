"""A rank's RDMA: its device, a queue pair to each peer that needs one, and the keys of what it registered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.proxy.interface import Connection
from proxyccl.proxy.verbs.devices import choose_device, process_numa_node, rdma_devices
from proxyccl.proxy.verbs.endpoint import Endpoint, VerbsDevice
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registration, Registrations
from proxyccl.proxy.verbs.staging import Landings, StagingArea, refusal, register_device_memory

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator


class Rdma:
    """Brought up by all ranks together where any two need it: `probe`, then `connect_endpoints`, which those ranks call
    too that need no queue pair.

    The control segments are registered here, so that a peer's proxy can signal their words.

    Args:
        communicator: whose ranks.
        options: device, queue pairs and their settings.

    Attributes:
        landings: own memory that staged peers may have data put in.
    """

    def __init__(self, communicator: Communicator, options: RdmaOptions) -> None:
        self._communicator = communicator
        self._options = options
        self._device: VerbsDevice | None = None
        self._transports: dict[int, str] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._areas: dict[int, StagingArea] = {}
        self._theirs: dict[int, dict[str, Any]] = {}
        self.landings = Landings()

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
            self._open()
            asked = "verbs" in transports.values()
            return {"refusal": refusal(self._registrations, self._communicator.runtime) if asked else ""}

        with self._closed_on_failure():
            return [str(theirs.get("refusal", "")) for theirs in self._exchange(answer)]

    def connect_endpoints(self, transports: dict[int, str]) -> None:
        """Makes a queue pair to each peer that RDMA leads to, and pinned memory where it is staged.

        Args:
            transports: to every other rank.

        Raises:
            ArgumentError: a peer's answer makes no sense.
            ResourceError: the device or the system has no room.
            RuntimeUnavailableError: it failed on another rank.
        """
        self._transports = transports
        with self._closed_on_failure():
            answers = self._exchange(self._make_endpoints)

            def connect() -> dict[str, Any]:
                for peer in _rdma_peers(transports):
                    self._theirs[peer] = answers[peer]
                    address = answers[peer].get("endpoints", {}).get(str(self._communicator.rank))
                    if address is None:
                        own = self._communicator.rank
                        raise ArgumentError("transport", f"rank {peer} has no queue pair for rank {own}")
                    self._endpoints[peer].connect(bytes.fromhex(address), self._communicator.timeout)
                return {}

            self._exchange(connect)  # nobody sends to a queue pair that is not ready to receive

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except ProxyCCLError:
            self.close()
            raise

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

    def _open(self) -> None:
        comm = self._communicator
        near = comm.runtime.numa_node()
        if near is None:
            near = process_numa_node()
        beside = sum(comm.topology.same_host(rank) for rank in range(comm.rank))  # rehearsed nodes share devices
        choice = choose_device(rdma_devices(), self._options, near, local_rank=beside)
        self._device = VerbsDevice.open(choice, self._options)
        self._registrations = Registrations(self._device)

    def _make_endpoints(self) -> dict[str, Any]:
        if self._device is None:
            return {}
        segment = self._communicator.control
        self._endpoints = {peer: self._device.endpoint() for peer in _rdma_peers(self._transports)}
        answer: dict[str, Any] = {
            "segment": segment.host_pointer,
            "endpoints": {peer: endpoint.address.hex() for peer, endpoint in self._endpoints.items()},
            "areas": {},
        }
        if self.reaches("verbs"):
            answer["rkey"] = self._registrations.register(segment.host_pointer, segment.memory.nbytes).rkey
        for peer, transport in self._transports.items():
            if transport == "staged":
                area = StagingArea(self._communicator.runtime, self._registrations, self._options)
                self._areas[peer] = area
                answer["areas"][peer] = (area.registration.address, area.registration.rkey, area.ring_bytes)
        return answer

    def reaches(self, transport: str) -> bool:
        """Whether it leads to any peer in that way: "verbs" or "staged"."""
        return self._device is not None and transport in self._transports.values()

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
        theirs, proxy = self._theirs[peer], self._communicator.proxy
        if self._transports[peer] == "verbs":
            return proxy.connect_verbs(self._endpoints[peer].engine_options(theirs["rkey"]), peer=peer)
        address, rkey, ring_bytes = theirs["areas"][str(self._communicator.rank)]
        control = self._communicator.control
        options = self._areas[peer].engine_options(
            self._endpoints[peer].engine_options(rkey),
            address,
            ring_bytes,
            self.landings,
            control.semaphore_host(0),
            control.semaphores_bytes,
        )
        return proxy.connect_staged(options, peer=peer)

    def register(self, ptr: int, nbytes: int, allocation: bytes) -> Registration:
        """Registers memory of the communicator's runtime.

        Args:
            ptr: its address.
            nbytes: its size.
            allocation: what tells its allocation from all others; empty where nothing does.
        """
        runtime = self._communicator.runtime
        return register_device_memory(self._registrations, runtime, ptr, nbytes, allocation or None)

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
        for area in self._areas.values():
            area.close()
        self._registrations.close()
        self._device.close()
        self._device = None


def _rdma_peers(transports: dict[int, str]) -> list[int]:
    return [peer for peer, transport in transports.items() if transport != "copy"]
