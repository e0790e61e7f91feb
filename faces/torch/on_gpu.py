"""The runtimes and streams of a rank's GPUs, which process groups share or own, and the state of one group on a GPU.

torch hands out its 32 streams of a device in turn, so two callers may get the same stream. Two transfers on one stream
run in order, and ranks that issue them in different orders would deadlock. So each group and each flow has its own
stream.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from proxyccl.channels.collectives.flows import load_kernel
from proxyccl.channels.collectives.table import KERNELS_OF_STEPS
from proxyccl.device.build.ahead_of_time import compile_kernels
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.gpu.streams import GpuStream
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_driver, open_runtime
from proxyccl.torch._device_calls import Gpu

_logger = logging.getLogger("proxyccl.torch")
_lock = threading.Lock()
_streams: list[GpuStream] = []
"""Free streams. A stream is never destroyed, because torch queries a tensor's streams when it reuses the tensor's
memory.
"""
_idle: dict[torch.device, list[Any]] = {}


def runtime_name(device: torch.device) -> str:
    return "host" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


def compile_early(rank: int, world_size: int) -> None:
    """Starts to compile, in the background, the kernels that the program will most likely need and the cache lacks: a
    kernel takes a second. Does nothing for one rank, or if the program has not used a GPU so far.

    Ranks begin with different kernels, because ranks of a host that compile the same kernel wait for each other.
    """
    if world_size == 1 or not torch.cuda.is_initialized():
        return
    first = rank * len(KERNELS_OF_STEPS) // world_size
    kernels = (*KERNELS_OF_STEPS[first:], *KERNELS_OF_STEPS[:first])
    device = torch.device("cuda", torch.cuda.current_device())

    def run() -> None:
        try:
            driver = open_driver(runtime_name(device))
            compile_kernels(driver.compiler, driver.device(device.index).architecture, kernels, threads=1)
        except ProxyCCLError as error:
            _logger.info("kernels are compiled when calls need them: %s", error)

    Thread(run, "proxyccl-torch-kernels").start()


class DeviceRuntimes:
    """The runtimes of a rank, which its communicators share, so that each kernel is loaded once.

    A driver may load a kernel only when nothing runs on the device. So the kernel of transfers is loaded with the
    runtime: a later load could wait for a running kernel, which waits for a peer, which in turn waits for the transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, Runtime] = {}

    def of(self, device: torch.device) -> Runtime | str:
        """The runtime of a GPU. For a CPU, returns the runtime's name: each communicator opens its own runtime, because
        its close waits for all work of the runtime.

        Raises as `open_runtime`.
        """
        if device.type == "cpu":
            return runtime_name(device)
        with self._lock:
            if device not in self._made:
                runtime = open_runtime(runtime_name(device), device.index)
                load_kernel(runtime)
                self._made[device] = runtime
            return self._made[device]


def take_stream(device: torch.device) -> Any:
    """Leases a torch stream of a GPU that nobody else uses until `give_back_stream`. The stream has the highest
    priority, because peers wait for its work; a graph keeps the priority of the captured stream.
    """
    with _lock:
        idle = _idle.get(device)
        if idle:
            return idle.pop()
    stream = GpuStream(DeviceContext(open_driver(runtime_name(device)), device.index), first=True)
    with _lock:
        _streams.append(stream)
    return torch.cuda.ExternalStream(stream.handle, device)


def give_back_stream(device: torch.device, stream: Any) -> None:
    """Returns a leased stream. The next user's work follows the work queued on it."""
    with _lock:
        _idle.setdefault(device, []).append(stream)


class GroupOnGpu:
    """The state of a process group on one GPU. Streams are passed as handles, because torch's stream objects cost
    microseconds.

    Attributes:
        check: raises the error that ended the group, if it has failed.
        order: makes one stream of the GPU wait for another.
        in_c: makes streams wait for each other in C, for the group's calls.
        current: returns the handle of torch's current stream on the GPU.
        own, own_stream: the group's own stream, as a handle and as torch's object.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self.device = device
        self.check = check
        self.order = stream_order.of(open_driver(runtime_name(device)), device.index)
        self.current: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.in_c = Gpu(*self.order.in_c(), self)
        self.own_stream = take_stream(device)
        self.own: int = self.own_stream.cuda_stream

    def torch_stream(self, handle: int) -> Any:
        """torch's object for a stream of the GPU."""
        if handle == self.own:
            return self.own_stream
        return torch.cuda.ExternalStream(handle, self.device) if handle else torch.cuda.default_stream(self.device)

    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None:
        """Tells torch's allocator to reuse the tensors' memory only after the work queued on a stream."""
        stream = self.torch_stream(handle)
        for tensor in tensors:
            tensor.record_stream(stream)


class GroupOnGpus:
    """The state of a process group on each GPU, and the stream of each flow. Both are made when first used."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._made: dict[torch.device, GroupOnGpu] = {}
        self._streams: dict[tuple[torch.device, Any], Any] = {}

    def of(self, device: torch.device) -> GroupOnGpu:
        with self._lock:
            if device not in self._made:
                self._made[device] = GroupOnGpu(device, self._check)
            return self._made[device]

    def stream_of(self, device: torch.device, flow: Any) -> Any:
        with self._lock:
            if (device, flow) not in self._streams:
                self._streams[device, flow] = take_stream(device)
            return self._streams[device, flow]

    def close(self) -> None:
        """Returns the streams, so that other groups can use them."""
        while self._streams:
            (device, _), stream = self._streams.popitem()
            give_back_stream(device, stream)
        while self._made:
            device, gpu = self._made.popitem()
            give_back_stream(device, gpu.own_stream)
