"""Holds the runtimes of a rank's GPUs, and the streams of each process group.

torch hands out its 32 streams of a device in turn, so two callers may get the same stream. If two ranks issued
transfers on one stream in different orders, the ranks would deadlock. So each group has its own stream, and so has each
flow (the sends to one peer, or the receives from one peer).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from proxyccl.channels.collectives.table import KERNELS_OF_STEPS, SEND_RECEIVE
from proxyccl.device.build.ahead_of_time import compile_kernels
from proxyccl.device.errors import ProxyCCLError
from proxyccl.device.gpu import stream_order
from proxyccl.device.gpu.context import DeviceContext
from proxyccl.device.gpu.streams import GpuStream
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_driver, open_runtime
from proxyccl.torch._device_calls import Gpu, StreamMark

_logger = logging.getLogger("proxyccl.torch")
_POLL_SECONDS = 2e-4
_SOON_SECONDS = 2e-4
"""How long a wait on the host only yields the CPU between checks before it sleeps. Most calls end within this time."""
_lock = threading.Lock()
_streams: list[GpuStream] = []
"""Free streams. A stream is never destroyed, because torch queries a tensor's streams when it reuses the tensor's
memory.
"""
_idle: dict[torch.device, list[Any]] = {}
_compiling: list[Thread] = []  # the thread that `compile_early` has started


def wait_on_host(has_ended: Callable[[], bool], deadline: float) -> bool:
    """Waits until `has_ended` returns True. Returns False if `deadline`, in seconds of the monotonic clock, has passed
    before.
    """
    soon = time.monotonic() + _SOON_SECONDS
    while not has_ended():
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(0 if now < soon else _POLL_SECONDS)
    return True


def runtime_name(device: torch.device) -> str:
    return "host" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


def compile_early(rank: int, world_size: int) -> None:
    """Starts a thread that compiles kernels that the program will probably need, unless the cache already has them.
    Compiling a kernel takes a second. If the group has one rank, if the program has not used a GPU, or if an earlier
    call has started the thread, does nothing.

    Each rank begins with a different kernel, because ranks of a host wait for each other to compile the same one.
    """
    if world_size == 1 or _compiling or not torch.cuda.is_initialized():
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

    thread = Thread(run, "proxyccl-torch-kernels")
    thread.start()
    _compiling.append(thread)


class DeviceRuntimes:
    """The runtimes of a rank's GPUs. All of the rank's communicators share them, so that each kernel is loaded once.

    A driver may load a kernel only while the device is idle. So the kernel of transfers is loaded when the runtime is
    opened. A later load could deadlock: it might wait for a running kernel, whose peer waits for the transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, Runtime] = {}

    def of(self, device: torch.device) -> Runtime | str:
        """Returns the runtime of a GPU. For a CPU, returns a runtime's name, so that each communicator opens its own
        runtime: closing a communicator waits for all work of the runtime.

        Raises the errors of `open_runtime`.
        """
        if device.type == "cpu":
            return runtime_name(device)
        with self._lock:
            if device not in self._made:
                runtime = open_runtime(runtime_name(device), device.index)
                SEND_RECEIVE.load(runtime)
                self._made[device] = runtime
            return self._made[device]


def take_stream(device: torch.device) -> Any:
    """Returns a torch stream of a GPU for the caller's sole use until `give_back_stream`. The stream has the highest
    priority, because peers wait for its work. A graph that captures the stream keeps this priority.
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
    """Gives back a stream of `take_stream`, on which work may still be queued."""
    with _lock:
        _idle.setdefault(device, []).append(stream)


class GroupOnGpu:
    """The state of a process group on one GPU. Streams are passed as handles, because making one of torch's stream
    objects takes microseconds.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        self.device = device
        self.check = check  # raises the error that ended the group, if it has failed
        self.order = stream_order.of(open_driver(runtime_name(device)), device.index)
        # Returns the handle of torch's current stream on the GPU.
        self.current: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.in_c = Gpu(*self.order.in_c(), self)  # the state that the group's calls in C use
        self.own_stream = take_stream(device)
        self.own: int = self.own_stream.cuda_stream  # the handle of the group's own stream

    def torch_stream(self, handle: int) -> Any:
        """Returns torch's object for the stream with this handle."""
        if handle == self.own:
            return self.own_stream
        return torch.cuda.ExternalStream(handle, self.device) if handle else torch.cuda.default_stream(self.device)

    def call_on(self, handle: int, function: Callable[..., object], *arguments: Any) -> None:
        """Calls a function with this stream as the current stream, in a sixth of the time of `torch.cuda.stream`."""
        stream = self.torch_stream(handle)
        device, current = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self.device.index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            function(*arguments)
        finally:
            torch._C._cuda_setStream(*current)
            if device != self.device.index:  # `_cuda_setStream` has changed the current device
                torch._C._cuda_setDevice(device)

    def record(self, tensors: Sequence[torch.Tensor], handle: int) -> None:
        """Tells torch's allocator to reuse the tensors' memory only after the work queued on a stream."""
        stream = self.torch_stream(handle)
        for tensor in tensors:
            tensor.record_stream(stream)


class GroupOnGpus:
    """The state of a process group on each GPU, and the stream of each flow."""

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

    def marks(self) -> list[StreamMark]:
        """Marks the current stream and the group's own stream on each GPU, unless a graph captures one of the two."""
        with self._lock:
            gpus = [(gpu, (gpu.current(), gpu.own)) for gpu in self._made.values()]
        return [
            gpu.in_c.mark(stream)
            for gpu, streams in gpus
            if not any(map(gpu.order.is_capturing, streams))
            for stream in streams
        ]

    def close(self) -> None:
        """Gives the streams back for use by other groups."""
        while self._streams:
            (device, _), stream = self._streams.popitem()
            give_back_stream(device, stream)
        while self._made:
            device, gpu = self._made.popitem()
            give_back_stream(device, gpu.own_stream)
