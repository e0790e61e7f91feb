"""ProxyCCL: host-proxy communication for GPU kernels.

A kernel pushes 128-bit triggers into a ring in pinned host memory. A proxy on the CPU drains the ring and moves the
data. This module contains only the public names. DESIGN.md describes the packages that define these names.

The first use of a name imports its module, so a program loads only the parts that it uses.
"""

from typing import TYPE_CHECKING

from proxyccl.channels import array_libraries

if TYPE_CHECKING:  # `X as X` exports a name to type checkers
    from proxyccl.channels.collectives.selection import Selector as Selector
    from proxyccl.channels.collectives.selection import SizeTable as SizeTable
    from proxyccl.channels.communicator import Communicator as Communicator
    from proxyccl.channels.execution_plans.plan import ExecutionPlan as ExecutionPlan
    from proxyccl.channels.expert_parallel.config import EPConfig as EPConfig
    from proxyccl.channels.expert_parallel.context import DispatchCombineContext as DispatchCombineContext
    from proxyccl.channels.expert_parallel.dispatch_combine import DispatchCombine as DispatchCombine
    from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer as EPAll2AllLayer
    from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc as EPAllToAllLayoutDesc
    from proxyccl.channels.joining.bootstrap import Bootstrap as Bootstrap
    from proxyccl.channels.joining.bootstrap import MpiBootstrap as MpiBootstrap
    from proxyccl.channels.joining.bootstrap import ThreadBootstrap as ThreadBootstrap
    from proxyccl.channels.joining.file_bootstrap import FileBootstrap as FileBootstrap
    from proxyccl.channels.memory import RegisteredMemory as RegisteredMemory
    from proxyccl.channels.proxy_channel import PortChannel as PortChannel
    from proxyccl.channels.proxy_channel import ProxyChannel as ProxyChannel
    from proxyccl.channels.sm_channel import MemoryChannel as MemoryChannel
    from proxyccl.channels.sm_channel import SmChannel as SmChannel
    from proxyccl.channels.window import Window as Window
    from proxyccl.device.arrays.array import Array as Array
    from proxyccl.device.errors import AbortedError as AbortedError
    from proxyccl.device.errors import ArgumentError as ArgumentError
    from proxyccl.device.errors import CapacityError as CapacityError
    from proxyccl.device.errors import ClosedError as ClosedError
    from proxyccl.device.errors import CommunicatorError as CommunicatorError
    from proxyccl.device.errors import CompileError as CompileError
    from proxyccl.device.errors import ConcurrentCallError as ConcurrentCallError
    from proxyccl.device.errors import ContextLostError as ContextLostError
    from proxyccl.device.errors import ExchangeError as ExchangeError
    from proxyccl.device.errors import ExcludedError as ExcludedError
    from proxyccl.device.errors import HandlerError as HandlerError
    from proxyccl.device.errors import HandleTypeError as HandleTypeError
    from proxyccl.device.errors import KernelError as KernelError
    from proxyccl.device.errors import MismatchError as MismatchError
    from proxyccl.device.errors import PeerLostError as PeerLostError
    from proxyccl.device.errors import ProtocolError as ProtocolError
    from proxyccl.device.errors import ProxyCCLError as ProxyCCLError
    from proxyccl.device.errors import ProxyLostError as ProxyLostError
    from proxyccl.device.errors import ResourceError as ResourceError
    from proxyccl.device.errors import RuntimeUnavailableError as RuntimeUnavailableError
    from proxyccl.device.errors import SuspendedError as SuspendedError
    from proxyccl.device.errors import TransportError as TransportError
    from proxyccl.device.errors import TriggerError as TriggerError
    from proxyccl.device.errors import UntrustedPathError as UntrustedPathError
    from proxyccl.device.errors import WaitTimeoutError as WaitTimeoutError
    from proxyccl.device.runtime import Event as Event
    from proxyccl.device.runtime import Runtime as Runtime
    from proxyccl.device.runtime import Stream as Stream
    from proxyccl.device.runtimes import open_runtime as open_runtime
    from proxyccl.proxy.remote_options import FabricOptions as FabricOptions
    from proxyccl.proxy.remote_options import RdmaOptions as RdmaOptions
    from proxyccl.proxy.service import ProxyService as ProxyService
    from proxyccl.proxy.trigger import Operation as Operation
    from proxyccl.proxy.trigger import Trigger as Trigger
    from proxyccl.proxy.verbs.devices import RdmaDevice as RdmaDevice
    from proxyccl.proxy.verbs.devices import RdmaGid as RdmaGid
    from proxyccl.proxy.verbs.devices import RdmaPort as RdmaPort
    from proxyccl.proxy.verbs.devices import rdma_devices as rdma_devices
    from proxyccl.torch_tensors.bootstrap import TorchBootstrap as TorchBootstrap

__version__: str

array_libraries.provide("torch: bootstrap", "proxyccl.torch_tensors.bootstrap")
array_libraries.provide("torch: gradients of experts", "proxyccl.torch_tensors.expert_gradients")
array_libraries.provide("torch: places of outputs", "proxyccl.torch_tensors.places")
array_libraries.provide("torch: pools", "proxyccl.torch_tensors.pools")
array_libraries.provide("torch: shardings", "proxyccl.torch_tensors.shardings")
array_libraries.provide("torch: untraced", "proxyccl.torch_tensors.untraced")

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
        "SuspendedError",
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
__all__ = sorted(_MODULES)  # noqa: PLE0605

if not TYPE_CHECKING:  # type checkers must not see this function, because they would accept any name

    def __getattr__(name: str) -> object:
        """Returns the value of a public name, or the version, at the first use. Thread-safe."""
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
