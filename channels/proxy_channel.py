"""`ProxyChannel`: kernels push triggers, and the proxy moves the data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxyccl.channels.group import Group
from proxyccl.channels.handles import Channel, ChannelSet, DeviceHandle
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.channels.segment.rendezvous import wait_at_most
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import WaitTimeoutError
from proxyccl.device.runtime import StreamLike
from proxyccl.proxy._engine import ffi as engine
from proxyccl.proxy._engine import lib as engine_lib
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.interface import ChannelCounters, Handler

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclProxyChannelPointer  # the name exists only in the type stub

_CHANNEL_IDS = Codec[dict[int, list[int]]](dict[int, list[int]], 1 << 20, name="channel ids")
_LINE = 128
_SPINS = 2000  # number of polls without a pause, before the thread sleeps between polls
_MOST = (1 << 64) - 1


class _RingChannel(Channel):
    """A channel whose kernels push triggers into a ring."""

    handle_kind = lib.PROXYCCL_HANDLE_PROXY_CHANNEL
    semaphore_kind = lib.PROXYCCL_HANDLE_PROXY_SEMAPHORE

    @property
    def fifo(self) -> DeviceHandle:
        """The ring to which kernels push the channel's triggers, for a kernel that takes a `proxyccl::Fifo` or
        `mscclpp::FifoDeviceHandle`.
        """
        return DeviceHandle(lib.PROXYCCL_HANDLE_FIFO, self._part("fifo"), self, self.sleepers)


class ProxyChannel(_RingChannel):
    """A channel to one peer; its device side is proxyccl::ProxyChannelDeviceHandle.

    The CPU can also wait for signals, because the count of the peer's signals is in host memory. On one channel, either
    only kernels or only the CPU may wait, because the kernels and the CPU count consumed signals separately.

    Attributes:
        id: channel id in this rank's proxy.
        transport: the name of the channel's transport.
        peer_channel: id of the peer's channel that receives this channel's signals; None if the peer has none.
        expected_pointer: the device address of the number of signals that kernels have waited for.
    """

    def __init__(
        self,
        peer: int,
        handle: ProxycclProxyChannelPointer,
        group: Group,
        transport: str,
        peer_channel: int | None,
    ) -> None:
        self._group, self._service = group, group.links.proxy
        super().__init__(peer, handle, self._service.sleepers)
        self._consumed = 0
        self.id: int = handle.channel
        self.transport = transport
        self.peer_channel = peer_channel
        self.expected_pointer = int(ffi.cast("uintptr_t", handle.semaphore.expected))

    @property
    def counters(self) -> ChannelCounters:
        """The proxy's counters of this channel."""
        return self._service.counters(self.id)

    def signal(self, value: int | None = None, *, stream: StreamLike = None) -> None:
        """Signals the peer after all work queued on the stream, and after the data of all earlier puts on the channel.

        A kernel of one thread sends the signal. The peer's kernels or the peer's CPU wait for the signal.

        Args:
            value: raises the peer's count of signals to this value, which must be above the count; None to add one.
            stream: as for any kernel of the program; None for the default stream of kernels.

        Raises:
            ArgumentError: the value is not a count.
            CommunicatorError: the communicator has failed; see its subclasses.
        """
        if value is not None:
            value = as_integer(value, "value", f"must be a count from 1 to {_MOST}", 1, _MOST)
        self._group.failure.require_usable()
        kernel = self._group.runtime.shipped("signal_peer.h", "signal_peer")
        kernel(1, 1, self, value or 0, stream=stream)

    @property
    def completed(self) -> int:
        """The first ticket that may be incomplete: all this channel's operations with lower tickets are complete.

        A ticket is the number of an operation's trigger in the ring, from 0; the kernel's call that pushes the trigger
        returns the ticket. After completion, the source of a put may be overwritten, and the data of a get is in local
        memory.

        Raises:
            CommunicatorError: the communicator has failed; see its subclasses.
        """
        self._group.failure.require_usable()
        return self._service.completed(self.id)

    def wait_complete(self, ticket: int) -> None:
        """Waits on the CPU until the operation with this ticket and all earlier operations on this channel are
        complete. The kernel that pushes the operation may still be running, or may be launched later.

        Raises:
            ArgumentError: the ticket is not a number from 0 to 2**64 - 2.
            WaitTimeoutError: the operation was not complete within the communicator's time-out; the communicator has
                failed.
            CommunicatorError: the communicator failed during the wait; see its subclasses.
        """
        ticket = as_integer(ticket, "ticket", f"must be a number from 0 to {_MOST - 1}", 0, _MOST - 1)
        self._group.failure.require_usable()
        self._await(
            lambda: self._service.completed(self.id), ticket + 1, f"its operations to rank {self.peer}", "completion"
        )

    def poll(self) -> bool:
        """Consumes the peer's next signal on the CPU if it has arrived. Returns whether a signal was consumed."""
        self._group.failure.require_usable()
        arrived = self._signalled() > self._consumed
        self._consumed += arrived
        return arrived

    def wait(self) -> None:
        """Waits on the CPU for the peer's next signal and consumes the signal. Raises the errors of `wait_until`."""
        self.wait_until(self._consumed + 1)

    def wait_until(self, value: int) -> None:
        """Waits on the CPU until the peer's signals have reached `value`, and consumes these signals. After the wait,
        the CPU may read data that the peer put into host memory before the signals, and newly launched kernels may also
        read such data in device memory.

        Raises:
            ArgumentError: the value is not a count.
            WaitTimeoutError: the signals did not arrive within the communicator's time-out; the communicator has
                failed.
            CommunicatorError: the communicator failed during the wait; see its subclasses.
        """
        value = as_integer(value, "value", f"must be a count from 0 to {_MOST}", 0, _MOST)
        self._group.failure.require_usable()
        self._await(self._signalled, value, f"a signal from rank {self.peer}", "wait")
        self._consumed = max(self._consumed, value)

    def _await(self, count: Callable[[], int], value: int, what: str, operation: str) -> None:
        failure = self._group.failure
        deadline = time.monotonic() + self._group.timeout

        def found() -> bool:
            return count() >= value

        if not any(found() for _ in range(_SPINS)) and not wait_at_most(found, deadline, failure.check):
            raise failure.file_exchange_failure(
                WaitTimeoutError(
                    f"rank {self._group.rank} waited too long on the CPU for {what} on channel {self.id}: expected "
                    f"{value}, saw {count()}",
                    rank=self._group.rank,
                    peer=self.peer,
                    channel=self.id,
                    operation=operation,
                )
            )

    def _signalled(self) -> int:
        word = engine.cast("uint64_t *", self._group.control.semaphore_host(self.id))
        return int(engine_lib.proxyccl_word_acquire(word))


def _new_handle(group: Group, channel: int, peer: int) -> ProxycclProxyChannelPointer:
    service, handle = group.links.proxy, ffi.new("ProxycclProxyChannel *")
    service.fifo_for(channel).fill_handle(handle.fifo)
    handle.flushed = ffi.cast("uint64_t *", service.flushed_pointer(channel))
    handle.completed = ffi.cast("uint64_t *", service.completed_pointer(channel))
    handle.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
    handle.channel, handle.peer = channel, peer
    return handle


def connect_handles(
    group: Group,
    dst: RegisteredMemory | PinnedRange,
    src: RegisteredMemory | PinnedRange,
    peers: list[int],
    count: int,
) -> tuple[dict[int, list[ProxyChannel]], object]:
    """Connects `count` channels to each of `peers`; all ranks call this together. Returns the channels, and the objects
    that must be kept alive with them.
    """
    service = group.links.proxy
    group.links.prepare(peers)
    opened = {peer: (dst.peer_id(peer), group.links.connection(peer, private=src.private)) for peer in peers}
    # All ids are allocated before the exchange, because the peer's proxy signals the word whose index is this rank's
    # channel id.
    ids: dict[int, list[int]] = {peer: [] for peer in peers}
    for peer in peers:
        for _ in range(count):
            ids[peer].append(service.reserve_channel(opened[peer][1]))
    answers = group.exchange.all_gather(ids, _CHANNEL_IDS, "proxy_channels")
    expected = group.device_memory.allocate(max(1, len(peers) * count) * _LINE, "channels")

    channels: dict[int, list[ProxyChannel]] = {}
    for p, peer in enumerate(peers):
        theirs = answers[peer].get(group.rank, [])
        connection = opened[peer][1]
        channels[peer] = []
        for i, channel in enumerate(ids[peer]):
            peer_channel = theirs[i] if i < len(theirs) else None
            if peer_channel is not None:  # a channel without a counterpart on the peer can put, but not signal
                word = group.links.semaphore(peer, peer_channel)
                word_handle = group.links.semaphore_handle(peer, peer_channel)
                service.set_channel(channel, connection, word, handle=word_handle)
            handle = _new_handle(group, channel, peer)
            handle.semaphore.inbound = ffi.cast("uint64_t *", group.control.semaphore_device(channel))
            handle.semaphore.expected = ffi.cast("uint64_t *", expected.ptr + (p * count + i) * _LINE)
            handle.memory_limits = ffi.cast("uint64_t *", service.memory_limits_pointer)
            handle.dst_memory, handle.src_memory = opened[peer][0], src.source_id(peer)
            opened_channel = ProxyChannel(peer, handle, group, connection.transport, peer_channel)
            channels[peer].append(opened_channel)
            group.inventory.add_channel(channel, opened_channel)
    return channels, expected


def free_handles(group: Group, channels: dict[int, list[ProxyChannel]]) -> None:
    """Frees the ids of channels. All proxies must have carried out the channels' triggers, and no rank may push
    more.
    """
    for peer, of_peer in channels.items():
        for channel in of_peer:
            group.control.reset_semaphore(channel.id)
        group.links.proxy.free_channels([channel.id for channel in of_peer], group.links.connection(peer))


class HandlerChannel(_RingChannel):
    """A channel whose triggers a Python function of this rank handles; the channel's peer is the rank itself.

    The device side is proxyccl::ProxyChannelDeviceHandle: `custom` passes three numbers to the function. The function
    also defines what put, signal and flush do.
    """

    def __init__(self, group: Group, handler: Handler) -> None:
        service = group.links.proxy
        self.id = service.add_handler(handler)
        super().__init__(group.rank, _new_handle(group, self.id, group.rank), service.sleepers)
        group.inventory.add_channel(self.id, self)


def connect(group: Group, dst: RegisteredMemory, src: RegisteredMemory, peers: list[int]) -> ChannelSet[ProxyChannel]:
    """Connects one channel to each of `peers`. See `Communicator.proxy_channels`."""
    with group.exchange.telling():
        channels, kept = connect_handles(group, dst, src, peers, 1)
    made = [channels[peer][0] for peer in peers]
    return ChannelSet(group.runtime, group.device_memory, ProxyChannel, made, (kept, dst, src))


PortChannel = ProxyChannel
"""MSCCL++'s name of `ProxyChannel` since 2025."""
