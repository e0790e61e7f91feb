"""The device's side: headers that kernels include, kernels that ship, and the runtimes that run them.

It does not know about ranks. This module re-exports how runtimes are opened; nothing inside the package imports it.
"""

from proxyccl.device._native import ffi as _ffi
from proxyccl.device.ffi_types import realize_types as _realize_types
from proxyccl.device.runtimes import RUNTIMES, find_runtime, open_compiler, open_driver, open_runtime

__all__ = ["RUNTIMES", "find_runtime", "open_compiler", "open_driver", "open_runtime"]

_realize_types(_ffi)
