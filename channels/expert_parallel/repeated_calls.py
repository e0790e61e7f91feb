"""Calls of a layer that were made before with arrays like the caller's: their arguments stay packed.

What differs from call to call is filled in and launched by a few calls into C. Everything else was checked, and the
kernel chosen, when the first call of the kind was made, by `DispatchCall` and `CombineCall`. These also make every call
that does not fit: then the methods here return None, having done nothing.
"""

from __future__ import annotations

from typing import Any

from proxyccl.channels.expert_parallel.combine_call import NO_SUMS, Sums
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.repeated_call import Kinds, kind_of, of_one_library
from proxyccl.channels.expert_parallel.repeated_combine import RepeatedCombine, SentCombine
from proxyccl.channels.expert_parallel.repeated_dispatch import RepeatedDispatch, RepeatedRouting, SentDispatch
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.runtime import StreamLike

_HALVES = "halves"


class RepeatedCalls:
    """The calls that one layer has made.

    Args:
        parts: of the layer.
    """

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._dispatches: dict[Kinds, RepeatedDispatch] = {}
        self._routings: dict[Kinds, RepeatedRouting] = {}
        self._combines: dict[Kinds, RepeatedCombine] = {}

    def dispatch(
        self, input: Any, exp_indices: Any, weight: Any, stream: StreamLike, *, buffered: bool
    ) -> Dispatched | None:
        """Makes a dispatch like one that `keep_dispatch` was told of. Raises as `EPAll2AllLayer.dispatch`."""
        known = self._dispatches.get((buffered, kind_of(input), kind_of(exp_indices), kind_of(weight)))
        return None if known is None else known.repeat(input, exp_indices, weight, stream)

    def dispatch_send(self, input: Any, exp_indices: Any, weight: Any, stream: StreamLike) -> SentDispatch | None:
        """The same for the first half of one."""
        known = self._dispatches.get((_HALVES, kind_of(input), kind_of(exp_indices), kind_of(weight)))
        return None if known is None else known.send(input, exp_indices, weight, stream)

    def keep_dispatch(
        self, input: Any, exp_indices: Any, weight: Any, *, buffered: bool = False, halves: bool = False
    ) -> None:
        """Has calls be repeated that are like one that was made with these arrays, if they can."""
        kinds = kind_of(input), kind_of(exp_indices), kind_of(weight)
        # These take more kernels.
        others = self._parts.surviving is not None or self._parts.options.expert_alignment
        if not others and of_one_library(kinds):
            made = RepeatedDispatch(self._parts, input, exp_indices, weight, halves=halves, buffered=buffered)
            self._dispatches[_HALVES if halves else buffered, *kinds] = made

    def redispatch(self, input: Any, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """Makes a redispatch like one that `keep_redispatch` was told of."""
        known = self._routings.get(kind_of(input))
        return None if known is None else known.repeat(input, desc, stream)

    def keep_redispatch(self, input: Any) -> None:
        """Has `redispatch` repeat calls like one that was made with these tokens, if it can."""
        kind = kind_of(input)
        if of_one_library((kind,)):
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
    ) -> SentCombine | None:
        """Begins a combine like one that `keep_combine` was told of. Raises as `EPAll2AllLayer.combine`."""
        kinds = kind_of(input), kind_of(weights), kind_of(topk_weights), kind_of(out), *_kinds_of_sums(sums)
        known = self._combines.get((halves, *kinds))
        if known is None or not isinstance(desc, EPAllToAllLayoutDesc) or not desc.is_received(self._parts.ctx):
            return None
        return known.start(input, desc, weights, topk_weights, out, stream, sums)

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
        kinds = kind_of(input), kind_of(weights), kind_of(topk_weights), kind_of(out), *_kinds_of_sums(sums)
        # An array of numpy may be read-only, which its kind does not tell.
        if of_one_library(kinds) and (out is None or libraries[type(out)].is_torch):
            made = RepeatedCombine(self._parts, input, weights, topk_weights, sums, halves=halves)
            self._combines[halves, *kinds] = made


def _kinds_of_sums(sums: Sums) -> Kinds:
    return () if sums is NO_SUMS else (kind_of(sums.order_ids), *map(kind_of, sums.added))
