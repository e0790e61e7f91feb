"""Kernels in Numba for tests, as plain functions to which tests apply ``cuda.jit``; some kernels are only compiled."""

from __future__ import annotations

from typing import Any

from numba import cuda

import proxyccl.numba as pn


def everything(channels: Any, i: Any, nbytes: Any, out: Any) -> None:
    """Calls every function of `proxyccl.numba`; thread 0 pushes five triggers."""
    if cuda.threadIdx.x == 0:
        channel = pn.channel(channels, i)
        pn.put(channel, nbytes, 0, nbytes)
        pn.signal(channel)
        pn.put_with_signal(channel, nbytes, 0, nbytes)
        out[0] = pn.put_with_signal_and_flush(channel, nbytes, 0, nbytes)
        for _ in range(2):
            out[1] += pn.wait(channel)
        while not pn.poll(channel) and not pn.ended(channel):
            pass
        out[2] = pn.flush(channel)


def waits(channel: Any, out: Any) -> None:
    """Waits for a signal, and stores the wait's result."""
    out[0] = pn.wait(channel)
