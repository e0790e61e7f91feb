"""One channel of a set, chosen in the kernel."""

from __future__ import annotations

import triton.language as tl
from proxyccl.triton.jit import jit
from proxyccl.triton.layout import PROXY_WORDS, SM_WORDS


@jit
def channel(channels, i):
    """Channel number `i` of a set of ProxyChannels or SmChannels, in the order of their peers."""
    if channels.dtype == tl.pointer_type(tl.uint64):
        return channels + i * PROXY_WORDS
    else:  # noqa: RET505  (a branch that Triton drops)
        tl.static_assert(channels.dtype == tl.pointer_type(tl.int64), "expected a set of channels")
        return channels + i * SM_WORDS
