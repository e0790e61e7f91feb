"""Calls of a layer that were made before with arrays like the caller's: their arguments stay packed.

What differs from call to call is filled in and launched by a few calls into C. Everything else was checked, and the
kernel chosen, when the first call of the kind was made, by `DispatchCall` and `CombineCall`. These also make every call
that does not fit: then the methods here return None, having done nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels._prepared_calls import SentDispatch
from proxyccl.channels.expert_parallel.combine_call import NO_SUMS, Sums
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.repeated_call import Kinds, kind_of, of_one_library
from proxyccl.channels.expert_parallel.repeated_combine import RepeatedCombine, may_repeat_output
from proxyccl.channels.expert_parallel.repeated_dispatch import RepeatedDispatch, RepeatedRouting
from proxyccl.device.runtime import StreamLike

_HALVES = 2  # beside calls whose rows may not, or may, lie in output buffers


class RepeatedCalls:
    """The calls that one layer has made.

    Args:
        parts: of the layer.
    """

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._dispatches: tuple[dict[Kinds, Callable[..., Any]], ...] = ({}, {}, {})
        self._routings: dict[Kinds, RepeatedRouting] = {}
        self._combines: tuple[dict[Kinds, Callable[..., Any]], ...] = ({}, {})
        self._summing: dict[Kinds, Callable[..., Any]] = {}

    def dispatch(
        self, input: Any, exp_indices: Any, weight: Any, stream: StreamLike, *, buffered: bool
    ) -> Dispatched | None:
        """Makes a dispatch like one that `keep_dispatch` was told of. Raises as `EPAll2AllLayer.dispatch`."""
        for repeat in self._dispatches[buffered].values():
            made: Dispatched | None = repeat(input, exp_indices, weight, stream)
            if made is not None:
                return made
        return None

    def dispatch_send(self, input: Any, exp_indices: Any, weight: Any, stream: StreamLike) -> SentDispatch | None:
        """The same for the first half of one."""
        for send in self._dispatches[_HALVES].values():
            sent: SentDispatch | None = send(input, exp_indices, weight, stream)
            if sent is not None:
                return sent
        return None

    def keep_dispatch(
        self, input: Any, exp_indices: Any, weight: Any, *, buffered: bool = False, halves: bool = False
    ) -> None:
        """Has calls be repeated that are like one that was made with these arrays, if they can."""
        kinds = kind_of(input), kind_of(exp_indices), kind_of(weight)
        kept = self._dispatches[_HALVES if halves else buffered]
        # These take more kernels.
        others = self._parts.surviving is not None or self._parts.options.expert_alignment
        if kinds not in kept and not others and of_one_library(kinds):
            made = RepeatedDispatch(self._parts, input, exp_indices, weight, halves=halves, buffered=buffered)
            kept[kinds] = made.send if halves else made.repeat

    def redispatch(self, input: Any, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """Makes a redispatch like one that `keep_redispatch` was told of."""
        for known in self._routings.values():
            made = known.repeat(input, desc, stream)
            if made is not None:
                return made
        return None

    def keep_redispatch(self, input: Any) -> None:
        """Has `redispatch` repeat calls like one that was made with these tokens, if it can."""
        kind = kind_of(input)
        if kind not in self._routings and of_one_library((kind,)):
            self._routings[kind] = RepeatedRouting(self._parts, input)

    def combine(
        self,
        input: Any,
        desc: Any,
        weights: Any,
        topk_weights: Any,
        out: Any,
        stream: StreamLike,
        sums: Sums = NO_SUMS,
        *,
        halves: bool = False,
    ) -> Any:
        """Makes a combine like one that `keep_combine` was told of, or begins it. Raises as `EPAll2AllLayer.combine`.

        Returns:
            The result, or with `halves` a `SentCombine`.
        """
        if sums is NO_SUMS:
            for start in self._combines[halves].values():
                made = start(input, desc, weights, topk_weights, out, stream, None)
                if made is not None:
                    return made
            return None
        summing = self._summing.get(_kinds(input, weights, topk_weights, sums))
        return None if summing is None else summing(input, desc, weights, topk_weights, out, stream, sums)

    def keep_combine(
        self,
        input: Any,
        weights: Any,
        topk_weights: Any,
        out: Any,
        sums: Sums = NO_SUMS,
        *,
        halves: bool = False,
    ) -> None:
        """Has `combine` repeat calls like one that was made with these arrays, if it can."""
        kinds = _kinds(input, weights, topk_weights, sums)
        kept = self._combines[halves] if sums is NO_SUMS else self._summing
        if kinds not in kept and of_one_library(kinds) and may_repeat_output(out):
            kept[kinds] = RepeatedCombine(self._parts, input, weights, topk_weights, sums, halves=halves).start


def _kinds(input: Any, weights: Any, topk_weights: Any, sums: Sums) -> Kinds:
    kinds = kind_of(input), kind_of(weights), kind_of(topk_weights)
    return kinds if sums is NO_SUMS else (*kinds, kind_of(sums.order_ids), *map(kind_of, sums.added))
