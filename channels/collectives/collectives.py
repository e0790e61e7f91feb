"""The state that the collectives of a communicator share: teams, the call cache, and the choice of algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.calls._calls import Form
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives import tuned
from proxyccl.channels.collectives.by_proxy import ByProxy
from proxyccl.channels.collectives.flows import Flows
from proxyccl.channels.collectives.packet_team import MAX_RANKS, carries_whole_lines
from proxyccl.channels.collectives.request import Request, Standing
from proxyccl.channels.collectives.selection import (
    ALGORITHMS_BY_COLLECTIVE,
    PACKET_ALGORITHMS,
    Selector,
    default_selector,
    invariant_algorithms,
    proxied_kernel_bytes,
    sending_no_sums,
)
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.execution_plans.executor import ExecutionPlans
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Memory
from proxyccl.proxy.codec import Codec, Message


class _Start(Message, frozen=True):
    """The message that each rank sends to all other ranks before the first collective."""

    standing: Standing  # the rank's settings for all calls
    reaches_all: bool  # whether the rank's kernels reach all ranks' memory
    whole_lines: bool  # whether the rank's links carry lines of 128 bytes in one piece
    tables: tuple[tuned.TableOfCase, ...] = ()  # the measured tables of rank 0, if there are any; empty on other ranks


WIDE_PARTS_BYTES = 64 << 20
_NEEDS = {"hierarchical": "several nodes with equally many ranks, at least two"}
_NEEDS_VARIANT = "invariant=False, because its order of additions differs from the communicator's"
_START = Codec(_Start, 1 << 20, "start of collectives")


class Collectives:
    """The state that the collectives of one group share.

    Attributes:
        group: the ranks.
        defaults: the tables used until tables are measured or set; the same on all ranks.
        execution_plans: the executor of MSCCL++'s plans.
        on_host: whether the runtime is the host's.
        preparing: maps each collective to the function that prepares its calls.
        call: makes a call: see `Calls` (_calls.pyi).
        standing: the settings for all calls.
        made_by_proxy, made_flows: the results of `by_proxy` and `flows`; None until the ranks have made them.
    """

    def __init__(self, group: Group, standing: Standing) -> None:
        self.group = group
        self.on_host = group.runtime.name == "host"
        self._calls = group.launches.calls
        self.call = self._calls.call
        self.preparing: dict[Any, Callable[..., Form]] = {}
        self.execution_plans = ExecutionPlans(group, self._calls.clear)
        self.standing = standing
        self._team: Team | None = None
        self._levels: tuple[Team, Team] | None = None
        self.made_by_proxy: ByProxy | None = None
        self.made_flows: Flows | None = None
        self._scratch: list[Memory] = []  # the last item is the largest; prepared calls use the earlier items
        self._wide_parts: Memory | None = None
        self._all_mapped = self._whole_lines = False
        self.defaults = default_selector(group)
        self._selector = self.defaults
        group.keep(self)

    def start(self) -> None:
        """Compares the ranks' settings and links, and adopts rank 0's measured tables if rank 0 has any. All ranks call
        this together.

        Raises:
            ArgumentError: the settings differ, or the policy contradicts an invariant communicator.
        """
        found = tuned.load(self.group) if self.group.rank == 0 else None
        reaches_all = self.group.topology.all_accessible()
        whole_lines = reaches_all and carries_whole_lines(self.group)
        own = _Start(self.standing, reaches_all, whole_lines, () if found is None else tuned.rows_of(found))
        starts = self.group.exchange.all_gather(own, _START, "collectives")
        for rank, other in enumerate(starts):
            for name in Standing.__struct_fields__:
                first, its = getattr(starts[0].standing, name), getattr(other.standing, name)
                if its != first:
                    raise ArgumentError(
                        name, f"must be the same on all ranks; rank 0 has {first!r}, rank {rank} {its!r}"
                    )
        if self.standing.cta_policy == "zero" and "proxy" not in self.algorithms():
            raise ArgumentError("cta_policy", f"'zero' needs {_NEEDS_VARIANT}; expected another policy")
        reach = [start.reaches_all for start in starts]
        if self.standing.cta_policy == "zero" or self.group.topology.node_count > 1 or not all(reach):
            self.group.links.start_early()
        self._all_mapped = Team.all_mapped_of(self.group.world_size, reach)
        self._whole_lines = all(start.whole_lines for start in starts)
        self._selector = self.defaults = default_selector(self.group, lines=self._whole_lines)
        if starts[0].tables:
            self.selector = tuned.selector_of(starts[0].tables)

    def team(self) -> Team:
        """Returns the team of all ranks. On first use, all ranks construct the team together."""
        if self._team is None:
            with self.group.exchange.telling():
                self._team = Team(self.group, whole_lines=self._whole_lines)
        return self._team

    def by_proxy(self) -> ByProxy:
        """Returns this rank's `ByProxy`. On first use, all ranks construct a `ByProxy` together."""
        if self.made_by_proxy is None:
            with self.group.exchange.telling():
                self.made_by_proxy = ByProxy(self.group)
        return self.made_by_proxy

    def levels(self) -> tuple[Team, Team]:
        """Returns two teams of this rank: the ranks of its node, and the ranks with the same local rank on all nodes.
        All ranks make these teams together on first use.
        """
        if self._levels is None:
            topology = self.group.topology
            across = [members[topology.local_rank] for members in topology.node_members()]
            inside = topology.node_ranks
            with self.group.exchange.telling():
                self._levels = Team(self.group, members=inside), Team(self.group, members=across)
        return self._levels

    def flows(self) -> Flows:
        """Returns this rank's `Flows`. On first use, all ranks construct a `Flows` together."""
        if self.made_flows is None:
            with self.group.exchange.telling():
                self.made_flows = Flows(self.group, whole_lines=self._whole_lines)
        return self.made_flows

    def scratch(self, nbytes: int) -> Memory:
        """Returns scratch memory of at least `nbytes` bytes, which this rank's next collective may overwrite. The
        memory lives until `close`, because prepared calls and captured graphs hold its address.
        """
        if not self._scratch or self._scratch[-1].nbytes < nbytes:
            least = 2 * self._scratch[-1].nbytes if self._scratch else 1  # limits the total to twice the largest
            self._scratch.append(self.group.device_memory.allocate(max(nbytes, least), "scratch"))
        return self._scratch[-1]

    def wide_parts(self) -> Memory:
        """Returns WIDE_PARTS_BYTES bytes of memory for an all_reduce that computes in a wider type. The next all_reduce
        in a wider type overwrites the memory.
        """
        if self._wide_parts is None:
            self._wide_parts = self.group.device_memory.allocate(WIDE_PARTS_BYTES, "scratch")
        return self._wide_parts

    def algorithms(self, collective: str = "all_reduce") -> tuple[str, ...]:
        """Returns those algorithms of a collective that work between these ranks. On an invariant communicator, all
        returned algorithms add in the same order.
        """
        names = self._working(collective)
        if collective == "all_reduce" and self.standing.invariant:
            return invariant_algorithms(names, self.group.world_size)
        return names

    def _working(self, collective: str) -> tuple[str, ...]:
        works = {"kernels": self._kernels_reach_all(), "hierarchical": self.group.topology.has_levels()}
        packets = self._all_mapped and self.group.world_size <= MAX_RANKS
        works.update(dict.fromkeys(PACKET_ALGORITHMS, packets))
        return tuple(name for name in ALGORITHMS_BY_COLLECTIVE[collective] if works.get(name, True))

    def prepare_form(
        self,
        call: CollectiveCall,
        views: tuple[ArrayView, ...],
        launch: Callable[[], Launchable],
        *,
        logged: bool,
        ranges: tuple[tuple[int, int], ...] = (),
        lent: Callable[[Launchable], int] = lambda _: -1,
    ) -> Form:
        """Compares a call with the other ranks' calls, and returns the prepared call.

        Args:
            call: the fields on which the ranks must agree.
            views: the call's arrays.
            launch: makes the launchable; called only if the call has elements.
            logged: whether the call has already been compared with the other ranks' calls.
            ranges: as for `Launches.form`.
            lent: a function that takes the launchable and returns the argument `lent` of `Launches.form`.
        """
        launches = self.group.launches
        fields = call.encode() if logged else launches.agree(call)
        if call.count == 0:
            return launches.form(fields, None)
        self.group.symmetric.update()
        with self.group.exchange.telling():
            launchable = launch()
        for view in views:
            self.group.runtime.expect_reuse(view.ptr, view.nbytes)
        return launches.form(fields, launchable, views, ranges, lent(launchable))

    def choose(self, collective: str, request: Request, dtype: DType, nbytes: int) -> str:
        """Returns the algorithm for a call; the same on all ranks if their calls are the same.

        Args:
            nbytes: size of the larger of a rank's input and output.

        Raises:
            ArgumentError: the named algorithm, or "proxy" under the policy "zero", does not work between these ranks,
                or has an order of additions that an invariant communicator does not use.
        """
        works, named = self.algorithms(collective), request.algorithm
        if named is not None:
            if named not in works:
                needs = _NEEDS.get(named, "every rank's memory mapped, and some is not")
                if named in self._working(collective):
                    needs = _NEEDS_VARIANT
                raise ArgumentError("algorithm", f"{named} needs {needs}; expected one of {', '.join(works)}")
            return named
        if request.cta_policy == "zero":
            if "proxy" not in works:
                raise ArgumentError("cta_policy", f"'zero' needs {_NEEDS_VARIANT}; expected another policy")
            return "proxy"
        chosen = self._selector.choose(collective, dtype, nbytes, symmetric=request.symmetric)
        if isinstance(chosen, ExecutionPlan):  # the plan can't execute this call
            chosen = self.defaults.choose(collective, dtype, nbytes, symmetric=request.symmetric)
        assert isinstance(chosen, str)
        if not self.standing.invariant or chosen in works:
            return chosen
        return works[0] if works == ("hierarchical",) else sending_no_sums(chosen, self.group.world_size)

    def execution_plan(
        self, collective: str, request: Request, source: ArrayView, target: ArrayView, op: str | None = None
    ) -> ExecutionPlan | None:
        """Returns the execution plan that the tables name for a call; None if `choose` gives the algorithm. The result
        is the same on all ranks if their calls are the same.

        Args:
            source, target: input and output.
            op: the operator, if the call reduces.
        """
        if not self._selector.plans or request.algorithm is not None or request.cta_policy == "zero":
            return None
        nbytes = max(source.nbytes, target.nbytes)
        chosen = self._selector.choose(collective, source.dtype, nbytes, symmetric=request.symmetric)
        if isinstance(chosen, str) or chosen.refusal(source.size, target.size, source.dtype, op) is not None:
            return None
        return chosen

    def refuse_plan_that_adds(self, plan: ExecutionPlan, argument: str) -> None:
        """Raises ArgumentError for `argument` if the plan reduces and the communicator is invariant."""
        if self.standing.invariant and plan.reduces:
            reason = "an invariant communicator expected the library's algorithms, because a plan has its own order"
            raise ArgumentError(argument, f"{plan!r} reduces; {reason} of additions")

    def goes_by_schedule(self, algorithm: str) -> bool:
        """Returns whether proxies move a call's data without a kernel: the algorithm is "proxy", or a peer is not
        mapped and kernels don't send through the proxy.
        """
        return algorithm == "proxy" or not self._kernels_reach_all()

    def _kernels_reach_all(self) -> bool:
        """Returns whether kernels move data to every peer: directly, or through the proxy to a peer that is not
        mapped.
        """
        return self._all_mapped or proxied_kernel_bytes(self.group) > 0

    @property
    def selector(self) -> Selector:
        """The tables that choose each call's algorithm; the same on all ranks.

        The setter raises ArgumentError if the value is not a `Selector`, or has an execution plan that these ranks
        can't execute, or that reduces while this communicator is invariant.
        """
        return self._selector

    @selector.setter
    def selector(self, selector: Selector) -> None:
        if not isinstance(selector, Selector):
            raise ArgumentError("selector", f"must be a Selector, not {type(selector).__name__}")
        for plan in selector.plans:
            self.execution_plans.require_executable(plan)
            self.refuse_plan_that_adds(plan, "selector")
        self._selector = selector
        self._calls.clear()  # prepared calls use the old tables' algorithms

    def close(self) -> None:
        """Frees the kernels' memory. All kernels of all ranks must have completed."""
        self._calls.clear()
        for part in (self._team, *(self._levels or ()), self.made_flows, self.made_by_proxy):
            if part is not None:
                part.close()
        self._scratch.clear()
        self._team = self._levels = self.made_flows = self.made_by_proxy = self._wide_parts = None
