"""The names by which the ranks check that they make the same calls of experts' layers."""

from __future__ import annotations

from proxyccl.channels.segment.calls import register_names

NEW_LAYER = "new_layer"
"""The construction of a layer."""
LAYER_SIZE = "layer_size"
"""An exchange of the ranks before it, of their numbers of tokens."""

FINALIZE = "finalize"
"""The end of a layer. Ranks may end several in different orders."""


def call_name(call: str, *, weights: bool = False, indices: bool = False) -> str:
    """The name of a call with the optional arguments that all ranks must give, or all leave out."""
    return call + (" with weights" if weights else "") + (" by indices" if indices else "")


register_names("redispatch", NEW_LAYER, LAYER_SIZE, FINALIZE)
for _call in ("prepare", "dispatch", "dispatch_send", "combine", "combine_send", "collect"):
    for _weights in (False, True):
        register_names(call_name(_call, weights=_weights), call_name(_call, weights=_weights, indices=True))
