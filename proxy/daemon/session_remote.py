"""Remote links of one client of the daemon. Each client has its own device context, so its keys work only for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from proxyccl.device.errors import ProtocolError, ProxyCCLError
from proxyccl.proxy.daemon.protocol import (
    ConnectEndpoint,
    Done,
    EndpointMade,
    Expose,
    Exposed,
    ExposePinned,
    MakeEndpoint,
    OpenRemote,
    RemoteSupport,
    RemoteUnsupportedReason,
    Withdraw,
)
from proxyccl.proxy.daemon.session_memories import SessionMemories
from proxyccl.proxy.interface import Connection, ExposedMemory
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.service_remote import ServiceRemote
from proxyccl.proxy.transports.table import remote_functions


class SessionRemote:
    """The client's network device, endpoints and exposed memory.

    Args:
        proxy: the client's service.
        memories: maps and unmaps the client's memory.
        has_left: whether the client has hung up.
    """

    def __init__(self, proxy: ProxyService, memories: SessionMemories, has_left: Callable[[], bool]) -> None:
        self._proxy = proxy
        self._memories = memories
        self._has_left = has_left
        self._context: ServiceRemote | None = None
        self._exposed: dict[int, tuple[ExposedMemory, Callable[[], None]]] = {}  # with the unmapping, by number
        self._next = 0

    def handle(
        self,
        request: OpenRemote
        | RemoteUnsupportedReason
        | MakeEndpoint
        | ConnectEndpoint
        | Expose
        | ExposePinned
        | Withdraw,
    ) -> Done | RemoteSupport | EndpointMade | Exposed:
        """Carries out a request."""
        match request:
            case OpenRemote():
                return self._open(request)
            case RemoteUnsupportedReason(transport=transport):
                return RemoteSupport(self._opened.unsupported_reason(transport))
            case MakeEndpoint(peer=peer, transport=transport):
                return EndpointMade(self._opened.make_endpoint(peer, transport))
            case ConnectEndpoint(peer=peer, end=end, timeout=timeout):
                self._opened.connect_endpoint(peer, end, timeout, self._has_left)
                return Done()
            case Expose():
                return self._expose(request)
            case ExposePinned():
                return self._expose_pinned(request)
            case Withdraw(number=number):
                return self._withdraw(number)

    @property
    def _opened(self) -> ServiceRemote:
        if self._context is None:
            raise ProtocolError("no network device is open; expected open_remote first")
        return self._context

    def _open(self, request: OpenRemote) -> Done:
        if self._context is not None:
            raise ProtocolError("open_remote: a network device is open already")
        self._context = self._proxy.open_remote(
            request.options,
            range(*request.signals),
            near=request.near,
            local_rank=request.local_rank,
            core_share=request.core_share,
        )
        return Done()

    def open_connection(self, peer: int) -> Connection:
        """A connection over the client's endpoint to a peer."""
        return self._opened.open_connection(peer)

    def _expose(self, request: Expose) -> Exposed:
        context, handle = self._opened, request.handle
        memory = self._memories.map(handle, request.nbytes)
        try:
            # Registered only while it is used: afterwards the mapping is removed, and its address may mean other
            # memory.
            exposed = context.expose(memory.ptr, request.nbytes, request.transport, b"")
        except ProxyCCLError:
            self._memories.unmap(handle)
            raise
        return self._keep(exposed, functools.partial(self._memories.unmap, handle))

    def _expose_pinned(self, request: ExposePinned) -> Exposed:
        context = self._opened
        memory = self._memories.open_pinned(request.handle)
        try:
            exposed = context.expose_pinned(memory, request.transport)
        except ProxyCCLError:
            memory.close()
            raise
        return self._keep(exposed, memory.close)

    def _keep(self, exposed: ExposedMemory, unmap: Callable[[], None]) -> Exposed:
        number, self._next = self._next, self._next + 1
        self._exposed[number] = exposed, unmap
        return Exposed(number, exposed.address, exposed.key, exposed.local_key, exposed.copied)

    def _withdraw(self, number: int) -> Done:
        if number not in self._exposed:
            raise ProtocolError(f"number: this client has no exposed memory {number}")
        exposed, unmap = self._exposed.pop(number)
        if remote_functions(exposed.transport).withdraws_at_once:
            self._opened.withdraw(exposed)  # refuses peers' data from now on, and waits for data in flight
            self._memories.retire(unmap)
        else:
            self._memories.retire(functools.partial(self._forget, exposed, unmap))
        return Done()

    def _forget(self, exposed: ExposedMemory, unmap: Callable[[], None]) -> None:
        self._opened.withdraw(exposed)
        unmap()

    def close(self) -> None:
        """Frees the device. The service must have ended."""
        context, self._context = self._context, None
        if context is not None:
            context.close()
