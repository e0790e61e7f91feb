"""Headers that kernels include, kernels that ship, and the runtimes that run kernels."""

from proxyccl.device._native import ffi as _ffi
from proxyccl.device.ffi_types import realize_types as _realize_types

_realize_types(_ffi)
