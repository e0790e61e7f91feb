"""The endpoint that the tests of the fabric transport write to (support/fabric), and a peer that a service reaches
through one."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl import ProxyService
from proxyccl.proxy._engine import lib
from proxyccl.proxy.fabric.endpoint import FabricConnectionOptions
from support import fake_library
from support.fake_verbs import FakePeer

SOURCE_KEY, TARGET_KEY, SIGNAL_KEY, REQUESTS_KEY = 0x11, 1 << 40, 0x33, 0x44
PEER = 3
_DESCRIPTORS = 0x7000  # a key's descriptor, counted from this


@functools.cache
def library() -> tuple[Any, Any]:
    """cffi's view of the fake endpoint: ffi and lib."""
    return fake_library.load("fabric", "fake_endpoint")


class FakeEndpoint:
    """An endpoint to memory of this process. Leaving it asserts that nothing wrong was asked of it."""

    def __init__(self, depth: int, *, ordered: bool, joined: bool, max_message: int) -> None:
        self._ffi, self._lib = library()
        self._endpoint = self._lib.fake_endpoint_open(depth, ordered, joined, max_message)
        self.fid: int = self._lib.fake_endpoint_fid(self._endpoint)
        self.queue: int = self._lib.fake_endpoint_queue(self._endpoint)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        breach = self.breach
        self._lib.fake_endpoint_close(self._endpoint)
        assert breach is None or error is not None, breach

    @property
    def breach(self) -> str | None:
        """The first wrong thing that was asked of it."""
        text = self._lib.fake_endpoint_breach(self._endpoint)
        return self._ffi.string(text).decode() if text else None

    @property
    def counts(self) -> Any:
        """A FakeFabricCounts."""
        counts = self._ffi.new("FakeFabricCounts *")
        self._lib.fake_endpoint_counts(self._endpoint, counts)
        return counts

    def register(self, key: int, array: NDArray[Any], *, offsets: bool = False) -> None:
        """Makes an array's memory known under a key, by its addresses or by offsets."""
        self._lib.fake_endpoint_register(self._endpoint, key, array.ctypes.data, array.nbytes, offsets)

    def allow(self, requests: int) -> None:
        """Writes that may be carried out from now on; -1: any number."""
        self._lib.fake_endpoint_allow(self._endpoint, requests)

    def dawdle(self, most: int, seed: int) -> None:
        """Carries out at most this many at each poll, mostly fewer, and refuses some writes for now."""
        self._lib.fake_endpoint_dawdle(self._endpoint, most, seed)

    def fail(self, request: int, error: int) -> None:
        """The write of this number, from 1, fails."""
        self._lib.fake_endpoint_fail(self._endpoint, request, error)

    @property
    def signals(self) -> list[tuple[int, int, int]]:
        """(address of the word, value that it then held, bytes put before) of each signal carried out."""
        out: list[tuple[int, int, int]] = []
        signal = self._ffi.new("FakeFabricSignal *")
        while self._lib.fake_endpoint_signal(self._endpoint, len(out), signal):
            out.append((signal.remote, signal.value, signal.bytes_before))
        return out


class Descriptors:
    """The table of local keys that a connection gets, and the keys that an endpoint knows in addition.

    Attributes:
        address: of the table.
    """

    def __init__(self, endpoint: FakeEndpoint) -> None:
        self._endpoint = endpoint
        self._table = np.zeros(lib.PROXYCCL_FABRIC_LOCAL_KEYS, np.uint64)
        self.address: int = self._table.ctypes.data

    def add(self, key: int, array: NDArray[Any]) -> None:
        """Makes an array's memory known under a local key."""
        self._table[key] = _DESCRIPTORS + key
        self._endpoint.register(_DESCRIPTORS + key, array)


class FakeFabricPeer(FakePeer):
    """A peer with its own fake endpoint: this process's memory, under another's keys.

    Args:
        service: that connects to it.
        source: what puts read.
        destination: what they write.
        rank: its rank.
        channels: number of channels to it.
        depth: most writes outstanding.
        ordered: whether the endpoint keeps the order of writes.
        joined: whether it takes writes of two parts, and keeps their order too.
        reads: whether it makes reads.
        offsets: whether the peer's memory is named by offsets; otherwise by addresses.
        max_message: bytes of a write, at most.
    """

    device: Any

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
    ) -> None:
        self.service, self.rank = service, rank
        self.device = FakeEndpoint(depth, ordered=ordered, joined=joined, max_message=max_message)
        self.words = np.zeros(channels, np.uint64)
        self._requests = np.zeros(depth * lib.PROXYCCL_FABRIC_REQUEST_BYTES, np.uint8)
        self._looks = np.zeros(1, np.uint64)
        self._descriptors = Descriptors(self.device)
        self._descriptors.add(SOURCE_KEY, source)
        self._descriptors.add(REQUESTS_KEY, self._requests)
        self.device.register(TARGET_KEY, destination, offsets=offsets)
        self.device.register(SIGNAL_KEY, self.words, offsets=offsets)
        self.options = options = FabricConnectionOptions(
            endpoint=self.device.fid,
            queue=self.device.queue,
            peer=PEER,
            depth=depth,
            ordered=ordered,
            joined=joined,
            reads=reads,
            max_message=max_message,
            signal_key=SIGNAL_KEY,
            requests=self._requests.ctypes.data,
            requests_key=REQUESTS_KEY,
            descriptors=self._descriptors.address,
            looks=self._looks.ctypes.data,
        )
        self.connection = service.connect("fabric", options, peer=rank)
        self.source_id = service.add_memory(source.ctypes.data, source.nbytes, SOURCE_KEY)
        base = 0 if offsets else destination.ctypes.data
        self.destination_id = service.add_rdma_memory(base, destination.nbytes, TARGET_KEY)
        self.channels = [service.reserve_channel(self.connection) for _ in range(channels)]
        words = 0 if offsets else self.words.ctypes.data
        for i, channel in enumerate(self.channels):
            service.set_channel(channel, self.connection, words + 8 * i)
