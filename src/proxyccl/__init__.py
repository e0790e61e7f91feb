"""ProxyCCL: host-proxy communication for GPU kernels.

A kernel pushes 128-bit triggers into a ring in pinned host memory. A proxy on the CPU drains the ring and moves the
data. This module holds the public names and nothing else. DESIGN.md describes the packages that define them.

The first use of a name imports its module, so a program loads only the parts that it uses.
"""

from typing import TYPE_CHECKING

from proxyccl.channels import array_libraries

if TYPE_CHECKING:
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
    from proxyccl.channels.proxy_channel import PortChannel, ProxyChannel
    from proxyccl.channels.sm_channel import MemoryChannel, SmChannel
    from proxyccl.channels.window import Window
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
        HandleTypeError,
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
    from proxyccl.device.runtimes import open_runtime
    from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions
    from proxyccl.proxy.service import ProxyService
    from proxyccl.proxy.trigger import Operation, Trigger
    from proxyccl.proxy.verbs.devices import RdmaDevice, RdmaGid, RdmaPort, rdma_devices
    from proxyccl.torch_tensors.bootstrap import TorchBootstrap

__version__: str

array_libraries.provide("torch: bootstrap", "proxyccl.torch_tensors.bootstrap")
array_libraries.provide("torch: gradients of experts", "proxyccl.torch_tensors.expert_gradients")
array_libraries.provide("torch: places of outputs", "proxyccl.torch_tensors.places")
array_libraries.provide("torch: pools", "proxyccl.torch_tensors.pools")
array_libraries.provide("torch: shardings", "proxyccl.torch_tensors.shardings")
array_libraries.provide("torch: untraced", "proxyccl.torch_tensors.untraced")

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
    "HandleTypeError",
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
    "Window",
    "open_runtime",
    "rdma_devices",
]

_NAMES = {
    "proxyccl.channels.collectives.selection": ("Selector", "SizeTable"),
    "proxyccl.channels.communicator": ("Communicator",),
    "proxyccl.channels.execution_plans.plan": ("ExecutionPlan",),
    "proxyccl.channels.expert_parallel.config": ("EPConfig",),
    "proxyccl.channels.expert_parallel.context": ("DispatchCombineContext",),
    "proxyccl.channels.expert_parallel.dispatch_combine": ("DispatchCombine",),
    "proxyccl.channels.expert_parallel.layer": ("EPAll2AllLayer",),
    "proxyccl.channels.expert_parallel.layout": ("EPAllToAllLayoutDesc",),
    "proxyccl.channels.joining.bootstrap": ("Bootstrap", "MpiBootstrap", "ThreadBootstrap"),
    "proxyccl.channels.joining.file_bootstrap": ("FileBootstrap",),
    "proxyccl.channels.memory": ("RegisteredMemory",),
    "proxyccl.channels.proxy_channel": ("PortChannel", "ProxyChannel"),
    "proxyccl.channels.sm_channel": ("MemoryChannel", "SmChannel"),
    "proxyccl.channels.window": ("Window",),
    "proxyccl.device.arrays.array": ("Array",),
    "proxyccl.device.errors": (
        "AbortedError",
        "ArgumentError",
        "CapacityError",
        "ClosedError",
        "CommunicatorError",
        "CompileError",
        "ConcurrentCallError",
        "ContextLostError",
        "ExchangeError",
        "ExcludedError",
        "HandleTypeError",
        "HandlerError",
        "KernelError",
        "MismatchError",
        "PeerLostError",
        "ProtocolError",
        "ProxyCCLError",
        "ProxyLostError",
        "ResourceError",
        "RuntimeUnavailableError",
        "TransportError",
        "TriggerError",
        "UntrustedPathError",
        "WaitTimeoutError",
    ),
    "proxyccl.device.runtime": ("Event", "Runtime", "Stream"),
    "proxyccl.device.runtimes": ("open_runtime",),
    "proxyccl.proxy.service": ("ProxyService",),
    "proxyccl.proxy.trigger": ("Operation", "Trigger"),
    "proxyccl.proxy.verbs.devices": ("RdmaDevice", "RdmaGid", "RdmaPort", "rdma_devices"),
    "proxyccl.proxy.remote_options": ("FabricOptions", "RdmaOptions"),
    "proxyccl.torch_tensors.bootstrap": ("TorchBootstrap",),
}
"""The public names by the module that defines each."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Looks up a public name, or the version, at its first use. Thread-safe."""
        if name == "__version__":
            from importlib.metadata import version

            value = version("proxyccl")
        elif name in _MODULES:
            from importlib import import_module

            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
