"""The proxy service that the daemon runs for one client, over the client's own rings, and the client's objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from proxyccl.device.errors import ProtocolError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.daemon.protocol import (
    AddMemory,
    AddPinnedMemory,
    AddRemoteMemory,
    AddSchedule,
    AnyReply,
    ConnectCopy,
    ConnectRemote,
    Drain,
    Drained,
    FreeChannels,
    Open,
    RemoveMemory,
    RemoveSchedule,
    ReserveChannel,
    ReserveElsewhere,
    ServiceRequest,
    SetChannel,
)
from proxyccl.proxy.daemon.session_channels import SessionChannels
from proxyccl.proxy.daemon.session_memories import SessionMemories
from proxyccl.proxy.daemon.session_remote import SessionRemote
from proxyccl.proxy.daemon.session_schedules import SessionSchedules
from proxyccl.proxy.fifo import Ring
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.ring import ring_bytes
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.thread import IdlePolicy, ProxyThread
from proxyccl.proxy.trigger import MAX_CHANNELS
from proxyccl.proxy.workers import MAX_RINGS

_SEMAPHORES_BYTES = 8 * MAX_CHANNELS


def require_descriptors(request: Open, count: int) -> None:
    """Raises ProtocolError unless this number of descriptors is that of a segment and enough rings."""
    if not request.threads < count <= MAX_RINGS + 1:
        raise ProtocolError(
            f"open came with {count} descriptors; expected a segment and {request.threads} to {MAX_RINGS} rings"
        )


class SessionService:
    """A client's service with its memories, channels, schedules and remote links.

    Args:
        request: the client's request.
        descriptors: of the control segment and the rings; the caller closes them.
        runtime: the runtime whose copies the service issues.
        threads: the threads that run its workers.
        idle: the policy that the client needs of them.
        on_failure: called in a worker's thread when the worker ends on an error.
        has_left: whether the client has hung up.

    Attributes:
        proxy: the service.

    Raises:
        ArgumentError: a descriptor names no such memory.
    """

    def __init__(
        self,
        request: Open,
        descriptors: Sequence[int],
        runtime: Runtime,
        threads: Sequence[ProxyThread],
        idle: IdlePolicy,
        on_failure: Callable[[ProxyFailure], None],
        has_left: Callable[[], bool],
    ) -> None:
        with contextlib.ExitStack() as undo:
            nbytes = request.shared_offset + SharedWords.BYTES
            if request.semaphores_offset is not None:
                nbytes = max(nbytes, request.semaphores_offset + _SEMAPHORES_BYTES)
            segment = runtime.adopt_pinned(os.dup(descriptors[0]), nbytes)
            undo.callback(segment.close)
            rings: list[Ring] = []
            for descriptor in descriptors[1:]:
                # Here only the engine reads a ring: the client gives the device access to it.
                memory = SharedMemory.adopt(os.dup(descriptor), ring_bytes(request.fifo_size))
                rings.append(Ring(memory, request.fifo_size))
                undo.callback(rings[-1].close)
            self.proxy = ProxyService(
                runtime,
                segment.host_ptr,
                segment,
                shared_offset=request.shared_offset,
                semaphores_offset=request.semaphores_offset,
                shared_threads=threads,
                rings=rings,
                ring_per_connection=request.ring_per_connection,
                on_failure=on_failure,
                description=request.description,
                idle=idle,
            )
            undo.pop_all()
        self._segment = segment
        self._has_left = has_left
        self._memories = SessionMemories(self.proxy, runtime)
        self._channels = SessionChannels(self.proxy, runtime, self._memories)
        self._schedules = SessionSchedules(self.proxy)
        self._remote = SessionRemote(self.proxy, self._memories, has_left)

    def handle(self, request: ServiceRequest) -> AnyReply:
        """Carries out a request.

        Raises:
            ProtocolError: it names an object that the client was not given.
            ProxyCCLError: it cannot be carried out.
        """
        match request:
            case AddMemory() | AddPinnedMemory() | AddRemoteMemory() | RemoveMemory():
                return self._memories.handle(request)
            case ConnectCopy() | ReserveChannel() | ReserveElsewhere() | SetChannel() | FreeChannels():
                return self._channels.handle(request)
            case AddSchedule() | RemoveSchedule():
                return self._schedules.handle(request)
            case ConnectRemote(peer=peer):
                return self._channels.add(self._remote.open_connection(peer))
            case Drain(timeout=timeout):
                return Drained(self.drain(timeout))
            case _:
                return self._remote.handle(request)

    @property
    def unmaps_later(self) -> bool:
        """Whether memory that the client has removed is still mapped, as it may be in use."""
        return self._memories.unmaps_later

    def unmap_if_quiet(self) -> None:
        """Unmaps it, if nothing uses it soon."""
        self._memories.unmap_if_quiet()

    def drain(self, timeout: float) -> bool:
        """Waits until all triggers in the rings are done; not for a client that has left."""
        return self.proxy.drain(timeout, self._has_left)

    def free(self) -> None:
        """Unmaps and closes everything that the service used. Its workers must have ended."""
        with contextlib.ExitStack() as steps:  # from the last to the first; each is taken even if another raises
            steps.callback(self._segment.close)
            steps.callback(self._memories.close)
            steps.callback(self._channels.close)
            steps.callback(self._remote.close)
            steps.callback(self._memories.unmap_retired)
