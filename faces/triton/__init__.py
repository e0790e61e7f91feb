"""Kernels in Triton: ``import proxyccl.triton as pt``.

A ``@triton.jit`` function calls the functions of this module: over ProxyChannels it pushes triggers, signals and waits;
over SmChannels it loads from and stores to peers' memory. `compile` makes such a function a kernel that can be
launched, on NVIDIA, on AMD, and on the host runtime, where Triton's interpreter runs it.
"""

from proxyccl.triton.basics import channel
from proxyccl.triton.grid_barrier import GridBarrier, sync_grid
from proxyccl.triton.kernel import TritonKernel, compile
from proxyccl.triton.proxy_channel import (
    ended,
    flush,
    flush_async,
    get,
    is_complete,
    is_flushed,
    poll,
    put,
    put_value,
    put_value_with_signal,
    put_with_signal,
    put_with_signal_and_flush,
    signal,
    wait,
    wait_complete,
    wait_flushed,
    wait_until,
)
from proxyccl.triton.sm_channel import (
    PACKET_BYTES,
    get_packets,
    put_packets,
    remote,
    remote_bytes,
    sm_ended,
    sm_poll,
    sm_relaxed_signal,
    sm_signal,
    sm_wait,
    sm_wait_until,
)
from proxyccl.triton.target import sync_threads_system

__all__ = [
    "PACKET_BYTES",
    "GridBarrier",
    "TritonKernel",
    "channel",
    "compile",
    "ended",
    "flush",
    "flush_async",
    "get",
    "get_packets",
    "is_complete",
    "is_flushed",
    "poll",
    "put",
    "put_packets",
    "put_value",
    "put_value_with_signal",
    "put_with_signal",
    "put_with_signal_and_flush",
    "remote",
    "remote_bytes",
    "signal",
    "sm_ended",
    "sm_poll",
    "sm_relaxed_signal",
    "sm_signal",
    "sm_wait",
    "sm_wait_until",
    "sync_grid",
    "sync_threads_system",
    "wait",
    "wait_complete",
    "wait_flushed",
    "wait_until",
]
