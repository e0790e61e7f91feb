"""One GPU as a process group uses it: torch's current stream there, and a stream of the group's own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from proxyccl.device.gpu import stream_order
from proxyccl.device.runtimes import open_driver
from proxyccl.torch import own_streams
from proxyccl.torch._device_calls import Gpu, QueuedCall
from proxyccl.torch.device_runtimes import runtime_name


class GroupOnGpu:
    """A process group's part on one GPU. Streams are known by their handles: torch's objects take microseconds.

    Args:
        device: the GPU, with its number.
        check: raises the error that ended the group, if it has failed.

    Attributes:
        order: orders streams of the GPU.
        in_c: the same, for the group's calls.
        current: the handle of torch's current stream there.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self.device = device
        self.check = check
        self.order = stream_order.of(open_driver(runtime_name(device)), device.index)
        self.current: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.in_c = Gpu(*self.order.in_c(), self)
        self._lock = threading.Lock()
        self._own: tuple[Any, int] | None = None

    @property
    def own(self) -> int:
        """The handle of the group's own stream, which is made when it is first used."""
        return (self._own or self._take())[1]

    @property
    def own_stream(self) -> Any:
        """The same stream as torch's object."""
        return (self._own or self._take())[0]

    def _take(self) -> tuple[Any, int]:
        with self._lock:
            if self._own is None:
                stream = own_streams.take(self.device)
                self._own = stream, stream.cuda_stream
            return self._own

    def torch_stream(self, handle: int) -> Any:
        """torch's object for a stream of the GPU."""
        if self._own is not None and handle == self._own[1]:
            return self._own[0]
        return torch.cuda.ExternalStream(handle, self.device) if handle else torch.cuda.default_stream(self.device)

    def queued_call(
        self,
        outs: Sequence[torch.Tensor],
        xs: Sequence[torch.Tensor],
        stream: int,
        *,
        keeps: bool,
        blocks: bool = False,
        source: int = -1,
    ) -> QueuedCall:
        """A call on a stream; see `QueuedCall`."""
        return QueuedCall(self.in_c, xs, outs, stream, keeps, blocks, source)

    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None:
        """Has memory of tensors be reused only after the work that a stream has now."""
        stream = self.torch_stream(handle)
        for tensor in tensors:
            tensor.record_stream(stream)

    def give_back(self) -> None:
        """Lets another group use the stream."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own_streams.give_back(self.device, own[0])
