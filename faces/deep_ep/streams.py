"""The streams of torch's current GPU, by their handles: torch's objects for streams and events take microseconds."""

from __future__ import annotations

import functools

import torch

from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.stream_order import StreamMark, StreamOrder
from proxyccl.device.runtimes import open_driver


@functools.cache
def has_streams() -> bool:
    """Whether torch has GPUs. CPU tensors have no streams."""
    return bool(torch.cuda.is_available())


@functools.cache
def order_of(device: int) -> StreamOrder:
    """Orders the streams of a GPU."""
    return stream_order.of(open_driver("hip" if torch.version.hip else "cuda"), device)


def current_handle(device: int) -> int:
    """The handle of torch's current stream on a GPU."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def mark_current() -> StreamMark:
    """Marks the end of the work queued on the current stream."""
    device = torch.cuda.current_device()
    return order_of(device).mark(current_handle(device))


def hold_current(mark: StreamMark) -> None:
    """Makes later work of the current stream wait for it."""
    mark.hold(current_handle(torch.cuda.current_device()))
