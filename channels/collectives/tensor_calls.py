"""Collectives of torch's tensors on a GPU, for torch's backend: a call that was made before is one call into C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.collectives import barrier
from proxyccl.channels.collectives.call_cache import call_key
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.flows import FlowCall
from proxyccl.channels.collectives.reduce import dropped_result
from proxyccl.channels.collectives.request import CtaPolicy, Request, request

Repeat = Callable[[Any, Any, tuple[Any, ...], int], bool]
"""repeat(x, out, options, stream) issues a call again: see `TensorCalls`."""


class TensorCalls:
    """The calls that torch's backend has made on one communicator.

    Attributes:
        repeat: repeat(x, out, options, stream) issues a call again, given its tensors, its options as for `keep`, and a
            stream's handle. Returns False if the call is not kept or can't be repeated. Raises the collective's errors.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.repeat: Repeat = collectives.group.launches.prepared_calls.repeat

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
        return collectives.group.launches.choose(wish and collectives.lent_memory.is_in_place(ptr, nbytes))

    def keep(
        self,
        options: tuple[Any, ...],
        x: Any,
        out: Any,
        collective: str,
        source: Any,
        target: Any,
        op: str | None,
        root: int | None,
        cta_policy: CtaPolicy | None,
    ) -> None:
        """Has `repeat` issue the latest call with some arrays. The backend has made it on their communicator.

        Where the call would use memory that peers reach, the arrays' memory is lent to them first, from the second call
        on; the first one is not repeated.

        Args:
            options: the call's other arguments, at most six. They are compared by identity.
            x, out: the tensors of torch's call; empty tuples for a barrier.
            collective, source, target, op, root, cta_policy: the communicator's, as that was given them: on the same
                memory, with elements of any type. The target does not count where a reduction's result is dropped.
        """
        group = self._collectives.group
        if collective == "reduce" and root != group.rank:
            target = dropped_result(self._collectives, input_view(group, source, "x"))
        named = self._collectives.unspecified
        if cta_policy is not None:
            named = request(collective, None, cta_policy, False, self._collectives.cta_policy)
        key = (
            barrier.key_of(inside=False)
            if collective == "barrier"
            else call_key((collective, op, root, named.name), source, target)
        )
        if key is not None and self._met(collective, named, source, target):
            self._collectives.call_cache.keep_under(key, x, out, options)

    def _met(self, collective: str, named: Request, source: Any, target: Any) -> bool:
        """Has the array lent that peers store to, or whose values proxies send. Whether that is decided."""
        collectives = self._collectives
        if collective in ("barrier", "reduce"):
            return True
        if collective != "reduce_scatter":
            return collectives.lent_memory.meet(input_view(collectives.group, target, "out"))
        view = input_view(collectives.group, source, "x")  # kernels of other ranks touch neither array
        algorithm = collectives.choose(collective, named, view.dtype, view.nbytes)
        return not collectives.goes_by_schedule(algorithm) or collectives.lent_memory.meet(view)

    @property
    def repeat_transfers(self) -> Repeat:
        """`repeat` for the calls of `keep_transfers`. All ranks make what transfers need when it is first used."""
        return self._collectives.flows().prepared_calls.repeat

    def keep_transfers(self, options: tuple[Any, ...], x: Any, out: Any, call: FlowCall) -> None:
        """Has `repeat_transfers` issue transfers again.

        Args:
            options: as for `keep`.
            x, out: the tensors of torch's call, or tuples of them. The transfers use their memory alone.
            call: the transfers, as `Communicator.transfers` has issued them.
        """
        self._collectives.flows().keep(call, x, out, options)
