"""The host runtime: runs kernels on the CPU, a fiber for each GPU thread.

It runs without a GPU, and lets a race detector see a kernel. Device memory is anonymous shared memory, so that
ranks can be processes and a killed one leaves no files.

The runtime is imported when it is first used: with numpy it takes 0.1 s, and commands ask for the compiler alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyccl.device.host.runtime import HostRuntime

__all__ = ["HostRuntime"]

if not TYPE_CHECKING:  # a type checker would take any name for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from proxyccl.device.host import runtime

        return runtime.HostRuntime
