"""Chooses each call's algorithm by size. There is a table for each combination of a collective, a class of element
types, and symmetric or ordinary arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.segment.calls import register_names
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message

if TYPE_CHECKING:
    from proxyccl.channels.group import Group

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy", "hierarchical")
"""The algorithms of all_reduce."""
PACKET_ALGORITHMS = frozenset({"one_shot", "recursive_doubling", "two_shot_packets"})
ALGORITHMS_BY_COLLECTIVE: dict[str, tuple[str, ...]] = {
    "all_reduce": ALGORITHMS,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "broadcast"), ("kernels", "proxy")),
}
_KIB, _MIB = 1 << 10, 1 << 20
_KNOWN = frozenset(name for names in ALGORITHMS_BY_COLLECTIVE.values() for name in names)

Algorithm = str | ExecutionPlan
"""An entry of a table: an algorithm of the library by name, or a program's own plan."""

Elements = Literal["16-bit floats", "other types", "all types"]
"""A class of element types. 16-bit floats have a separate class, because their partial sums are sent in float32;
collectives that only move bytes have one class for all types.
"""
_ELEMENTS: dict[str, tuple[Elements, ...]] = {
    collective: ("16-bit floats", "other types") if collective in ("all_reduce", "reduce_scatter") else ("all types",)
    for collective in ALGORITHMS_BY_COLLECTIVE
}


def require_algorithm(name: str, collective: str = "all_reduce") -> None:
    known = ALGORITHMS_BY_COLLECTIVE[collective]
    if name not in known:
        raise ArgumentError("algorithm", f"unknown algorithm {name!r}; expected one of {', '.join(known)}")


def require_collective(name: str) -> str:
    """Returns `name` if the collective of that name has several algorithms. Raises ArgumentError for any other name."""
    if not isinstance(name, str) or name not in _ELEMENTS:
        raise ArgumentError("collective", f"unknown collective {name!r}; expected one of {', '.join(_ELEMENTS)}")
    return name


class Case(Message, frozen=True):
    """The calls that share a table."""

    collective: str
    elements: Elements  # the class of element types
    symmetric: bool  # whether the callers promise symmetric arrays (`Request.symmetric`)

    @classmethod
    def of(cls, collective: str, dtype: DType, *, symmetric: bool) -> Case:
        elements = _ELEMENTS[require_collective(collective)]
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


@dataclass(frozen=True)
class SizeTable:
    """A table of algorithms by message size. Each limit is the most bytes for which its algorithm is used.

    Args:
        limits: pairs of a limit and an algorithm's name or an `ExecutionPlan`. A limit is in bytes of the larger of a
            rank's input and output.
        beyond: the algorithm for larger sizes.

    Raises:
        ArgumentError: no collective has such an algorithm, the limits are not pairs, or their bytes are not integers
            from 0 on in rising order.
    """

    limits: tuple[tuple[int, Algorithm], ...] = ()
    beyond: Algorithm = "two_shot"

    def __post_init__(self) -> None:
        pairs = self.limits if isinstance(self.limits, tuple | list) else (None,)
        if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
            raise ArgumentError("limits", f"must be pairs of bytes and an algorithm, not {self.limits!r}")
        for limit, _ in self.limits:
            as_integer(limit, "limits", "must be numbers of bytes from 0 on", 0)
        for algorithm in self.algorithms:
            if not isinstance(algorithm, ExecutionPlan) and not (isinstance(algorithm, str) and algorithm in _KNOWN):
                known = ", ".join(sorted(_KNOWN))
                raise ArgumentError(
                    "algorithm", f"unknown algorithm {algorithm!r}; expected an ExecutionPlan or one of {known}"
                )
        if any(limit > following for (limit, _), (following, _) in pairwise(self.limits)):
            raise ArgumentError("limits", f"must not fall, as in {[limit for limit, _ in self.limits]}")

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """All algorithms that the table may choose."""
        return (*(algorithm for _, algorithm in self.limits), self.beyond)

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """The execution plans in the table, each once."""
        return tuple(dict.fromkeys(each for each in self.algorithms if isinstance(each, ExecutionPlan)))

    def ranges(self) -> Iterator[tuple[int, int | None, Algorithm]]:
        """Yields a tuple (least bytes, most bytes, algorithm) for each range of sizes; the last range has None as its
        most bytes.
        """
        least = 0
        for limit, algorithm in self.limits:
            yield least, limit, algorithm
            least = limit + 1
        yield least, None, self.beyond

    def choose(self, nbytes: int) -> Algorithm:
        """Returns the algorithm for a message of `nbytes` bytes."""
        for limit, algorithm in self.limits:
            if nbytes <= limit:
                return algorithm
        return self.beyond


@dataclass(frozen=True)
class Selector:
    """The tables of all cases. `Communicator.tune` replaces the defaults by measurements on the machine.

    If a table names an execution plan for a range of sizes, the plan runs those calls that it can execute. The default
    tables choose the algorithm for calls with an operator other than the plan's, or with an array that can't be divided
    into the plan's chunks.

    Raises ArgumentError unless `tables` has exactly one table for each of `CASES`, whose algorithms the case's
    collective supports. Also raises ArgumentError for a plan that can't execute any of the calls that its table assigns
    to it.

    Attributes:
        tables: the table of each case.
    """

    tables: Mapping[Case, SizeTable]

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping):
            raise ArgumentError("tables", f"must be a mapping from cases to tables, not {self.tables!r}")
        for case in {*CASES, *self.tables}:
            if case not in self.tables:
                raise ArgumentError("tables", f"expected one for {case}")
            if case not in CASES:
                raise ArgumentError("tables", f"{case}: there are no such calls")
        for case, table in self.tables.items():
            if not isinstance(table, SizeTable):
                raise ArgumentError("tables", f"{case}: must be a SizeTable, not {table!r}")
            for least, most, algorithm in table.ranges():
                if isinstance(algorithm, ExecutionPlan):
                    _require_plan(algorithm, case, least, most)
                else:
                    require_algorithm(algorithm, case.collective)

    @classmethod
    @functools.cache
    def for_ranks(
        cls, ranks: int, runtime: str, *, levels: bool = False, lines: bool = False, proxied_kernel_bytes: int = 0
    ) -> Selector:
        """Returns the default tables, which choose kernels for all collectives.

        Args:
            ranks: the world size.
            runtime: "host", "cuda" or "hip".
            levels: whether there are several nodes, each with the same number of ranks, at least two.
            lines: whether kernels send long data in lines of 128 bytes (lines.h) instead of 16-byte packets.
            proxied_kernel_bytes: the largest share, in bytes, that kernels move to other nodes; 0 for no limit. Longer
                shares go by proxy, except in an all_reduce with levels.
        """
        longest = proxied_kernel_bytes * ranks
        beyond = "hierarchical" if levels else "proxy" if longest else "two_shot"
        tables = {case: SizeTable((), "kernels") for case in CASES}
        for case in CASES:
            if longest:
                limit = proxied_kernel_bytes if case.collective == "broadcast" else longest
                tables[case] = SizeTable(((limit, "kernels"),), "proxy")
            if case.collective == "all_reduce":
                short = case.elements == "16-bit floats"
                packets = (
                    _by_lines(ranks, symmetric=case.symmetric)
                    if lines
                    else _by_packets(ranks, runtime, symmetric=case.symmetric, short=short)
                )
                # On GPUs an all_reduce through pinned memory sends each share twice, so its limit is half of that of
                # other collectives.
                reduced = longest if runtime == "host" else longest // 2
                limits = {"two_shot": packets, "proxy": ((reduced, "two_shot"),)}.get(beyond, ())
                tables[case] = SizeTable(limits, beyond)
        return cls(tables)

    @functools.cached_property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """All plans of the tables, each once."""
        return tuple(dict.fromkeys(plan for table in self.tables.values() for plan in table.plans))

    def with_table(self, collective: str, table: SizeTable) -> Selector:
        """Returns a copy of this selector with one table for all cases of a collective. Raises ArgumentError for an
        unknown collective.
        """
        require_collective(collective)
        return Selector({case: table if case.collective == collective else old for case, old in self.tables.items()})

    def choose(self, collective: str, dtype: DType, nbytes: int, *, symmetric: bool = False) -> Algorithm:
        """Returns the algorithm of a call.

        Args:
            nbytes: size of the larger of a rank's input and output.
            symmetric: whether the callers promise symmetric arrays.
        """
        return self.tables[Case.of(collective, as_dtype(dtype), symmetric=symmetric)].choose(nbytes)


def sends_through_pinned_memory(group: Group) -> bool:
    """Returns whether kernels send to other nodes through pinned memory; the same on all ranks."""
    return group.runtime.launch_defaults.pinned_kernel_bytes > 0 and group.topology.stages_remote_pairs()


def proxied_kernel_bytes(group: Group) -> int:
    """Returns the longest share, in bytes, that kernels by default move to other nodes through the proxy; 0 if kernels
    move no data to other nodes. All ranks get the same result.
    """
    defaults = group.runtime.launch_defaults
    if defaults.proxied_kernel_bytes > 0 or not sends_through_pinned_memory(group):
        return defaults.proxied_kernel_bytes
    return defaults.pinned_kernel_bytes // max(1, group.world_size - min(map(len, group.topology.node_members())))


def default_selector(group: Group, *, lines: bool = False) -> Selector:
    """Returns the tables that a group uses until tables are measured or set; the same on all ranks.

    Args:
        lines: whether kernels send long data in lines of 128 bytes (lines.h) instead of 16-byte packets.
    """
    topology = group.topology
    return Selector.for_ranks(
        group.world_size,
        group.runtime.name,
        levels=topology.has_levels(),
        lines=lines,
        proxied_kernel_bytes=proxied_kernel_bytes(group) if topology.node_count > 1 else 0,
    )


def _require_plan(plan: ExecutionPlan, case: Case, least: int, most: int | None) -> None:
    plan.require_collective(case.collective, "tables")
    document = plan.document
    if document.max_message_size < least or (most is not None and document.min_message_size > most):
        used = f"{least} bytes and more" if most is None else f"{least} to {most} bytes"
        raise ArgumentError(
            "tables",
            f"{case}: {plan!r} is for {document.min_message_size} to {document.max_message_size} bytes; expected some "
            f"of the {used} that the table gives it",
        )
    if case.elements == "16-bit floats" and document.buffer_alignment % 2:
        raise ArgumentError(
            "tables", f"{case}: {plan!r} cuts at {document.buffer_alignment} bytes, inside of 16-bit floats"
        )


def _by_lines(ranks: int, *, symmetric: bool) -> tuple[tuple[int, str], ...]:
    """Returns the limits for all_reduce within a node if kernels send long data in lines (lines.h). The limits are the
    same for all element types, because these algorithms send no partial sums. The limits come from measurements on 2, 3
    and 4 H200 (benchmarks/results).

    Args:
        symmetric: whether the callers promise symmetric arrays.
    """
    if ranks == 1:
        return ()
    if ranks == 2:
        return (6 * _MIB, "one_shot"), ((8 if symmetric else 12) * _MIB, "two_shot_packets")
    longest = 8 if ranks == 3 else 4 if symmetric else 6
    return (1536 * _KIB // ranks, "one_shot"), (longest * _MIB, "two_shot_packets")


def _by_packets(ranks: int, runtime: str, *, symmetric: bool, short: bool) -> tuple[tuple[int, str], ...]:
    """Returns the sizes up to which the packet algorithms of all_reduce are faster within a node than `two_shot`.

    For GPUs the limits come from measurements on 2 and 4 H200 (benchmarks/results). The data that a one-shot sends
    grows with the number of ranks, so the one-shot's limit shrinks. Recursive doubling needs no extra steps if the
    number of ranks is a power of two. On symmetric memory `two_shot` loads peers' data in place, so packets are faster
    only up to smaller sizes.

    Args:
        symmetric: whether the callers promise symmetric arrays.
        short: whether partial sums are longer than the values, so that no algorithm that sends partial sums is used.
    """
    if runtime == "host" or ranks == 1:  # on the host, packets cost more than the exchange that they save
        return ()
    doubling = ranks & (ranks - 1) == 0 and not short
    if ranks == 2:
        return ((_KIB * (704 if symmetric else 1152), "recursive_doubling" if doubling else "one_shot"),)
    if symmetric:
        one_shot = _KIB * (512 if doubling else 768) // ranks, "one_shot"
        return (one_shot, (384 * _KIB, "recursive_doubling")) if doubling else (one_shot,)
    one_shot, two_shot = (512 * _KIB // ranks, "one_shot"), (896 * _KIB, "two_shot_packets")
    return (one_shot, (512 * _KIB, "recursive_doubling"), two_shot) if doubling else (one_shot, two_shot)


def invariant_algorithms(algorithms: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Returns the all_reduce algorithms that all compute the same bits for an element, at any index of an array of any
    size.

    Within a node these algorithms add in the order of ranks. Between nodes only `hierarchical` qualifies, which adds
    within each node and then in the order of nodes.

    Args:
        algorithms: the algorithms that work between the ranks.
        ranks: the world size.
    """
    if "hierarchical" in algorithms:
        return ("hierarchical",)
    # With more than two ranks, recursive doubling adds sums of pairs of ranks.
    pairs = ("recursive_doubling",) if ranks <= 2 else ()
    return tuple(name for name in algorithms if name in ("one_shot", "two_shot_packets", "two_shot", "proxy", *pairs))


def sending_no_sums(algorithm: str, ranks: int) -> str:
    """Returns `algorithm`, or its replacement if it sends partial sums. Partial sums of 16-bit floats are twice as long
    as the values.
    """
    if algorithm == "recursive_doubling":
        return "one_shot" if ranks == 2 else "two_shot_packets"
    return "two_shot" if algorithm == "ring" else algorithm


register_names(*_KNOWN)
