"""The runtime protocol: the operations that a device and its driver must offer.

Three runtimes implement the protocol: host (a CPU emulates the GPU), cuda and hip. The proxy's engine does not use the
protocol, but calls the driver directly, by the addresses in `calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxyccl.device.base_runtime import Allocations, DriverCalls, Event, Memory, PinnedMemory, Stream, StreamLike
from proxyccl.device.in_flight import LaunchRuntime

if TYPE_CHECKING:
    from proxyccl.device.build.ahead_of_time import Shipped
    from proxyccl.device.kernel import Kernel, Module

__all__ = ["Allocations", "DriverCalls", "Event", "Memory", "PinnedMemory", "Runtime", "Stream", "StreamLike"]


class Runtime(LaunchRuntime, Protocol):
    """A device, its driver, and its kernels."""

    _shipped: dict[Shipped, Kernel]

    def compile(
        self, source: str, *, options: tuple[str, ...] = (), include_dirs: tuple[str, ...] = (), control: int = 0
    ) -> Module:
        """Compiles a source, or loads its kernels from the cache on disk. Raises CompileError.

        `control` is the device address of the control block for waits that are given no control block: the control
        block's abort word and time-out end such waits, which store their error record in the control block. If
        `control` is 0, such waits end after 30 s without an error.
        """

    def release_control(self, control: int) -> None:
        """Detaches kernels from the control block for which they were compiled. None of the detached kernels may be
        running."""

    def shipped(
        self,
        file: str,
        kernel: str,
        dtype: str | None = None,
        op: str | None = None,
        *,
        compiled_only: bool = False,
    ) -> Kernel:
        """Returns a shipped kernel, or its instance for an element type and a reduction operation. With
        `compiled_only`, raises CompileError instead of compiling the kernel.
        """
        found = (file, kernel, dtype, op)
        known = self._shipped.get(found)
        if known is None:
            name = "_".join(filter(None, (kernel, dtype, op)))
            known = self._shipped.setdefault(found, self._load_shipped(name, found, compiled_only))
        return known

    def _load_shipped(self, name: str, kernel: Shipped, compiled_only: bool) -> Kernel: ...
