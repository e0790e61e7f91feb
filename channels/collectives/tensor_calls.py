"""Collectives of torch's tensors on a GPU, for torch's backend. The calls ignore the shapes and types of arrays that
are moved but not reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.collectives import transfers
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.moves import ALL_GATHER, ALL_TO_ALL, BROADCAST
from proxyccl.channels.collectives.reductions import ALL_REDUCE, REDUCE, REDUCE_SCATTER
from proxyccl.channels.collectives.request import CTA_POLICIES, CtaPolicy
from proxyccl.channels.collectives.run import issue, options_of_barrier, preparing
from proxyccl.channels.collectives.table import REDUCTIONS_OF_STEPS
from proxyccl.device.errors import ResourceError
from proxyccl.device.process.threads import Thread

CallInC = Callable[[Any, Any, tuple[Any, ...], int], bool]
"""call(x, out, options, stream) makes a collective call in C on the stream with the handle `stream`. Returns False,
without any effect, if Python must make the call. The caller keeps the tensors until the stream has executed the call.
"""

LONG_BYTES = 16 << 20
"""The least size in bytes of a call that proxies make while the program computes. DDP's buckets have 25 MiB or more."""
_COLLECTIVES = {each.name: each for each in (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, REDUCE_SCATTER)}


class TensorCalls:
    """The calls that torch's backend makes on one communicator.

    Attributes:
        call_kept: makes a call that was prepared before: see `Calls` (_calls.pyi). Raises the collective's errors.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._usual: CtaPolicy | None = "efficiency" if collectives.standing.cta_policy is None else None
        self.call_kept: CallInC = collectives.group.launches.calls.call_kept
        self._compiling: Thread | None = None  # the thread of `_has_reductions`

    def options(
        self, collective: str, op: str | None = None, root: int | None = None, cta_policy: CtaPolicy | None = None
    ) -> tuple[Any, ...]:
        """Returns the options of calls for `make` and `call_kept`.

        Args:
            collective: the collective's name, or "barrier".
            op: the operator of a reduction.
            root: the root's rank, if the collective has a root.
            cta_policy: as for `Communicator.all_reduce`; None for "efficiency", unless the communicator has a policy.
        """
        if collective == "barrier":
            return options_of_barrier(self._collectives, inside=False)
        prepare = preparing(self._collectives, _COLLECTIVES[collective])
        return prepare, op, root, None, cta_policy or self._usual, False, True, None, None

    def make(self, options: tuple[Any, ...], x: Any, out: Any) -> None:
        """Makes a call on torch's current stream. Raises as `Communicator.all_reduce`.

        Args:
            options: the result of `options`.
            x, out: contiguous tensors; `out` is an empty tuple if this rank drops the result of a reduction.
        """
        issue(self._collectives, x, out, options, None)

    @property
    def chooses(self) -> bool:
        """Whether the ranks choose a policy for each long call: true if all ranks share a node and the program has
        named no policy.
        """
        group = self._collectives.group
        return self._collectives.standing.cta_policy is None and group.topology.node_count == 1 < group.world_size

    def choose_policy(
        self, collective: str, nbytes: int, *, beside: bool, late: bool, output: Callable[[], int]
    ) -> CtaPolicy:
        """Returns the policy of the next call, the same on all ranks: the first rank to reach the call decides. If
        `chooses` is true, all ranks call this before the same calls.

        The choice may differ from run to run. The choice does not change results: under all policies the reductions add
        in the order of ranks. Kernels on all multiprocessors leave no room for another communicator's kernels, and
        ranks may reach two communicators' calls in different orders. So a policy with kernels on all multiprocessors is
        chosen only if no rank has another communicator on its device.

        Args:
            nbytes: size of the larger of a rank's input and output.
            beside: whether this rank's program is expected to run other kernels during the call.
            late: whether this rank's GPU has not yet finished work that the program queued long before the call. If
                `late` is false, the CPU limits the program's speed, so a call by proxy does not help, because it takes
                more of the CPU's time than a kernel.
            output: a function that returns the output's address.
        """
        log = self._collectives.group.launches.log
        wish: CtaPolicy = "efficiency" if beside or log.shares_device else "default"
        if beside and late and nbytes >= LONG_BYTES and self._may_go_by_proxy(collective, output, nbytes):
            wish = "zero"
        chosen = CTA_POLICIES[log.choose(CTA_POLICIES.index(wish))]
        # All ranks construct their `ByProxy` together. So if this rank has no `ByProxy`, no rank has one, and all ranks
        # execute this branch.
        if chosen == "zero" and collective == "all_gather" and self._collectives.made_by_proxy is None:
            self._collectives.by_proxy()  # makes peers' proxies map the next call's output
            return "efficiency"
        return chosen

    def _may_go_by_proxy(self, collective: str, output: Callable[[], int], nbytes: int) -> bool:
        """Returns whether a call may go by proxy if the program computes during the call. The result is False while the
        proxies' process starts, then while threads connect this rank to its proxy and compile the kernels of reductions
        by proxy, and if the algorithms' tables were measured or set. A gather goes by proxy only if peers' proxies can
        access its output, because otherwise all results would be copied, which costs more than the proxy saves.
        """
        collectives = self._collectives
        if collectives.selector is not collectives.defaults:
            return False
        if collectives.made_by_proxy is None:
            try:
                are_ready = self._has_reductions(), collectives.group.links.connect_early()  # starts both threads
            except ResourceError:  # no thread can start now; the peers may make this call
                return False
            if not all(are_ready):
                return False
        if collective == "all_gather":
            lent = collectives.group.lent_memory
            return collectives.made_by_proxy is None or lent.is_received_in(output(), nbytes)
        return collective == "all_reduce"

    def _has_reductions(self) -> bool:
        """Returns whether the kernels of reductions by proxy are compiled. On the first call, starts a thread that
        compiles them, which takes a second if they are not in the cache.
        """
        if self._compiling is None:
            compile_kernels = self._collectives.group.runtime.compile_early
            thread = Thread(compile_kernels, "proxyccl-reductions", REDUCTIONS_OF_STEPS)
            thread.start()
            self._compiling = thread
        return not self._compiling.is_alive()

    def exchange(self, x: Any, out: Any, options: tuple[str, Any, Any]) -> bool:
        """Makes transfers on torch's current stream. Returns False, without any effect, if Python must check the
        tensors first. Raises as `Communicator.transfers`.

        Args:
            x, out, options: as for `FlowCalls.call` (_calls.pyi).
        """
        return transfers.issue(self._collectives, x, out, options, None)

    @property
    def call_transfers(self) -> CallInC | None:
        """`FlowCalls.call_borrowed`, which makes calls of transfers; None until the ranks have set up transfers."""
        flows = self._collectives.made_flows
        if flows is None:
            return None
        self._collectives.group.vain_waits.makes_transfers = True
        return flows.calls.call_borrowed
