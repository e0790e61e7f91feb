"""The requested place of a rank's proxy, and its rings and threads."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from proxyccl.channels.joining.proxy_place import Where
from proxyccl.device.arguments.integers import find_integer
from proxyccl.proxy.ring import require_ring_size
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.workers import MAX_RINGS, require_rings


class ProxyOptions(Struct, frozen=True):
    """The requested place of a rank's proxy, and its rings and threads. See `Communicator`."""

    where: Where | None
    fifos: int | str
    threads: int
    fifo_size: int
    idle: IdlePolicy | None
    cores: str | None

    def __post_init__(self) -> None:
        require_rings(self.threads if self._by_peer else self.fifos, self.threads)
        require_ring_size(self.fifo_size)
        for name in ("fifos", "threads", "fifo_size"):  # messages to a daemon can encode only Python's integers
            if (number := find_integer(getattr(self, name))) is not None:
                structs.force_setattr(self, name, number)

    @property
    def _by_peer(self) -> bool:
        return isinstance(self.fifos, str) and self.fifos == "peer"

    def rings(self, world_size: int) -> dict[str, Any]:
        """Returns the rings and threads of the proxy of a communicator of this size."""
        fifos = min(MAX_RINGS, max(self.threads, world_size)) if self._by_peer else self.fifos
        return {
            "fifos": fifos,
            "threads": self.threads,
            "fifo_size": self.fifo_size,
            "ring_per_connection": self._by_peer,
        }
