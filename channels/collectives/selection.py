"""Which all-reduce algorithm for which size."""

from __future__ import annotations

from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy", "hierarchical")
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
    def for_ranks(cls, ranks: int, runtime: str) -> Selector:
        """Defaults for a number of ranks on a runtime ("host", "cuda" or "hip").

        For GPUs they are from what was measured on 2 and 4 H200 (benchmarks/results). What a one-shot sends grows with
        the number of ranks, and so its limit shrinks. Recursive doubling has no detour where that is a power of two.
        """
        limits: tuple[tuple[int, str], ...]
        if runtime == "host":
            limits = ((32 * 1024, "one_shot"),)
        elif ranks == 2:
            limits = ((1536 * 1024, "recursive_doubling"), (32 * 1024 * 1024, "ring"))
        elif ranks & (ranks - 1) == 0:
            limits = (
                (512 * 1024 // ranks, "one_shot"),
                (512 * 1024, "recursive_doubling"),
                (1152 * 1024, "two_shot_packets"),
            )
        else:
            limits = ((512 * 1024 // ranks, "one_shot"), (1152 * 1024, "two_shot_packets"))
        return cls(limits, "two_shot")

    def choose(self, nbytes: int) -> str:
        """The algorithm for a message of `nbytes` bytes."""
        for limit, name in self.limits:
            if nbytes <= limit:
                return name
        return self.beyond


def sending_no_sums(algorithm: str, ranks: int) -> str:
    """What takes the place of an algorithm that sends partial sums, for types whose sums are twice as long as they are.

    Those are the 16-bit floats. The others send values as they came, or sums that are rounded.
    """
    if algorithm == "recursive_doubling":
        return "one_shot" if ranks == 2 else "two_shot_packets"
    return "two_shot" if algorithm == "ring" else algorithm
