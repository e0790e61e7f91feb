"""Which all-reduce algorithm for which size."""

from __future__ import annotations

from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot", "ring", "proxy")
PACKET_ALGORITHMS = frozenset({"one_shot", "recursive_doubling"})


@dataclass(frozen=True)
class Selector:
    """Algorithms by the most bytes that each is used for, in rising order; the last is used beyond.

    The default limit between latency and bandwidth, 32 KiB, is what a packet slot holds. `Communicator.tune` replaces
    it by what was measured on the machine.
    """

    limits: tuple[tuple[int, str], ...] = ((32 * 1024, "one_shot"),)
    beyond: str = "two_shot"

    def __post_init__(self) -> None:
        for name in (*(name for _, name in self.limits), self.beyond):
            if name not in ALGORITHMS:
                raise ArgumentError("algorithm", f"{name!r} is none of {', '.join(ALGORITHMS)}")

    def choose(self, nbytes: int) -> str:
        """The algorithm for a message of `nbytes` bytes."""
        for limit, name in self.limits:
            if nbytes <= limit:
                return name
        return self.beyond
