"""Opens a rank's libfabric endpoints, encodes the endpoints' addresses for peers, and registers memory with the
endpoints.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Hashable
from typing import Annotated, Any

from msgspec import Meta

from proxyccl.device.errors import ArgumentError, ClosedError, ProtocolError, ResourceError, RuntimeUnavailableError
from proxyccl.device.ffi_types import fill
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.codec import Codec, Message, Uint32
from proxyccl.proxy.fabric.library import FabricOffer, Library, choose_offers, fabric_offers, load
from proxyccl.proxy.hosts import is_running
from proxyccl.proxy.registrations import (
    RailRegistrations,
    Registration,
    RegistrationCache,
    RemoteDevice,
    require_ordered,
)
from proxyccl.proxy.remote_options import MOST_WIRES, FabricOptions, RemoteSetup

ffi, lib = _engine.ffi, _engine.lib

_ADDRESS_BYTES = 512
_COMPLETIONS = 8192
_KEY_EXISTS = 269  # FI_ENOKEY: the provider's error if the requested key is in use
_KEY_TRIES = 8
_OWNERS = {"cuda": lib.PROXYCCL_FABRIC_CUDA, "hip": lib.PROXYCCL_FABRIC_ROCR}
_LOCAL_KEYS: int = lib.PROXYCCL_FABRIC_LOCAL_KEYS
_CORES_PER_STREAM = 2
"""Number of cores for each stream. A stream keeps one of them busy; the others are for the rank's program, its proxy,
and the operating system.
"""


class FabricAddress(Message, frozen=True):
    """A description of an endpoint, which a rank sends to its peers.

    Attributes:
        provider: the name of the provider; the peer must use the same provider.
        format: libfabric's number for the format of `address`.
        address: the endpoint's address in that format.
        reads: whether peers may read memory that is registered with the endpoint.
        in_order: whether the bytes of one write reach this rank's memory in order.
        interfaces: the number of interfaces that the rank uses; the peer must use the same number.
    """

    provider: Annotated[str, Meta(max_length=256)]
    format: Uint32
    address: Annotated[bytes, Meta(max_length=_ADDRESS_BYTES)]
    reads: bool = False
    in_order: bool = False
    interfaces: Uint32 = 1


ADDRESS = Codec(FabricAddress, 2048, "endpoint's address")


class _Endpoint:
    """A libfabric endpoint with its completion queue and its address vector.

    Attributes:
        offer: the provider and its interface.
        parts: the endpoint's libfabric objects (a ProxycclFabricParts).
        looks: number of polls of the completion queue, which the connections that share the queue count.
    """

    def __init__(self, offer: FabricOffer, interfaces: int) -> None:
        self.offer = offer
        self.interfaces = interfaces
        self._library: Library = load()
        self._endpoint: Any = None
        self.parts: Any = ffi.new("ProxycclFabricParts *")
        self.looks = ffi.new("uint64_t *")

    def _open(self, *, waits: bool = False, domain_of: Any = ffi.NULL, address: bytes | None = None) -> None:
        """Opens the endpoint. The arguments are those of proxyccl_fabric_open."""
        offers, number = self.offer.source
        made, call = ffi.new("ProxycclFabricEndpoint **"), ffi.new("char **")
        place = ffi.NULL if address is None else ffi.from_buffer(address)
        error = lib.proxyccl_fabric_open(
            self._library.functions, offers, number, _COMPLETIONS, waits, domain_of, place, made, call
        )
        if error:
            self._check(ffi.string(call[0]).decode(), error)
        self._endpoint = made[0]
        lib.proxyccl_fabric_parts(self._endpoint, self.parts)

    @property
    def raw_address(self) -> bytes:
        """This endpoint's address as libfabric encodes it."""
        self._require_open()
        room, size = ffi.new("char[]", _ADDRESS_BYTES), ffi.new("uint64_t *", _ADDRESS_BYTES)
        self._check("fi_getname", lib.proxyccl_fabric_address(self._endpoint, room, size))
        return bytes(ffi.buffer(room, size[0]))

    @property
    def address(self) -> bytes:
        """This endpoint's address, as bytes, which a peer passes to its `connect`."""
        offer = self.offer
        return ADDRESS.encode(
            FabricAddress(*offer.kind, self.raw_address, offer.reads, offer.in_order, self.interfaces)
        )

    def insert(self, peer: bytes) -> tuple[int, FabricAddress]:
        """Adds a peer to the address vector. Returns the peer's fi_addr_t and its decoded address. Raises the
        exceptions of `connect`.
        """
        self._require_open()
        try:
            theirs = ADDRESS.decode(peer, "the peer")
        except ProtocolError as error:
            raise ArgumentError("peer", f"not an endpoint's address: {error}") from None
        if (theirs.provider, theirs.format) != self.offer.kind:
            raise ArgumentError(
                "peer",
                f"it uses the provider {theirs.provider} with addresses of format {theirs.format}, and this rank "
                f"{self.offer} of format {self.offer.address_format}; choose with the options provider and interface",
            )
        if theirs.interfaces != self.interfaces:
            counts = f"it uses {theirs.interfaces} interfaces, and this rank {self.interfaces}"
            raise ArgumentError("peer", f"{counts}; expected the same number on all ranks (option interfaces)")
        known = ffi.new("uint64_t *")
        whole = theirs.address.ljust(_ADDRESS_BYTES, b"\0")  # providers read the full length of the address format
        self._check("fi_av_insert", lib.proxyccl_fabric_insert(self._endpoint, whole, known))
        return known[0], theirs

    def _check(self, call: str, error: int) -> None:
        self._library.check(call, str(self.offer), error)

    def _require_open(self) -> None:
        if self._endpoint is None:
            raise ClosedError("the fabric's endpoint is closed")


class FabricEndpoint(_Endpoint, RegistrationCache):
    """A libfabric endpoint that a rank uses for all peers, and the `RegistrationCache` of the host and GPU memory that
    is registered with the endpoint. Several threads may use an instance.

    Args:
        offer: the provider and its interface.
        options: the endpoint's settings.
        waits: whether to open the completion queue with a file descriptor that becomes readable when there is a
            completion; ignored if the provider does not support such a descriptor.
        interfaces: the number of interfaces that the rank uses.

    Attributes:
        ordered: whether a signal is posted right after its data, because writes arrive in order.
        joined: whether a signal may be the second part of a write, provided that the peer's memory supports that.
        depth: the most outstanding writes of a connection.

    Raises:
        ResourceError: the system or the provider is out of memory or descriptors.
        RuntimeUnavailableError: the provider can't open the endpoint; the message says why.
    """

    def __init__(self, offer: FabricOffer, options: FabricOptions, *, waits: bool = False, interfaces: int = 1) -> None:
        RegistrationCache.__init__(self)
        _Endpoint.__init__(self, offer, interfaces)
        self._key_bits = 8 * min(offer.key_bytes, 8)
        self.ordered = offer.ordered and options.signal != "delivered"
        self.joined = self.ordered and offer.parts >= lib.PROXYCCL_FABRIC_PARTS and options.signal == "auto"
        self.depth = min(options.depth, offer.depth)
        self._open(waits=waits)
        self._descriptors = ffi.new("uint64_t[]", _LOCAL_KEYS)  # local key 0 is for memory without a descriptor
        self._free_keys = deque(range(1, _LOCAL_KEYS))
        self._lock = threading.Lock()
        self._kept: list[Any] = []  # the memory of requests, which the provider may access until the endpoint is closed

    def connect(self, peer: bytes, signal_key: int, endpoint: PeerEndpoint | None = None) -> Any:
        """Returns the ProxycclFabricOptions for a connection to the endpoint whose `address` is `peer`. `signal_key` is
        the key of the memory that contains the peer's semaphore words. The connection uses `endpoint`, or this endpoint
        if `endpoint` is None.

        Raises:
            ArgumentError: the bytes are not an address, or are an address of another provider.
            ResourceError: the system or the provider is out of memory or descriptors.
            RuntimeUnavailableError: the provider refuses the address.
        """
        used = endpoint or self
        number, theirs = used.insert(peer)
        requests = ffi.new("char[]", self.depth * lib.PROXYCCL_FABRIC_REQUEST_BYTES)
        ptr = int(ffi.cast("uintptr_t", requests))
        registration = self.register(ptr, len(requests))
        with self._lock:
            self._kept.append(requests)
        return fill(
            ffi.new("ProxycclFabricOptions *"),
            endpoint=used.parts.endpoint,
            queue=used.parts.queue,
            peer=number,
            depth=self.depth,
            ordered=self.ordered,
            joined=self.joined and theirs.in_order,
            reads=self.offer.reads and theirs.reads,
            max_message=self.offer.max_message,
            signal_key=signal_key,
            requests=ptr,
            requests_key=registration.local_key,
            descriptors=self._descriptors,
            looks=used.looks,
        )

    def peer_endpoint(self) -> PeerEndpoint:
        """Opens an endpoint for one peer, in this endpoint's domain. Raises the exceptions of the constructor."""
        self._require_open()
        return PeerEndpoint(self, self._endpoint)

    def is_running(self) -> bool:
        """Whether the interface is up and its link has a carrier."""
        return is_running(self.offer.domain)

    def register(
        self, ptr: int, nbytes: int, *, device: tuple[str, int] | None = None, allocation: Hashable = None
    ) -> Registration:
        """Registers a memory range, unless it is registered already. Each call must be paired with a `release`.
        `device` is None for host memory, and the runtime's name and the GPU's number for GPU memory. Raises the
        exceptions of `register_of`.
        """
        self._require_open()
        return self._acquire(ptr, nbytes, allocation, lambda: self._register(ptr, nbytes, device, allocation))

    def register_of(
        self, runtime: Runtime, gpu_writes: str, ptr: int, nbytes: int, allocation: Hashable = None
    ) -> Registration:
        number = None if runtime.name == "host" else runtime.pointer_device(ptr)
        if number is None:
            return self.register(ptr, nbytes, allocation=allocation)
        require_ordered(runtime, gpu_writes, "PROXYCCL_FABRIC")
        with runtime.current():
            return self.register(ptr, nbytes, device=(runtime.name, number), allocation=allocation)

    def descriptor(self, registration: Registration) -> int:
        """Returns the descriptor of registered memory, which this rank's requests pass to the provider; 0 if the
        provider needs no descriptor.
        """
        return int(self._descriptors[registration.local_key])

    def _register(self, ptr: int, nbytes: int, device: tuple[str, int] | None, allocation: Hashable) -> Registration:
        runtime, number = device or ("host", 0)
        if device is not None and (runtime not in _OWNERS or not self.offer.device_memory):
            raise RuntimeUnavailableError(f"{self.offer} does not reach memory of {runtime} GPUs")
        owner = _OWNERS.get(runtime, lib.PROXYCCL_FABRIC_HOST)
        made = ffi.new("ProxycclFabricRegion *")
        for _ in range(_KEY_TRIES):
            # If this rank chooses the key, the key is random, because any process that knows the key can write to the
            # memory.
            key = 0 if self.offer.provider_keys else secrets.randbits(self._key_bits)
            error = lib.proxyccl_fabric_register(self._endpoint, ptr, nbytes, key, owner, number, made)
            if error != _KEY_EXISTS:
                break
        kind = "host memory" if device is None else f"memory of a {runtime} GPU"
        self._check(f"fi_mr_regattr of {nbytes} bytes of {kind}", error)
        return Registration(
            ptr=ptr,
            nbytes=nbytes,
            address=ptr if self.offer.virtual_keys else 0,
            key=made.key,
            local_key=self._local_key(made),
            region=made.region,
            allocation=allocation,
        )

    def _local_key(self, made: Any) -> int:
        if not made.descriptor:
            return 0
        with self._lock:
            if not self._free_keys:
                lib.proxyccl_fabric_deregister(made.region)
                raise ResourceError(f"{_LOCAL_KEYS} memories are registered with {self.offer} already")
            key = self._free_keys.popleft()
            self._descriptors[key] = made.descriptor
            return key

    def _deregister(self, registration: Registration) -> None:
        if registration.local_key:
            with self._lock:
                self._descriptors[registration.local_key] = 0
                self._free_keys.append(registration.local_key)
        self._check("fi_close of registered memory", lib.proxyccl_fabric_deregister(registration.region))

    def close(self) -> None:
        """Deregisters all memory and closes the endpoint. No engine may still use the endpoint."""
        if self._endpoint is None:
            return
        super().close()
        endpoint, self._endpoint = self._endpoint, None
        self._check("fi_close", lib.proxyccl_fabric_close(endpoint))
        self._kept.clear()


class PeerEndpoint(_Endpoint):
    """An endpoint for one peer, which can be closed and opened again while the rank's other endpoints stay open. Made
    by `FabricEndpoint.peer_endpoint`. Memory that is registered with the `FabricEndpoint` can be used with this
    endpoint, because both are in the same libfabric domain.
    """

    def __init__(self, rank: FabricEndpoint, domain_of: Any) -> None:
        super().__init__(rank.offer, rank.interfaces)
        self._rank, self._domain_of = rank, domain_of
        self._peer = b""
        self._options: Any = None
        self._open(domain_of=domain_of)
        self._address = self.raw_address
        self._is_stopped = False

    def connect(self, peer: bytes, signal_key: int) -> Any:
        """Implements `FabricEndpoint.connect`. `reconnect` changes the returned options."""
        self._peer, self._options = peer, self._rank.connect(peer, signal_key, self)
        return self._options

    def stop(self) -> bool:
        """Closes libfabric's endpoint, after which it executes no request of this rank or of the peer. Returns False
        if libfabric reports an error.
        """
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            self._is_stopped = lib.proxyccl_fabric_close(endpoint) == 0
        return self._is_stopped

    def reconnect(self, _failure: int) -> bool:
        """Opens libfabric's endpoint again, at the same address. Returns False if the interface is down, or the system
        or the provider refuses.
        """
        if not self._rank.is_running():
            return False
        try:
            self._open(domain_of=self._domain_of, address=self._address)
            number, _ = self.insert(self._peer)
        except (ResourceError, RuntimeUnavailableError):
            self.stop()
            return False
        fill(self._options, endpoint=self.parts.endpoint, queue=self.parts.queue, peer=number)
        return True

    def close(self) -> None:
        """Closes the endpoint. No engine may still use the endpoint."""
        if self._endpoint is not None and not self.stop():
            raise RuntimeUnavailableError(f"fi_close of {self.offer} failed")


class FabricContext(RemoteDevice):
    """A rank's libfabric endpoints.

    Attributes:
        endpoints: one endpoint for each of the rank's interfaces, for data that is not staged.
        staged_peers: the number of peers for which staging areas were made.

    Raises:
        ArgumentError: no provider or interface matches the options.
        ResourceError: the system or the provider is out of memory or descriptors.
        RuntimeUnavailableError: no provider can be used; the message says why.
    """

    options: FabricOptions

    def __init__(self, setup: RemoteSetup, options: FabricOptions) -> None:
        super().__init__(setup)
        self.options = options
        self.staged_peers = 0
        offers = fabric_offers(device_memory=setup.runtime.name != "host")
        self._offers = choose_offers(offers, options, setup.near, local_rank=setup.local_rank)
        self._opened: list[FabricEndpoint] = []
        self._closing = contextlib.ExitStack()  # closes all endpoints, even if closing one fails
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.endpoints = self._open_endpoints(len(self._offers))
            self.registrations: RegistrationCache = self.endpoints[0]
            if len(self.endpoints) > 1:
                self.registrations = RailRegistrations(self.endpoints)
                self._closing.callback(self.registrations.close)
            self.registrations.register(setup.segment.host_ptr, setup.segment.nbytes)
            undo.pop_all()

    def _open_endpoints(self, count: int) -> list[FabricEndpoint]:
        """Returns `count` endpoints, of the interfaces in turns. Opens those that are not open yet."""
        while len(self._opened) < count:
            offer = self._offers[len(self._opened) % len(self._offers)]
            self._opened.append(FabricEndpoint(offer, self.options, interfaces=len(self._offers)))
            self._closing.callback(self._opened[-1].close)
        return self._opened[:count]

    def wire_endpoints(self) -> list[FabricEndpoint]:
        """Returns the endpoints for staged data: `FabricOptions.streams`, rounded up to the same number for each
        interface, of the interfaces in turns. The first call opens most of the endpoints, and raises the constructor's
        exceptions.
        """
        is_stream, interfaces = self._offers[0].is_stream, len(self._offers)
        streams = self.options.streams or (default_streams(self.setup.core_share) if is_stream else 1)
        return self._open_endpoints(-(-streams // interfaces) * interfaces)

    def close(self) -> None:
        self._closing.close()


def default_streams(core_share: int) -> int:
    """Returns the default number of streams for staged data over sockets, given the number of cores that the rank's
    threads may keep busy. Each stream has one thread, which serves all of the rank's peers.
    """
    return max(1, min(MOST_WIRES, core_share // _CORES_PER_STREAM))
