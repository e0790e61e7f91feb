"""Wires of staged connections in tests (staging.py): fake devices, each of which copies one end's memory to the other
end.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from support.fakes.fabric import SOURCE_KEY, TARGET_KEY, FakeEndpoint
from support.fakes.verbs import LKEY, RKEY, SCRATCH_LKEY, FakeDevice, adding, verbs_options


class FakeWire(Protocol):
    """One end's fake device and its memory keys.

    Attributes:
        transport: name of the staged transport that uses the wire.
        device: the fake device, which counts, delays and fails requests.
        area_key: key of this end's staging area.
        peer_key: key of the other end's staging area.
    """

    transport: str
    device: Any
    area_key: int
    peer_key: int

    def register(self, area: NDArray[np.uint8], peer_area: NDArray[np.uint8]) -> None:
        """Registers both ends' staging areas with the device."""
        ...

    def options(self) -> Any:
        """Returns the options of the transport that the wire uses."""
        ...


class VerbsWire:
    """A queue pair whose signals are RDMA writes.

    Args:
        depth: depth of the queues.
        max_message: maximum size of a request in bytes.
    """

    transport = "staged"
    area_key, peer_key = LKEY, RKEY
    _fetch_add = False

    def __init__(self, depth: int, max_message: int) -> None:
        self.device = FakeDevice(depth, depth)
        self._depth, self._max_message = depth, max_message
        self._scratch = np.zeros(1, np.uint64)

    def register(self, area: NDArray[np.uint8], peer_area: NDArray[np.uint8]) -> None:
        self.device.register(LKEY, area)
        self.device.register(RKEY, peer_area)
        self.device.register(SCRATCH_LKEY, self._scratch)

    def options(self) -> Any:
        return verbs_options(
            self.device.qp,
            send_depth=self._depth,
            cq_depth=self._depth,
            max_message=self._max_message,
            signal_rkey=RKEY,
            **adding(self._scratch) if self._fetch_add else {},
        )


class AddingVerbsWire(VerbsWire):
    """A queue pair whose signals are fetch-and-adds."""

    _fetch_add = True


class FabricWire:
    """An endpoint of libfabric that keeps the order of writes.

    Args:
        depth: largest number of outstanding writes.
        max_message: maximum size of a write in bytes.
    """

    transport = "staged_fabric"
    area_key, peer_key = SOURCE_KEY, TARGET_KEY
    _ordered, _joined = True, False

    def __init__(self, depth: int, max_message: int) -> None:
        self.device = FakeEndpoint(depth, ordered=self._ordered, joined=self._joined, max_message=max_message)

    def register(self, area: NDArray[np.uint8], peer_area: NDArray[np.uint8]) -> None:
        self.device.add(self.area_key, area)
        self.device.register(self.peer_key, peer_area)

    def options(self) -> Any:
        return self.device.options(self.peer_key, reads=False)


class JoinedFabricWire(FabricWire):
    """An ordered endpoint that also takes writes of two parts, and executes the parts in order."""

    _joined = True


class UnorderedFabricWire(FabricWire):
    """An endpoint that executes writes in any order."""

    _ordered = False
