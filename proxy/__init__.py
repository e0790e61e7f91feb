"""The CPU's part of the library: rings, the C engine that drains the rings, and the service that runs the engine.

This package does not know how collectives work: it compares and counts calls, and executes their schedules.
"""

from proxyccl.device.ffi_types import realize_types as _realize_types
from proxyccl.proxy._engine import ffi as _ffi

_realize_types(_ffi)
