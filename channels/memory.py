"""Memory that peers reach: registration, and the exchange of handles."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from proxyccl.device.errors import ArgumentError, ClosedError, ProxyCCLError
from proxyccl.device.runtime import Memory

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.device.arrays import ArrayView
    from proxyccl.proxy.interface import RdmaMemory


@dataclass(frozen=True)
class _Offer:
    """What a rank tells of the memory that it registers.

    Attributes:
        handle: by which ranks of the same host map it; empty if they can't, and then `refusals["copy"]` says why.
        exposed: by transport of RDMA, the address and the key by which peers name it.
        refusals: by transport, why it does not reach the memory.
    """

    nbytes: int
    handle: bytes
    exposed: dict[str, tuple[int, int]]
    refusals: dict[str, str]

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "handle": self.handle.hex()}).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Offer:
        fields = json.loads(data)
        return cls(**{**fields, "handle": bytes.fromhex(fields["handle"])})


class RegisteredMemory:
    """A range of memory on every rank, made by `Communicator.register`, which all ranks call together.

    It and its array live until `close`, or until the communicator ends, as peers may reach them whether or not this
    rank remembers them.

    Attributes:
        ptr: address of the own range.
        nbytes: its size; other ranks' may differ (`peer_nbytes`).
    """

    def __init__(
        self, communicator: Communicator, view: ArrayView, offers: list[_Offer], exposed: dict[str, RdmaMemory]
    ) -> None:
        self._communicator = communicator
        self._owner = view.owner
        self._exposed = exposed
        self._offers = offers
        self._remote_ids: dict[int, int] = {}
        self._opened: dict[int, Memory] = {}
        self._id: int | None = None
        self._rdma_id: int | None = None
        self._closed = False
        self.ptr = view.ptr
        self.nbytes = view.nbytes

    @classmethod
    def exchange(cls, communicator: Communicator, view: ArrayView) -> RegisteredMemory:
        """Registers the view and tells all ranks. What can't be shared is still a good source for a put."""
        handle = b""
        exposed: dict[str, RdmaMemory] = {}
        refusals: dict[str, str] = {}
        if view.nbytes:
            try:
                handle = communicator.runtime.export(view.ptr, view.nbytes)
            except ArgumentError as error:
                refusals["copy"] = str(error)
            for transport in ("verbs", "staged"):
                if communicator.rdma.reaches(transport):
                    try:
                        exposed[transport] = communicator.rdma.expose(view.ptr, view.nbytes, transport, handle)
                    except ProxyCCLError as error:
                        refusals[transport] = str(error)
        told = {transport: (memory.address, memory.key) for transport, memory in exposed.items()}
        offers = communicator.all_gather_bytes(_Offer(view.nbytes, handle, told, refusals).encode(), "register")
        memory = cls(communicator, view, [_Offer.decode(offer) for offer in offers], exposed)
        communicator.keep(memory)
        return memory

    def __repr__(self) -> str:
        return f"<RegisteredMemory of {self.nbytes} bytes>"

    @property
    def device_pointer(self) -> int:
        """The own range's address, for a kernel's pointer parameter."""
        self._require_open()
        return self.ptr

    @property
    def id(self) -> int:
        """The first memory id of the own range, for triggers."""
        self._require_open()
        if self._id is None:
            verbs = self._exposed.get("verbs")
            key = verbs.local_key if verbs is not None and verbs.copied else 0
            handle = functools.partial(self._handle, self._communicator.rank)
            self._id = self._communicator.proxy.add_memory(self.ptr, self.nbytes, key, handle=handle)
        return self._id

    def source_id(self, peer: int) -> int:
        """The first memory id of the own range for triggers to a peer: `id`, unless RDMA leads there whose device has
        other addresses for the range.
        """
        verbs = self._exposed.get("verbs")
        if self._communicator.transport(peer) != "verbs" or verbs is None or verbs.copied:
            return self.id
        self._require_open()
        if self._rdma_id is None:
            self._rdma_id = self._communicator.proxy.add_keyed_memory(verbs.address, self.nbytes, verbs.local_key)
        return self._rdma_id

    def peer_nbytes(self, peer: int) -> int:
        """The size of a rank's range in bytes."""
        return self._offers[peer].nbytes

    def peer_id(self, peer: int) -> int:
        """The first memory id of a peer's range, for triggers to that peer.

        Raises:
            ArgumentError: the peer's memory can't be shared.
            ResourceError: no ids left.
            RuntimeUnavailableError: nothing reaches the peer.
        """
        if peer == self._communicator.rank:
            return self.id
        if peer not in self._remote_ids:
            self._remote_ids[peer] = self._add(peer)
        return self._remote_ids[peer]

    def _add(self, peer: int) -> int:
        """Registers a peer's range as the transport to the peer reaches it."""
        proxy, transport, offer = self._communicator.proxy, self._communicator.transport(peer), self._offers[peer]
        if transport == "copy":
            handle = functools.partial(self._handle, peer)
            return proxy.add_memory(self.open(peer).ptr, offer.nbytes, handle=handle)
        for rank in (self._communicator.rank, peer) if transport == "verbs" else (peer,):
            refusal = self._offers[rank].refusals.get(transport)
            if refusal and transport == "verbs":
                raise ArgumentError(
                    "memory",
                    f"rank {rank}'s memory can't be reached by RDMA: {refusal}; "
                    'transport="staged" takes data through pinned memory of the host',
                )
            if refusal:
                raise ArgumentError("memory", f"rank {rank}'s memory can't be staged: {refusal}")
        address, key = offer.exposed.get(transport, (0, 0))  # none of empty memory
        return proxy.add_keyed_memory(address, offer.nbytes, key)

    def peer_ptr(self, peer: int) -> int:
        """Address at which kernels here reach a peer's range.

        Raises:
            ArgumentError: the peer's memory can't be shared, or kernels here can't touch that peer's memory.
        """
        if peer == self._communicator.rank:
            return self.ptr
        if not self._communicator.topology.accessible[peer]:
            raise ArgumentError(
                "peer",
                f"kernels of rank {self._communicator.rank} can't touch the memory of rank {peer}; use a ProxyChannel",
            )
        return self.open(peer).ptr

    def open(self, peer: int) -> Memory:
        """Maps a peer's range, once."""
        self._require_open()
        if peer not in self._opened:
            try:
                self._opened[peer] = self._communicator.mappings.acquire(self._handle(peer))
            except ArgumentError:
                self._communicator.check()  # a rank that failed may have freed it, and that is the cause
                raise
        return self._opened[peer]

    def _handle(self, rank: int) -> bytes:
        offer = self._offers[rank]
        if not offer.handle:
            raise ArgumentError(
                "memory", f"rank {rank} can't share its memory: {offer.refusals.get('copy', 'it is empty')}"
            )
        return offer.handle

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the registered memory is closed")

    def close(self) -> None:
        """Gives its memory ids back. No kernel may use it, and no trigger name it, any more.

        Peers' memory stays mapped for a while, in case it is registered again.
        """
        if self._closed:
            return
        self._closed = True
        service = self._communicator.proxy_if_started
        if service is not None:
            for first in (self._id, self._rdma_id):
                if first is not None:
                    service.remove_memory(first, self.nbytes)
            for peer, first in self._remote_ids.items():
                service.remove_memory(first, self.peer_nbytes(peer))
        for memory in self._exposed.values():
            self._communicator.rdma.withdraw(memory)
        if not self._communicator.closed:
            self._communicator.let_go(self)
            for peer in self._opened:
                self._communicator.mappings.release(self._offers[peer].handle)
        self._opened.clear()
        self._owner = None
