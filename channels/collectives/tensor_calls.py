"""Collectives of torch's tensors on a GPU, for torch's backend: shapes and types of bytes that move do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.collectives import barrier, transfers
from proxyccl.channels.collectives.all_gather import ALL_GATHER
from proxyccl.channels.collectives.all_reduce import ALL_REDUCE
from proxyccl.channels.collectives.all_to_all import ALL_TO_ALL
from proxyccl.channels.collectives.broadcast import BROADCAST
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reduce import REDUCE
from proxyccl.channels.collectives.reduce_scatter import REDUCE_SCATTER
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.collectives.run import issue, preparing

CallInC = Callable[[Any, Any, tuple[Any, ...], int], bool]
"""call(x, out, options, stream) makes a call on a stream, named by its handle, without Python. It returns False, with
nothing done, if Python must make the call. The caller keeps the tensors until the stream has passed the call."""

_COLLECTIVES = {each.name: each for each in (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, REDUCE_SCATTER)}


class TensorCalls:
    """The calls that torch's backend makes on one communicator.

    Attributes:
        call_kept: makes a call whose form is kept: see `Calls` (_calls.pyi). Raises the collective's errors.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.call_kept: CallInC = collectives.group.launches.calls.call_kept

    def options(
        self, collective: str, op: str | None = None, root: int | None = None, cta_policy: CtaPolicy | None = None
    ) -> tuple[Any, ...]:
        """The options of calls for `make` and `call_kept`.

        Args:
            collective: its name, "barrier" included.
            op: the operator of a reduction.
            root: the rank, where the collective has one.
            cta_policy: as for `Communicator.all_reduce`.
        """
        if collective == "barrier":
            return barrier.options_of(self._collectives, inside=False)
        prepare = preparing(self._collectives, _COLLECTIVES[collective])
        return prepare, op, root, None, cta_policy, False, True, None, None

    def make(self, options: tuple[Any, ...], x: Any, out: Any) -> None:
        """Makes a call on the stream where torch works now. Raises as `Communicator.all_reduce`.

        Args:
            options: of `options`.
            x, out: contiguous tensors; an empty tuple for the result of a reduction that this rank drops.
        """
        issue(self._collectives, x, out, options, None)

    @property
    def overlapped_policy(self) -> CtaPolicy | None:
        """The policy of a long reduction beside which the program computes; None for the communicator's own."""
        efficient = self._collectives.cta_policy == "efficiency"
        return "zero" if efficient and self._collectives.group.topology.node_count == 1 else None

    def reduces_beside(self, wish: bool) -> bool:
        """Whether the next call, a long reduction, gives way to what the program computes, by `overlapped_policy`: as
        the first rank wishes that comes to it. All ranks ask for it."""
        return self.overlapped_policy is not None and self._collectives.group.launches.choose(wish)

    def gathers_beside(self, wish: bool, ptr: int, nbytes: int) -> bool:
        """The same for a gather, whose output lies here. A gather does so in outputs alone that peers' proxies have, as
        a copy of all results would cost more than it saves."""
        collectives = self._collectives
        if self.overlapped_policy is None:
            return False
        if not collectives.has_by_proxy:  # on no rank
            if collectives.group.launches.choose(wish):
                collectives.by_proxy()
            return False
        return collectives.group.launches.choose(wish and collectives.group.lent_memory.is_received_in(ptr, nbytes))

    def exchange(self, x: Any, out: Any, options: tuple[str, Any, Any]) -> bool:
        """Makes transfers on the stream where torch works now, unless Python must look at the tensors. Returns whether
        they were made. Raises as `Communicator.transfers`.

        Args:
            x, out, options: as for `FlowCalls.call` (_calls.pyi).
        """
        return transfers.issue(self._collectives, x, out, options, None)

    @property
    def call_transfers(self) -> CallInC | None:
        """Makes calls of transfers: `FlowCalls.call_borrowed`. None until the ranks have made what transfers need."""
        flows = self._collectives.made_flows
        if flows is None:
            return None
        self._collectives.group.makes_transfers = True
        return flows.calls.call_borrowed
