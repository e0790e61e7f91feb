"""Whether an array library records a call for a backward pass, and by what. The library's face does the recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from proxyccl.channels import array_libraries
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.device.arrays.libraries import libraries

Dispatched = tuple[Any, Any, EPAllToAllLayoutDesc]
"""The rows, their weights or None, and the descriptor."""


class Recorder(Protocol):
    """Makes calls of an `EPAll2AllLayer` and records them. In a backward pass it calls the layer, which is `layer`."""

    def is_recording(self) -> bool:
        """Whether the library records calls now."""
        ...

    def dispatch(self, layer: Any, call: Callable[[], Dispatched], tokens: Any, weights: Any) -> Dispatched:
        """Makes a call that dispatches these tokens and weights, and records it."""
        ...

    def redispatch(self, layer: Any, call: Callable[[], Any], tokens: Any, desc: EPAllToAllLayoutDesc) -> Any:
        """Makes a call that dispatches these tokens by an existing layout, and records it."""
        ...

    def combine(self, layer: Any, call: Callable[[], Any], rows: Any, weights: Any, desc: EPAllToAllLayoutDesc) -> Any:
        """Makes a call that combines these rows by these weights, and records it."""
        ...


def recorder_of(*inputs: Any) -> Recorder | None:
    """The recorder of a call, if one of its inputs requires a gradient and its library records calls; else None."""
    for x in inputs:
        if libraries[type(x)].is_torch and x.requires_grad:
            recorder: Recorder = array_libraries.load("torch: gradients of experts")
            return recorder if recorder.is_recording() else None
    return None
