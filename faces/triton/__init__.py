"""Kernels in Triton: ``import proxyccl.triton as pt``.

A ``@triton.jit`` function calls the functions of this module to use ProxyChannels and SmChannels. `compile` makes a
kernel from such a function, for NVIDIA, for AMD, or for the host runtime, where Triton's interpreter runs the kernel.
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
