"""The host runtime, which runs kernels on the CPU with one fiber per GPU thread.

Race detectors can check kernels on the host runtime. Device memory is anonymous shared memory, so that ranks can be
processes, and a killed process leaves no files.

`HostRuntime` is imported at its first use, because the import takes 0.1 s and some commands need only the compiler.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyccl.device.host.runtime import HostRuntime

__all__ = ["HostRuntime"]

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any attribute

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from proxyccl.device.host import runtime

        return runtime.HostRuntime
