"""Streams that belong to one process group.

torch hands out 32 streams for a device, in turn. Two transfers on one stream wait for each other, and so do ranks that
called them in a different order.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.gpu.streams import GpuStream
from proxyccl.device.runtimes import open_driver
from proxyccl.torch.device_runtimes import runtime_name

_lock = threading.Lock()
_made: list[GpuStream] = []
"""They are never destroyed: torch looks at the streams of a tensor when it reuses the tensor's memory."""
_idle: dict[torch.device, list[Any]] = {}


def take(device: torch.device) -> Any:
    """A stream of a GPU, as torch's, that nobody else uses until `give_back`.

    It has the highest priority: the peers wait for what it runs, and a graph keeps the priority of what was captured.
    """
    with _lock:
        idle = _idle.get(device)
        if idle:
            return idle.pop()
    driver = open_driver(runtime_name(device))
    stream = GpuStream(DeviceContext(driver, device.index), first=True)
    with _lock:
        _made.append(stream)
    return torch.cuda.ExternalStream(stream.handle, device)


def give_back(device: torch.device, stream: Any) -> None:
    """Lets another group use a stream; its work follows the work queued there."""
    with _lock:
        _idle.setdefault(device, []).append(stream)
