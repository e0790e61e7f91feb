"""The host runtime: runs kernels on the CPU, a fiber for each GPU thread.

It runs without a GPU, and lets a race detector see a kernel. Device memory is anonymous shared memory, so that
ranks can be processes and a killed one leaves no files.
"""

from proxyccl.device.host.compiler import compiler_version, find_compiler
from proxyccl.device.host.runtime import HostRuntime, cpu_name
from proxyccl.device.host.shipped_libraries import ships_kernels

__all__ = ["HostRuntime", "compiler_version", "cpu_name", "find_compiler", "ships_kernels"]
