"""Which all-reduce algorithm for which size."""

from __future__ import annotations

from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy")
PACKET_ALGORITHMS = frozenset({"one_shot", "recursive_doubling", "two_shot_packets"})


@dataclass(frozen=True)
class Selector:
    """Algorithms by the most bytes that each is used for, in rising order; the last is used beyond.

    `Communicator.tune` replaces the defaults by what was measured on the machine.
    """

    limits: tuple[tuple[int, str], ...] = ()
    beyond: str = "two_shot"

    def __post_init__(self) -> None:
        for name in (*(name for _, name in self.limits), self.beyond):
            if name not in ALGORITHMS:
                raise ArgumentError("algorithm", f"{name!r} is none of {', '.join(ALGORITHMS)}")

    @classmethod
    def for_world_size(cls, ranks: int) -> Selector:
        """Defaults: what a one-shot sends grows with the number of ranks, and so its limit shrinks."""
        return cls(((256 * 1024 // ranks, "one_shot"), (512 * 1024, "two_shot_packets")), "two_shot")

    def choose(self, nbytes: int) -> str:
        """The algorithm for a message of `nbytes` bytes."""
        for limit, name in self.limits:
            if nbytes <= limit:
                return name
        return self.beyond
