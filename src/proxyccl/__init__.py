"""ProxyCCL: host-proxy communication for GPU kernels.

A kernel pushes 128-bit triggers into a ring in pinned host memory. A proxy on the CPU drains the ring and moves the
data. This module holds the public names and nothing else. DESIGN.md describes the packages that define them.
"""

from proxyccl.channels import array_libraries
from proxyccl.channels.collectives.selection import Selector, SizeTable
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.dispatch_combine import DispatchCombine
from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.joining.bootstrap import Bootstrap, MpiBootstrap, ThreadBootstrap
from proxyccl.channels.joining.file_bootstrap import FileBootstrap
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.proxy_channel import ProxyChannel
from proxyccl.channels.sm_channel import SmChannel
from proxyccl.device import open_runtime
from proxyccl.device.arrays.array import Array
from proxyccl.device.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    ClosedError,
    CommunicatorError,
    CompileError,
    ConcurrentCallError,
    ContextLostError,
    ExchangeError,
    ExcludedError,
    HandlerError,
    KernelError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    ProxyCCLError,
    ProxyLostError,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
    TriggerError,
    UntrustedPathError,
    WaitTimeoutError,
)
from proxyccl.device.runtime import Event, Runtime, Stream
from proxyccl.proxy.fabric.options import FabricOptions
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.trigger import Operation, Trigger
from proxyccl.proxy.verbs.devices import RdmaDevice, RdmaGid, RdmaPort, rdma_devices
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.torch_tensors.bootstrap import TorchBootstrap

__version__: str

array_libraries.provide("torch: bootstrap", "proxyccl.torch_tensors.bootstrap")
array_libraries.provide("torch: gradients of experts", "proxyccl.torch_tensors.expert_gradients")
array_libraries.provide("torch: places of outputs", "proxyccl.torch_tensors.places")
array_libraries.provide("torch: pools", "proxyccl.torch_tensors.pools")

MemoryChannel = SmChannel
"""MSCCL++'s name of `SmChannel` since 2025."""
PortChannel = ProxyChannel
"""MSCCL++'s name of `ProxyChannel` since 2025."""

__all__ = [
    "AbortedError",
    "ArgumentError",
    "Array",
    "Bootstrap",
    "CapacityError",
    "ClosedError",
    "Communicator",
    "CommunicatorError",
    "CompileError",
    "ConcurrentCallError",
    "ContextLostError",
    "DispatchCombine",
    "DispatchCombineContext",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "Event",
    "ExchangeError",
    "ExcludedError",
    "ExecutionPlan",
    "FabricOptions",
    "FileBootstrap",
    "HandlerError",
    "KernelError",
    "MemoryChannel",
    "MismatchError",
    "MpiBootstrap",
    "Operation",
    "PeerLostError",
    "PortChannel",
    "ProtocolError",
    "ProxyCCLError",
    "ProxyChannel",
    "ProxyLostError",
    "ProxyService",
    "RdmaDevice",
    "RdmaGid",
    "RdmaOptions",
    "RdmaPort",
    "RegisteredMemory",
    "ResourceError",
    "Runtime",
    "RuntimeUnavailableError",
    "Selector",
    "SizeTable",
    "SmChannel",
    "Stream",
    "ThreadBootstrap",
    "TorchBootstrap",
    "TransportError",
    "Trigger",
    "TriggerError",
    "UntrustedPathError",
    "WaitTimeoutError",
    "open_runtime",
    "rdma_devices",
]


def __getattr__(name: str) -> str:
    """The version, looked up on demand: the lookup takes a sixth of the time of this import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("proxyccl")
