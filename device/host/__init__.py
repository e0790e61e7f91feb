"""The host runtime: runs kernels on the CPU, a fiber for each GPU thread.

The host runtime needs no GPU, and allows a race detector to check a kernel. Device memory is anonymous shared memory,
so that ranks can be processes and a killed one leaves no files.

The runtime is imported at its first use: the import, with numpy, takes 0.1 s, and some commands need only the compiler.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyccl.device.host.runtime import HostRuntime

__all__ = ["HostRuntime"]

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name as an attribute of this module

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from proxyccl.device.host import runtime

        return runtime.HostRuntime
