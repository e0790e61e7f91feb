"""A fake RDMA device for tests of the verbs transport (fake_device.c), and a proxy service that uses such devices."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import ProxyService, Trigger
from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device.ffi_types import fill
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.ring import Fifo
from proxyccl.proxy.transports.rails import Mail, Rail
from proxyccl.proxy.transports.transport import RailsOptions
from proxyccl.proxy.trigger import MAX_MEMORIES, Operation
from support.bare_loops import produce
from support.devices import rank_runtime
from support.fakes.writer import FakeWriter
from support.running import TIMEOUT, wait_for

LKEY, RKEY, SIGNAL_RKEY, SCRATCH_LKEY, MAIL_LKEY, MAIL_RKEY = 0x11, 0x22, 0x33, 0x44, 0x55, 0x66
_KEYS_APART = 0x100  # difference between the keys of the same memory on two rails


class FakeDevice(FakeWriter):
    """A fake queue pair whose peer is in this process. Leaving its `with` block asserts that no limit was exceeded."""

    _library, _functions, _types = ("verbs", "fake_device"), "fake_", "Fake"

    def __init__(self, send_depth: int = 16, cq_depth: int = 16, reads: int = 16) -> None:
        super().__init__(send_depth, cq_depth, reads)
        self.qp: int = self._call("qp")
        self.cq: int = self._call("cq")
        self.qp_num: int = self._call("qp_num")

    def __enter__(self) -> FakeDevice:
        return self

    def register(self, key: int, array: NDArray[Any]) -> None:
        """Registers an array's memory under a key."""
        self._call("register", key, array.ctypes.data, array.nbytes)

    def fail_request(self, number: int, status: int, lost: int = 0) -> None:
        """Makes request number `number`, counted from 1, complete with an ibv_wc_status. `lost` requests from this one
        on are executed nevertheless.
        """
        self._call("fail_request", number, status, lost)

    def stop(self) -> bool:
        """Puts the queue pair into its error state."""
        self._call("stop")
        return True

    def reset(self) -> None:
        """Resets the queue pair after a failure."""
        self._call("reset")

    def fail_post(self, number: int, error: int) -> None:
        """Makes post number `number`, counted from 1, return an errno."""
        self._call("fail_post", number, error)

    def fail_polls(self) -> None:
        self._call("fail_polls")

    def status_names(self) -> list[str]:
        """Returns the names of all values of verbs.h's ibv_wc_status, in order."""
        names: list[str] = []
        while name := self._lib.fake_status_name(len(names)):
            names.append(self._ffi.string(name).decode())
        return names


def value_trigger(
    operation: Operation, channel: int, value: int, size: int, memory: int = 0, offset: int = 0
) -> Trigger:
    """Returns a trigger that puts a value of 1, 2, 4 or 8 bytes."""
    kind = MAX_MEMORIES + size.bit_length() - 1
    return Trigger(operation, channel, size, kind, 0, memory, offset, value)


def bytes_of_value(value: int, size: int) -> NDArray[np.uint8]:
    """Returns the little-endian bytes of a value of `size` bytes."""
    return np.frombuffer(value.to_bytes(8, "little")[:size], np.uint8)


class Producer:
    """Pushes triggers into the rings of a service, in place of a kernel."""

    def __init__(self, service: ProxyService) -> None:
        self._service = service
        self._tickets: dict[Fifo, int] = {}

    def push(self, trigger: Trigger, count: int = 1) -> int:
        """Pushes copies of a trigger whenever the ring has room. Returns the last copy's ticket."""
        ring = self._service.fifo_for(trigger.channel)
        first = self._tickets.get(ring, 0)
        pushed = produce(ring, first, trigger.encode(), count, TIMEOUT)
        self._tickets[ring] = first + pushed
        assert pushed == count, "the ring stays full"
        return first + count - 1

    def taken(self, channel: int) -> int:
        """Returns the number of triggers taken out of a channel's ring so far."""
        return self._service.fifo_for(channel).taken


class OwnTriggers:
    """Makes triggers of transfers between a source and a destination memory, for a service's channels to one peer.

    Attributes:
        service: the service that has the channels.
        channels: ids of the channels.
        source_id, destination_id: ids of the memories.
    """

    service: ProxyService
    channels: list[int]
    source_id: int
    destination_id: int

    def trigger(
        self,
        operation: Operation,
        size: int = 0,
        *,
        source: int = 0,
        destination: int = 0,
        channel: int = 0,
        value: int | None = None,
    ) -> Trigger:
        """Returns a trigger for one of the channels, with offsets into both memories, or with a value.

        A get reads memory `destination_id` at offset `source`, and writes memory `source_id` at offset `destination`.
        """
        number = self.channels[channel]
        if operation & Operation.GET:
            return Trigger(operation, number, size, self.destination_id, source, self.source_id, destination)
        if value is not None:
            return value_trigger(operation, number, value, size, self.destination_id, destination)
        return Trigger(operation, number, size, self.source_id, source, self.destination_id, destination)

    def flushed(self, channel: int = 0) -> int:
        """Returns the value of a channel's flush word."""
        return ctypes.c_uint64.from_address(self.service.flushed_pointer(self.channels[channel])).value


def verbs_options(qp: int, **fields: Any) -> Any:
    """Returns a ProxycclVerbsOptions with these fields; by default, signals are RDMA writes."""
    return fill(ffi.new("ProxycclVerbsOptions *"), **{"qp": qp, "signal": lib.PROXYCCL_VERBS_WRITE, **fields})


def adding(scratch: NDArray[np.uint64]) -> dict[str, int]:
    """Returns the fields of `verbs_options` for signals by fetch-and-add, which store old values in `scratch`."""
    address = scratch.ctypes.data
    return {"signal": lib.PROXYCCL_VERBS_FETCH_ADD, "scratch": address, "scratch_lkey": SCRATCH_LKEY}


class FakePeer(OwnTriggers):
    """A peer in this process, with its own fake device and its own memory keys.

    Args:
        service: the proxy service that connects to the peer.
        source: memory from which puts copy.
        destination: the peer's memory, to which puts copy.
        rank: the peer's rank.
        channels: number of channels to the peer.
        send_depth: depth of the send queue.
        cq_depth: depth of the completion queue; None for `send_depth`.
        max_message: maximum size of a request in bytes.
        fetch_add: whether signals are fetch-and-adds instead of writes.
        reads: largest number of outstanding reads; 0 if the device supports no reads.
        speeds: relative speeds of the rails, each of which has its own device and keys; one speed for no rails.
        home: number of the rail that carries short operations.
        cut: puts and gets of at least this many bytes are divided between the rails.
        limit: longest recovery from a rail's failure, in seconds.

    Attributes:
        port: waits for the port of a failed rail; returns whether the rail can be connected again.
        can_stop: returns whether the system puts queue pairs into their error state.
    """

    def __init__(
        self,
        service: ProxyService,
        source: NDArray[np.uint8],
        destination: NDArray[np.uint8],
        *,
        rank: int = 7,
        channels: int = 1,
        send_depth: int = 16,
        cq_depth: int | None = None,
        max_message: int = 4096,
        fetch_add: bool = False,
        reads: int = 16,
        speeds: Sequence[int] = (1,),
        home: int = 0,
        cut: int = 64,
        limit: float = TIMEOUT,
    ) -> None:
        cq_depth = send_depth if cq_depth is None else cq_depth
        self.service, self.rank = service, rank
        self.words = np.zeros(channels, np.uint64)
        self.scratch = np.zeros(1, np.uint64)
        arrays = {LKEY: source, RKEY: destination, SIGNAL_RKEY: self.words, SCRATCH_LKEY: self.scratch}
        self._arrays = arrays  # keeps the memory that the devices' keys name
        self.devices = [FakeDevice(send_depth, cq_depth, reads) for _ in speeds]
        self.device = self.devices[0]
        rails = []
        for rail, device in enumerate(self.devices):
            for key, array in arrays.items():
                device.register(key + _KEYS_APART * rail, array)
            fields = {"signal_rkey": SIGNAL_RKEY + _KEYS_APART * rail, "max_message": max_message, "reads": reads}
            if fetch_add:
                fields |= adding(self.scratch) | {"scratch_lkey": SCRATCH_LKEY + _KEYS_APART * rail}
            rails.append(verbs_options(device.qp, send_depth=send_depth, cq_depth=cq_depth, **fields))
        options = rails[0]
        if len(rails) > 1:
            fields = {"home": home, "cut": cut, "limit_ns": int(limit * 1e9)}
            options = RailsOptions.of(rails, speeds, self._make_rails(), self._make_mails(), **fields)
        self.connection = service.connect("verbs", options, peer=rank)
        keys = [self._keys(key) for key in (LKEY, RKEY)]
        self.source_id = service.add_memory(source.ctypes.data, source.nbytes, keys[0])
        self.destination_id = service.add_memory(destination.ctypes.data, destination.nbytes, keys[1])
        self.channels = [service.reserve_channel(self.connection) for _ in range(channels)]
        for i, channel in enumerate(self.channels):
            service.set_channel(channel, self.connection, self.words[i:].ctypes.data)

    def _make_rails(self) -> list[Rail]:
        self.port: Callable[[], bool] = lambda: True
        self.can_stop: Callable[[], bool] = lambda: True

        def reconnect(device: FakeDevice) -> bool:
            is_up = self.port()
            if is_up:
                device.reset()
            return is_up

        return [
            Rail(
                f"rail{number}",
                lambda device=device: self.can_stop() and device.stop(),
                lambda _, device=device: reconnect(device),
            )
            for number, device in enumerate(self.devices)
        ]

    def _keys(self, key: int) -> list[int]:
        """Returns the keys of memory on all rails, given the key on the first rail."""
        return [key + _KEYS_APART * rail for rail in range(len(self.devices))]

    def _make_mails(self) -> tuple[Mail, Mail]:
        """Makes the memory in which the two ends of a connection report failed rails."""
        words = ffi.sizeof("ProxycclRailsMail") // 8
        self.mail, self.peer_mail = RailsMail(words), RailsMail(words)
        for key, mail in ((MAIL_LKEY, self.mail), (MAIL_RKEY, self.peer_mail)):
            for rail, device in enumerate(self.devices):
                device.register(key + _KEYS_APART * rail, mail.words)
        mails = (self.mail, MAIL_LKEY), (self.peer_mail, MAIL_RKEY)
        own, peer = (Mail(mail.words.ctypes.data, self._keys(key)) for mail, key in mails)
        return own, peer


class RailsMail:
    """A ProxycclRailsMail: `words`, of which `down` and `up` have one word for each rail."""

    def __init__(self, words: int) -> None:
        self.words = np.zeros(words, np.uint64)
        self.down, self.up = self.words[: lib.PROXYCCL_RAILS], self.words[lib.PROXYCCL_RAILS : 2 * lib.PROXYCCL_RAILS]

    def answer(self, other: RailsMail) -> None:
        """Answers each message about a rail in `other` with the same message."""
        self.words[: 2 * lib.PROXYCCL_RAILS] = other.words[: 2 * lib.PROXYCCL_RAILS]


class Loop:
    """A proxy service with fake peers of ranks 7, 8 and so on, which share one destination memory.

    Args:
        source: memory from which puts copy.
        destination: memory to which puts copy.
        peers: number of peers.
        service: options of the service.
        make_peer: makes each peer; None for `FakePeer`.
        options: options of each peer.
    """

    def __init__(
        self,
        source: NDArray[np.uint8],
        destination: NDArray[np.uint8],
        *,
        peers: int = 1,
        service: dict[str, Any] | None = None,
        make_peer: Callable[..., FakePeer] | None = None,
        **options: Any,
    ) -> None:
        runtime = rank_runtime(0)
        self.failures: list[ProxyFailure] = []
        self._segment = create_segment(runtime, 0, TIMEOUT)
        self.service = ProxyService(
            runtime,
            self._segment.host_pointer,
            self._segment.memory,
            shared_offset=ControlSegment.service_offset,
            on_failure=self.failures.append,
            **(service or {}),
        )
        self.producer = Producer(self.service)
        make = make_peer or FakePeer
        self._memories = source, destination  # kept, because the fake peers know only their addresses
        self.peers = [make(self.service, source, destination, rank=7 + i, **options) for i in range(peers)]

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in itertools.chain.from_iterable(peer.devices for peer in self.peers):
            device.allow(-1)
        ended = self.service.close(TIMEOUT)
        assert ended or error is not None, "the proxy does not end"
        if ended:
            for device in itertools.chain.from_iterable(peer.devices for peer in self.peers):
                device.__exit__(kind, error, trace)
            self._segment.close()

    def push(self, peer: int, operation: Operation, size: int = 0, *, count: int = 1, **where: Any) -> int:
        """Pushes triggers to a peer; see `FakePeer.trigger`. Returns the ticket of the last trigger."""
        return self.producer.push(self.peers[peer].trigger(operation, size, **where), count)

    def flush(self, peer: int = 0, channel: int = 0) -> None:
        """Flushes a channel, and waits until the flush is complete."""
        ticket = self.push(peer, Operation.FLUSH, channel=channel)
        self.wait(lambda: self.peers[peer].flushed(channel) > ticket, "a flush")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds, and asserts that the proxy has not failed."""
        wait_for(lambda: condition() or bool(self.failures), what)
        assert not self.failures, self.failures[0]

    def let_poll(self, peer: int) -> None:
        """Waits until the worker has polled a peer's device a few more times, and so has emptied the trigger rings."""
        device = self.peers[peer].device
        polls = device.counts.polls
        self.wait(lambda: device.counts.polls >= polls + 5, "polls")

    def fails(self) -> ProxyFailure:
        """Waits until the proxy has failed, and returns the failure."""
        wait_for(lambda: bool(self.failures), "a failure of the proxy")
        return self.failures[0]


def rails_up(loop: Loop, peer: int = 0) -> int:
    state, made = ffi.new("ProxycclRailsState *"), loop.service.engine_connections[peer]
    up = 0
    for rail in range(made.rails):
        lib.proxyccl_rails_state(made.pointer, rail, state)
        up += not state.is_down
    return up


def wait_with_peer(loop: Loop, condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition, while the peers answer each message about a rail with the same message."""

    def answered() -> bool:
        for peer in loop.peers:
            peer.mail.answer(peer.peer_mail)
        return condition()

    loop.wait(answered, what)


def require_done(loop: Loop, peer: Any, signals: list[int], equal: Sequence[tuple[Any, Any]], rails: int) -> None:
    """Flushes both channels of a loop with one peer, and asserts that the peer's words have the values `signals`, and
    that the pairs of arrays are equal. Then waits until all rails are up.
    """
    tickets = [loop.push(0, Operation.FLUSH, channel=channel) for channel in range(2)]
    wait_with_peer(loop, lambda: all(peer.flushed(i) > each for i, each in enumerate(tickets)), "the flushes")
    assert peer.words.tolist() == signals
    assert all((a == b).all() for a, b in equal)
    wait_with_peer(loop, lambda: rails_up(loop) == rails, "all rails")
