"""Launches compiled kernels on a fake GPU runtime, and prints the driver's arguments of each launch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import triton

from proxyccl import ArgumentError, CompileError
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.device.gpu.runtime import GpuRuntime
from proxyccl.triton import TritonKernel
from proxyccl.triton.arguments import Argument
from proxyccl.triton.compiled import compile_kernel, target_of
from support.kernels import triton as kernels


class StandIn(GpuRuntime):
    """A runtime that prints module loads and launches instead of executing them."""

    def __init__(self) -> None:
        self.name, self.device, self.info = "cuda", 0, SimpleNamespace(architecture="sm_90")
        self.in_flight = SimpleNamespace(add=lambda kept, stream, handle: None)
        self.capturing = False

    def stream_handle(self, stream: Any) -> int:
        return 7 if stream is None else stream

    def capture_of(self, stream: int) -> int:
        return self.capturing

    def load_kernel(self, image: bytes, name: str, parameters: Any, shared: int) -> Any:
        print("load", name, image[:4] == b"\x7fELF", parameters, shared)
        return lambda grid, block, *args, stream, shared: print("launch", grid, block, args, stream, shared)


class Array:
    """Eight floats at a device address."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (8,),
            "typestr": "<f4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


runtime = StandIn()
failure = SimpleNamespace(require_usable=lambda: None)
communicator: Any = SimpleNamespace(runtime=runtime, group=SimpleNamespace(failure=failure))
kernel = TritonKernel(communicator, kernels.scale, grid=lambda given: (given["n"] // given["BLOCK"], 2), num_warps=2)
fill = TritonKernel(communicator, kernels.fill, grid=1)
kernel(Array(4096), 64, 2.0, BLOCK=16)
# This launch reuses the first launch's compiled variant.
kernel(Array(8192), 128, 3.0, BLOCK=16, stream=9)
# Neither 4100 nor 65 is a multiple of 16, so another variant is compiled.
kernel(Array(4100), 65, 3.0, BLOCK=16)
for constants in ([1, 2], [1.0, 2.0], [1, 2]):  # the lists are equal, but their elements have different types
    fill(Array(4096), value=constants)
channel = object.__new__(ProxyChannel)
channel.peer, channel.device_pointer = 1, 8192
fill(channel, value=[1, 2])
TritonKernel(communicator, kernels.typed, grid=1)(Array(4096), 1, 2, 3)
cluster, tuned = (
    TritonKernel(communicator, kernels.scale, grid=1, configs=[triton.Config({"BLOCK": 16}, num_ctas=number)])
    for number in (2, 1)
)
for refused, constants in ((cluster, {}), (kernel, {"BLOCK": 32}), (tuned, {})):
    runtime.capturing = refused is not cluster
    try:
        refused(Array(4096), 64, 2.0, **constants)
    except ArgumentError as error:
        print(error)
for wrong, given in (
    (kernels.wrong_kind, {"channel": Argument("*u64", 0)}),
    (kernels.put_half, {"channel": Argument("*u64", 0), "size": Argument("i32", 8)}),
):
    try:
        compile_kernel(wrong, given, target_of("sm_90"), {})
    except CompileError as error:
        print(str(error).splitlines()[0], str(error).splitlines()[-1])
