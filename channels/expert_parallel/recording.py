"""Finds out whether an array library records a call for a backward pass. The array library's module in faces/ does the
recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from proxyccl.channels import array_libraries
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import ArgumentError

Dispatched = tuple[Any, Any, EPAllToAllLayoutDesc]
"""The rows, their weights or None, and the descriptor."""


class Recorder(Protocol):
    """Makes and records calls of an `EPAll2AllLayer`. The backward pass calls the same `layer`."""

    def is_recording(self) -> bool: ...
    def dispatch(self, layer: Any, call: Callable[[], Dispatched], tokens: Any, weights: Any) -> Dispatched: ...
    def redispatch(self, layer: Any, call: Callable[[], Any], tokens: Any, desc: EPAllToAllLayoutDesc) -> Any: ...
    def combine(
        self, layer: Any, call: Callable[[], Any], rows: Any, weights: Any, desc: EPAllToAllLayoutDesc
    ) -> Any: ...


def recorder_of_dispatch(options: LayerOptions, *inputs: Any) -> Recorder | None:
    """Returns the recorder of a dispatch; None if the dispatch is not recorded, as with float8 rows. Raises
    ArgumentError if the layout can't be recorded. `recorder_of_combine` does the same for a combine.
    """
    recorder = None if options.quantized else recorder_of(*inputs)
    if recorder is not None and options.layout == "padded":
        raise ArgumentError("input", 'requires a gradient, which is not recorded with layout="padded"')
    return recorder


def recorder_of_combine(options: LayerOptions, input: Any, weights: Any, topk_weights: Any) -> Recorder | None:
    recorder = recorder_of(input, weights, topk_weights)
    if recorder is not None and (topk_weights is not None or options.layout == "padded"):
        refuse_recording("input" if topk_weights is None else "topk_weights")
    return recorder


def recorder_of(*inputs: Any) -> Recorder | None:
    """Returns the recorder of a call, or None unless an input requires a gradient and the input's library records."""
    for x in inputs:
        if x is not None and libraries[type(x)].is_torch and x.requires_grad:
            recorder: Recorder = array_libraries.load("torch: gradients of experts")
            return recorder if recorder.is_recording() else None
    return None


def refuse_recording(argument: str) -> None:
    raise ArgumentError(argument, "can't be given if torch records the call for a backward pass")
