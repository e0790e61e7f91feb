"""Kernels in Numba-CUDA: ``import proxyccl.numba as pn``.

A thread of a ``@cuda.jit`` function calls the functions of this module to push triggers, signal and wait over
ProxyChannels. Numba compiles and launches the kernel.
"""

from proxyccl.numba.proxy_channel import (
    address,
    channel,
    ended,
    flush,
    poll,
    put,
    put_with_signal,
    put_with_signal_and_flush,
    signal,
    wait,
)

__all__ = [
    "address",
    "channel",
    "ended",
    "flush",
    "poll",
    "put",
    "put_with_signal",
    "put_with_signal_and_flush",
    "signal",
    "wait",
]
