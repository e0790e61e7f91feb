"""The wire between the two ends of a staged connection in tests (staging.py): a device of one end that copies
memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from support.fakes.fabric import SOURCE_KEY, TARGET_KEY, FakeEndpoint
from support.fakes.verbs import LKEY, RKEY, SCRATCH_LKEY, FakeDevice, adding, verbs_options


class FakeWire(Protocol):
    """One end of it.

    Attributes:
        transport: name of the staged transport over it.
        device: the device, which counts, dawdles and fails.
        area_key: of this end's area.
        peer_key: of the other end's.
    """

    transport: str
    device: Any
    area_key: int
    peer_key: int

    def register(self, area: NDArray[np.uint8], peer_area: NDArray[np.uint8]) -> None:
        """Registers both areas with the device."""
        ...

    def options(self) -> Any:
        """Of the wire's own transport."""
        ...


class VerbsWire:
    """A queue pair that writes signals, or adds them.

    Args:
        depth: of its queues.
        max_message: bytes of a request.
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
    """A queue pair that adds signals."""

    _fetch_add = True


class FabricWire:
    """An endpoint of libfabric that keeps the order of writes.

    Args:
        depth: most writes outstanding.
        max_message: bytes of a write.
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
    """An endpoint that also keeps the order of a write's bytes."""

    _joined = True


class UnorderedFabricWire(FabricWire):
    """An endpoint that carries writes out in any order."""

    _ordered = False
