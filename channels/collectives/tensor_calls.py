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
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.collectives.run import issue, options_of_barrier, preparing

CallInC = Callable[[Any, Any, tuple[Any, ...], int], bool]
"""call(x, out, options, stream) makes a collective call in C on the stream with the handle `stream`. Returns False,
without any effect, if Python must make the call. The caller keeps the tensors until the stream has executed the call.
"""

_COLLECTIVES = {each.name: each for each in (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, REDUCE_SCATTER)}


class TensorCalls:
    """The calls that torch's backend makes on one communicator.

    Attributes:
        call_kept: makes a call that was prepared before: see `Calls` (_calls.pyi). Raises the collective's errors.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        # Unless the program has named a policy, half of the multiprocessors stay free: most programs compute during a
        # call, and kernels of another group may have to run at the same time.
        self._policy: CtaPolicy | None = "efficiency" if collectives.standing.cta_policy is None else None
        self.call_kept: CallInC = collectives.group.launches.calls.call_kept

    def options(self, collective: str, op: str | None = None, root: int | None = None) -> tuple[Any, ...]:
        """Returns the options of calls for `make` and `call_kept`.

        Args:
            collective: the collective's name, or "barrier".
            op: the operator of a reduction.
            root: the root's rank, if the collective has a root.
        """
        if collective == "barrier":
            return options_of_barrier(self._collectives, inside=False)
        prepare = preparing(self._collectives, _COLLECTIVES[collective])
        return prepare, op, root, None, self._policy, False, True, None, None

    def make(self, options: tuple[Any, ...], x: Any, out: Any) -> None:
        """Makes a call on torch's current stream. Raises as `Communicator.all_reduce`.

        Args:
            options: the result of `options`.
            x, out: contiguous tensors; `out` is an empty tuple if this rank drops the result of a reduction.
        """
        issue(self._collectives, x, out, options, None)

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
