"""The public calls of a communicator for collectives, execution plans, and transfers between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.collectives.collective import EXECUTE
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.moves import ALL_GATHER, ALL_TO_ALL, BROADCAST
from proxyccl.channels.collectives.norms import NormCalls
from proxyccl.channels.collectives.reductions import ALL_REDUCE, DROPPED, REDUCE, REDUCE_SCATTER
from proxyccl.channels.collectives.run import barrier, run
from proxyccl.channels.collectives.selection import Selector
from proxyccl.channels.collectives.transfers import TransferCalls
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.ranks import as_rank
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.runtime import StreamLike


class CollectiveCalls(NormCalls, TransferCalls):
    """The base class of `Communicator`, with the methods for collectives, plans and transfers."""

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks; every rank gets the same bits. A NaN in the result has no sign and no payload.

        An execution plan may combine the values in a different order on each rank, so that bits differ between ranks.

        Args:
            x: a contiguous array of float16, bfloat16, float32, float64, or signed or unsigned integers of 8 to 64
                bits; of the same number and type of elements on all ranks, but of any shape.
            op: "sum", "prod", "min", "max" or "avg"; of integers also "band", "bor" and "bxor", which combine bits.
                16-bit floats are accumulated in float32, also between nodes, so only the result must be in their range.
                Integers wrap around; their average truncates.
            out: where the result goes; None for in place.
            algorithm: "one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring" or "proxy"; across nodes
                with equal numbers of ranks also "hierarchical". With None, the library chooses by size and element
                type. An `ExecutionPlan` for this collective and operator is also accepted.
            cta_policy: "zero" leaves the multiprocessors to the program: the proxies move the data, and only a
                reduction runs a kernel, with few blocks. "efficiency" limits kernels to few blocks, whatever the
                algorithm. "default" chooses from all algorithms. With None, the communicator's policy applies. All
                ranks pass the same policy.
            symmetric: promises that the arrays of all ranks are symmetric memory (`empty`, `register`), so that faster
                algorithms may be chosen; results are correct even if some arrays are not. All ranks pass the same
                promise.
            stream: where to queue the call: a stream of any library, or its handle, which must live until the next
                call that no graph captures. With None, the call on the host runtime returns when it is complete; on a
                GPU it is queued on the current stream of the library that owns `x` (torch, CuPy), else on the calling
                thread's default stream. While the thread captures a graph, the stream must be one that is captured.

        Returns:
            `out`, or `x`.

        Raises:
            ArgumentError: an argument is wrong on this rank. The call had no effect.
            MismatchError: ranks called with different arguments.
            CommunicatorError: a peer failed; see its subclasses.
        """
        return run(self._collectives, ALL_REDUCE, x, out, op, None, algorithm, cta_policy, symmetric, stream)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks and gives each rank one share of the result.

        Args:
            x: shape [world_size * n, …], the same on all ranks; this rank gets the reduction of rows rank * n to
                (rank + 1) * n.
            op: as for `all_reduce`.
            out: shape [n, …]; None for a new array.
            algorithm: "kernels", "proxy" to have the proxies move the data, or an `ExecutionPlan`; None chooses.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises the errors of `all_reduce`.
        """
        return run(self._collectives, REDUCE_SCATTER, x, out, op, None, algorithm, cta_policy, symmetric, stream)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Concatenates `x` of all ranks along the first dimension, in rank order.

        Args:
            x: shape [n, …], the same on all ranks; any element type.
            out: shape [world_size * n, …]; None for a new array. `x` may be this rank's rows of `out`.
            algorithm: "kernels", "proxy" to have the proxies move the data, or an `ExecutionPlan`; None chooses.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises the errors of `all_reduce`.
        """
        return run(self._collectives, ALL_GATHER, x, out, None, None, algorithm, cta_policy, symmetric, stream)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | ExecutionPlan | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Sends the i-th share of `x` to rank i, and receives rank i's share as the i-th share of the result.

        Args:
            x: shape [world_size * n, …], the same on all ranks; any element type.
            out: an array of the same shape, which may be `x`; None for a new array.
            algorithm: "kernels", "proxy" to have the proxies move the data, or an `ExecutionPlan`; None chooses.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or the new array. Raises the errors of `all_reduce`.
        """
        return run(self._collectives, ALL_TO_ALL, x, out, None, None, algorithm, cta_policy, symmetric, stream)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        cta_policy: str | None = None,
        symmetric: bool = False,
        stream: StreamLike = None,
    ) -> Any:
        """Copies `x` of rank `root` to all ranks.

        Args:
            x: the same shape and type on all ranks.
            root: the rank whose values all ranks get.
            out: where the values go; None for in place.
            algorithm: "kernels", or "proxy" to have the proxies move the data; None chooses.
            cta_policy, symmetric, stream: as for `all_reduce`.

        Returns:
            `out`, or `x`. Raises the errors of `all_reduce`.
        """
        return run(self._collectives, BROADCAST, x, out, None, root, algorithm, cta_policy, symmetric, stream)

    def reduce(
        self,
        x: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        stream: StreamLike = None,
    ) -> Any:
        """Reduces `x` over all ranks; rank `root` gets the result. The call costs as much as `all_reduce`.

        Args:
            x: as for `all_reduce`; it is not changed on ranks other than `root`.
            op: as for `all_reduce`.
            root: the rank that gets the result.
            out: where the result goes, only on `root`; None for in place.
            algorithm: as for `all_reduce`.
            stream: as for `all_reduce`.

        Returns:
            On `root`, `out` if given, else `x`; None on other ranks. Raises the errors of `all_reduce`.
        """
        root = as_rank(self._group.world_size, root, "root")
        if self._group.rank == root:
            if isinstance(out, tuple):
                input_view(self._group, out, "out")  # refuses (), which `run` would take for DROPPED
            return run(self._collectives, REDUCE, x, out, op, root, algorithm, stream=stream)
        run(self._collectives, REDUCE, x, DROPPED, op, root, algorithm, stream=stream)
        return None

    # -- programs of collectives ---

    def execute(self, plan: Any, x: Any, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Executes a plan that MSCCL++'s DSL has written. All ranks call this together, with the same plan.

        The first execution, and each execution of a larger size than all before, makes channels and scratch memory, and
        waits for all ranks. A graph can capture a call only after the same call was executed once.

        Args:
            plan: an `ExecutionPlan`, or an argument of `ExecutionPlan.load`. Load a plan once if you use it often.
            x: the input: a contiguous array of `input_chunks` equal chunks, whose sizes in bytes are multiples of the
                plan's alignment; the same count and type on all ranks. A plan that reduces takes the element types of
                `all_reduce`; other plans take any. If a plan lets peers access the input or the output, the call copies
                this array to or from memory that peers can access. There is no copy if all ranks pass results of
                `register`.
            out: the output, an array of `output_chunks` chunks, each as large as a chunk of `x`. None means `x` if the
                plan works in place and `x` has the output's size, else a new array. A plan that works in place also
                accepts an array other than `x`.
            stream: as for `all_reduce`.

        Returns:
            `out`, or the array that holds the result.

        Raises:
            ArgumentError: the plan can't be executed, or an array does not fit the plan. The call had no effect.
            MismatchError: ranks execute different plans, or pass arrays of different sizes or types.
            CommunicatorError: a rank failed; see its subclasses. After a time-out, the error names the threadblock, the
                operation, and the rank that this operation waits for.
        """
        return run(self._collectives, EXECUTE, x, out, algorithm=ExecutionPlan.load(plan), stream=stream)

    # -- transfers between pairs of ranks ---

    def barrier(self, *, stream: StreamLike = None) -> None:
        """Waits, on the stream, until all ranks have made this call. Raises the errors of `all_reduce`."""
        barrier(self._collectives, stream)

    @property
    def collectives(self) -> Collectives:
        """The state that collectives share: teams, and the `selector` that chooses algorithms."""
        return self._collectives

    def tune(
        self, sizes: Sequence[int] | None = None, iterations: int = 5, *, seconds: float = 10.0, save: bool = True
    ) -> Selector:
        """Measures the algorithms of all collectives, and uses the fastest for each kind of call from then on.

        The call measures the algorithms of kernels and of proxies, on symmetric and on ordinary arrays, and in float32
        and bfloat16 if the element type matters. The call also measures the execution plans in the current tables, at
        the sizes that each plan takes. All ranks call this together, with the same arguments, while nothing else runs.

        Args:
            sizes: array sizes in bytes, in rising order; None for 1 KiB to 64 MiB, or to 4 MiB on the host runtime. If
                the last size is smaller than the largest default size, larger arrays keep the default algorithms.
            iterations: calls of each algorithm at each size; algorithms are compared by the median of the slowest
                rank's times.
            seconds: the approximate limit of the total time. When the time is over, the remaining sizes are skipped.
            save: whether rank 0 keeps the tables on disk, next to the compiled kernels. Communicators of the same
                number of ranks on the same kind of machine then start with these tables, until another version of the
                library is installed. `proxyccl info` shows the tables. Saved tables omit execution plans, which a
                program loads itself.

        Returns:
            The tables. To use the tables later, all ranks set ``communicator.collectives.selector = tables``.

        Raises:
            ArgumentError: an argument is wrong.
            CommunicatorError: a peer failed; see its subclasses.
        """
        from proxyccl.channels.collectives import tuned, tuning

        self._group.failure.require_usable()
        save = as_flag(save, "save")
        chosen: Any = tuning.default_sizes(self._group.runtime.name) if sizes is None else sizes
        chosen, iterations, seconds = tuning.checked_arguments(chosen, iterations, seconds)
        measured = tuning.measure(self._collectives, chosen, iterations, seconds)
        selector = tuning.selector_from(self._collectives, measured)
        if save and self._group.rank == 0 and measured and not self._collectives.standing.invariant:
            tuned.keep(self._group, tuning.selector_from(self._collectives, tuning.of_library(measured)))
        self._collectives.selector = selector
        return selector
