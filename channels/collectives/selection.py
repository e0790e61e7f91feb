"""Which algorithm for which call: a table by size for each collective, class of element types and kind of arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from proxyccl.channels.calls import register_names
from proxyccl.device.dtypes import DType
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message, Uint64

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy", "hierarchical")
"""Of all_reduce."""
PACKET_ALGORITHMS = frozenset({"one_shot", "recursive_doubling", "two_shot_packets"})
ALGORITHMS_BY_COLLECTIVE: dict[str, tuple[str, ...]] = {
    "all_reduce": ALGORITHMS,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "broadcast"), ("kernels", "proxy")),
}
_KNOWN = frozenset(name for names in ALGORITHMS_BY_COLLECTIVE.values() for name in names)

Elements = Literal["16-bit floats", "other types", "all types"]
"""A class of element types: sums of 16-bit floats travel in float32; collectives that move bytes know no types."""
_ELEMENTS: dict[str, tuple[Elements, ...]] = {
    collective: ("16-bit floats", "other types") if collective in ("all_reduce", "reduce_scatter") else ("all types",)
    for collective in ALGORITHMS_BY_COLLECTIVE
}


def require_algorithm(name: str, collective: str = "all_reduce") -> None:
    """Raises ArgumentError for what is no algorithm of a collective."""
    known = ALGORITHMS_BY_COLLECTIVE[collective]
    if name not in known:
        raise ArgumentError("algorithm", f"unknown algorithm {name!r}; expected one of {', '.join(known)}")


class Case(Message, frozen=True):
    """The calls that share a table.

    Attributes:
        collective: its name.
        elements: the class of their element types.
        symmetric: whether the callers promise symmetric arrays (`Request.symmetric`).
    """

    collective: str
    elements: Elements
    symmetric: bool

    @classmethod
    def of(cls, collective: str, dtype: DType, *, symmetric: bool) -> Case:
        """The case of a call."""
        elements = _ELEMENTS[collective]
        sums_are_longer = dtype.accumulator_itemsize > dtype.itemsize
        return cls(collective, elements[0] if sums_are_longer else elements[-1], symmetric)

    def __str__(self) -> str:
        arrays = "symmetric" if self.symmetric else "other"
        return f"{self.collective} of {self.elements}, {arrays} arrays"


CASES: tuple[Case, ...] = tuple(
    Case(collective, elements, symmetric)
    for collective, classes in _ELEMENTS.items()
    for elements in classes
    for symmetric in (False, True)
)


class SizeTable(Message, frozen=True):
    """Algorithms by the most bytes that each is used for, in rising order; the last is used beyond.

    Raises:
        ArgumentError: no collective has such an algorithm, or the limits fall.
    """

    limits: tuple[tuple[Uint64, str], ...] = ()
    beyond: str = "two_shot"

    def __post_init__(self) -> None:
        for name in self.algorithms:
            if name not in _KNOWN:
                known = ", ".join(sorted(_KNOWN))
                raise ArgumentError("algorithm", f"unknown algorithm {name!r}; expected one of {known}")
        if any(limit > following for (limit, _), (following, _) in pairwise(self.limits)):
            raise ArgumentError("limits", f"must not fall, as in {[limit for limit, _ in self.limits]}")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """All that it may choose."""
        return (*(name for _, name in self.limits), self.beyond)

    def choose(self, nbytes: int) -> str:
        """The algorithm for a message of `nbytes` bytes."""
        for limit, name in self.limits:
            if nbytes <= limit:
                return name
        return self.beyond


@dataclass(frozen=True)
class Selector:
    """The tables of all cases. `Communicator.tune` replaces the defaults by what was measured on the machine.

    Raises ArgumentError unless there is a table for each of `CASES` and no other, with algorithms of its collective.

    Attributes:
        tables: by case.
    """

    tables: Mapping[Case, SizeTable]

    def __post_init__(self) -> None:
        for case in {*CASES, *self.tables}:
            if case not in self.tables:
                raise ArgumentError("tables", f"expected one for {case}")
            if case not in CASES:
                raise ArgumentError("tables", f"{case}: there are no such calls")
        for case, table in self.tables.items():
            for name in table.algorithms:
                require_algorithm(name, case.collective)

    @classmethod
    @functools.cache
    def for_ranks(cls, ranks: int, runtime: str, *, levels: bool = False) -> Selector:
        """Defaults, the same for symmetric and other arrays: kernels for all collectives.

        Args:
            ranks: the world size.
            runtime: "host", "cuda" or "hip".
            levels: whether there are several nodes with as many ranks each, and more than one.
        """
        reduced = SizeTable((), "hierarchical") if levels else _by_packets_and_stores(ranks, runtime)
        tables = {case: SizeTable((), "kernels") for case in CASES}
        for case in CASES:
            if case.collective == "all_reduce":
                tables[case] = _sending_no_sums(reduced, ranks) if case.elements == "16-bit floats" else reduced
        return cls(tables)

    def with_table(self, collective: str, table: SizeTable) -> Selector:
        """The same with one table for all cases of a collective."""
        return Selector({case: table if case.collective == collective else old for case, old in self.tables.items()})

    def choose(self, collective: str, dtype: DType, nbytes: int, *, symmetric: bool = False) -> str:
        """The algorithm of a call.

        Args:
            collective: its name.
            dtype: of its elements.
            nbytes: size of the larger of a rank's input and output.
            symmetric: whether the callers promise symmetric arrays.
        """
        return self.tables[Case.of(collective, dtype, symmetric=symmetric)].choose(nbytes)


def _by_packets_and_stores(ranks: int, runtime: str) -> SizeTable:
    """For all_reduce within a node.

    For GPUs it is from what was measured on 2 and 4 H200 (benchmarks/results). What a one-shot sends grows with the
    number of ranks, and so its limit shrinks. Recursive doubling has no detour where that is a power of two.
    """
    limits: tuple[tuple[int, str], ...]
    if runtime == "host":  # there a packet costs more than the crossing that it saves
        limits = ()
    elif ranks == 2:
        limits = ((768 * 1024, "recursive_doubling"),)
    elif ranks & (ranks - 1) == 0:
        limits = (
            (512 * 1024 // ranks, "one_shot"),
            (512 * 1024, "recursive_doubling"),
            (1152 * 1024, "two_shot_packets"),
        )
    else:
        limits = ((512 * 1024 // ranks, "one_shot"), (1152 * 1024, "two_shot_packets"))
    return SizeTable(limits, "two_shot")


def sending_no_sums(algorithm: str, ranks: int) -> str:
    """What takes the place of an algorithm that sends partial sums, for types whose sums are twice as long as they are.

    Those are the 16-bit floats. The others send values as they came, or sums that are rounded.
    """
    if algorithm == "recursive_doubling":
        return "one_shot" if ranks == 2 else "two_shot_packets"
    return "two_shot" if algorithm == "ring" else algorithm


def _sending_no_sums(table: SizeTable, ranks: int) -> SizeTable:
    limits = tuple((limit, sending_no_sums(name, ranks)) for limit, name in table.limits)
    return SizeTable(limits, sending_no_sums(table.beyond, ranks))


register_names(*_KNOWN)
