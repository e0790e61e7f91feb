"""A fake libfabric endpoint (fake_endpoint.c) for tests of the fabric transport, and a peer that a service reaches
through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import ProxyService
from proxyccl.device.ffi_types import fill
from proxyccl.proxy._engine import ffi, lib
from proxyccl.proxy.transports.rails import Mail, Rail
from proxyccl.proxy.transports.transport import RailsOptions
from support.fakes.verbs import FakePeer, RailsMail
from support.fakes.writer import FakeWriter
from support.running import TIMEOUT

SOURCE_KEY, TARGET_KEY, SIGNAL_KEY, REQUESTS_KEY = 0x11, 1 << 40, 0x33, 0x44
MAIL_KEY, PEER_MAIL_KEY = 0x55, 0x66
PEER = 3
_DESCRIPTORS = 0x7000  # a key's descriptor is _DESCRIPTORS plus the key


class FakeEndpoint(FakeWriter):
    """A fake endpoint whose peer is in this process.

    At the end of its `with` block, the endpoint asserts that all requests were valid.
    """

    _library, _functions, _types = ("fabric", "fake_endpoint"), "fake_endpoint_", "FakeFabric"

    def __init__(self, depth: int, *, ordered: bool, joined: bool, max_message: int) -> None:
        super().__init__(depth, ordered, joined, max_message)
        self._depth, self._ordered, self._joined, self._max_message = depth, ordered, joined, max_message
        self._table = np.zeros(lib.PROXYCCL_FABRIC_LOCAL_KEYS, np.uint64)
        self._requests = np.zeros(depth * lib.PROXYCCL_FABRIC_REQUEST_BYTES, np.uint8)
        self._looks = np.zeros(1, np.uint64)
        self.add(REQUESTS_KEY, self._requests)

    def register(self, key: int, array: NDArray[Any], *, offsets: bool = False) -> None:
        """Registers an array's memory under a key. Requests name the memory by address, or by offset if `offsets`."""
        self._call("register", key, array.ctypes.data, array.nbytes, offsets)

    def add(self, key: int, array: NDArray[Any]) -> None:
        """Registers an array's memory as local memory, which the connection names by `key`."""
        self._table[key] = _DESCRIPTORS + key
        self.register(_DESCRIPTORS + key, array)

    def fail(self, request: int, error: int) -> None:
        """Makes the write with number `request`, counted from 1, fail with `error`."""
        self._call("fail", request, error)

    def stop(self) -> bool:
        """Closes the endpoint, whose requests are discarded."""
        return bool(self._call("stop"))

    def reopen(self) -> bool:
        self._call("reopen")
        return True

    def options(self, signal_key: int, *, reads: bool) -> Any:
        """Returns the options of a connection that writes to this endpoint.

        Args:
            signal_key: key of the memory of the signal words.
            reads: whether the connection makes reads.
        """
        return fill(
            ffi.new("ProxycclFabricOptions *"),
            endpoint=self._call("fid"),
            queue=self._call("queue"),
            peer=PEER,
            depth=self._depth,
            ordered=self._ordered,
            joined=self._joined,
            reads=reads,
            max_message=self._max_message,
            signal_key=signal_key,
            requests=self._requests.ctypes.data,
            requests_key=REQUESTS_KEY,
            descriptors=ffi.cast("uint64_t *", self._table.ctypes.data),
            looks=ffi.cast("uint64_t *", self._looks.ctypes.data),
        )


class FakeFabricPeer(FakePeer):
    """A peer in this process, with its own fake endpoint and its own memory keys.

    Args:
        service: the proxy service that connects to the peer.
        source: memory from which puts copy.
        destination: memory to which puts copy.
        rank: the peer's rank.
        channels: number of channels to the peer.
        depth: largest number of outstanding writes.
        ordered: whether the endpoint keeps the order of writes.
        joined: whether a write may have two parts, which the endpoint executes in order.
        reads: whether the endpoint supports reads.
        offsets: whether requests name the peer's memory by offset instead of address.
        max_message: maximum size of a write in bytes.
        rails: number of rails, each of which has its own endpoint and keys; 1 for a connection without rails.
        recovers: whether the connection goes on after a rail has failed.

    Attributes:
        works: returns whether the last rail's interface has a carrier.
    """

    device: Any
    devices: list[Any]

    def __init__(
        self,
        service: ProxyService,
        source: NDArray[np.uint8],
        destination: NDArray[np.uint8],
        *,
        rank: int = 7,
        channels: int = 1,
        depth: int = 16,
        ordered: bool = True,
        joined: bool = False,
        reads: bool = True,
        offsets: bool = False,
        max_message: int = 4096,
        rails: int = 1,
        recovers: bool = False,
    ) -> None:
        self.service, self.rank = service, rank
        self.devices = [
            FakeEndpoint(depth, ordered=ordered, joined=joined, max_message=max_message) for _ in range(rails)
        ]
        self.device = self.devices[0]
        self.words = np.zeros(channels, np.uint64)
        for rail, device in enumerate(self.devices):
            device.add(SOURCE_KEY + rail, source)
            device.register(TARGET_KEY + rail, destination, offsets=offsets)
            device.register(SIGNAL_KEY + rail, self.words, offsets=offsets)
        options = [device.options(SIGNAL_KEY + rail, reads=reads) for rail, device in enumerate(self.devices)]
        self.options = options[0]
        connected = self.options
        if rails > 1:
            own = (self._make_rails(), self._make_mails()) if recovers else ()
            fields = {"over_fabric": 1, "cut": 64, "limit_ns": int(TIMEOUT * 1e9)}
            connected = RailsOptions.of(options, [1] * rails, *own, **fields)
        self.connection = service.connect("fabric", connected, peer=rank)
        keys = [[key + rail for rail in range(rails)] for key in (SOURCE_KEY, TARGET_KEY)]
        self.source_id = service.add_memory(source.ctypes.data, source.nbytes, keys[0])
        base = 0 if offsets else destination.ctypes.data
        self.destination_id = service.add_remote_memory(base, destination.nbytes, keys[1])
        self.channels = [service.reserve_channel(self.connection) for _ in range(channels)]
        words = 0 if offsets else self.words.ctypes.data
        for i, channel in enumerate(self.channels):
            service.set_channel(channel, self.connection, words + 8 * i)

    def _make_rails(self) -> list[Rail]:
        self.works: Callable[[], bool] = lambda: True
        last = self.devices[-1]
        return [
            Rail(
                f"rail{number}",
                device.stop,
                lambda _, device=device: (device is not last or self.works()) and device.reopen(),
                lambda device=device: device is not last or self.works(),
            )
            for number, device in enumerate(self.devices)
        ]

    def _make_mails(self) -> tuple[Mail, Mail]:
        words = ffi.sizeof("ProxycclRailsMail") // 8
        self.mail, self.peer_mail = RailsMail(words), RailsMail(words)
        for rail, device in enumerate(self.devices):
            device.add(MAIL_KEY + rail, self.mail.words)
            device.register(PEER_MAIL_KEY + rail, self.peer_mail.words)
        mails = (self.mail, MAIL_KEY), (self.peer_mail, PEER_MAIL_KEY)
        rails = range(len(self.devices))
        own, peer = (Mail(mail.words.ctypes.data, [key + rail for rail in rails]) for mail, key in mails)
        return own, peer
