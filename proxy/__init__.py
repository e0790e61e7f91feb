"""The CPU side: rings, the C engine that drains them, and the service that runs the engine.

This package does not know about collectives.
"""

from proxyccl.device.ffi_types import realize_types as _realize_types
from proxyccl.proxy._engine import ffi as _ffi

_realize_types(_ffi)
