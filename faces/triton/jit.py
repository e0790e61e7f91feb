"""How the device side is compiled: by Triton, or as plain Python where Triton's interpreter runs kernels.

Triton decides between the two when a function is decorated, by ``TRITON_INTERPRET``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from proxyccl.device.errors import RuntimeUnavailableError

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_OLDEST = (3, 4)
if VERSION < _OLDEST:
    raise RuntimeUnavailableError(f"proxyccl.triton needs Triton 3.4 or later, not {triton.__version__}")

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def _plain(function: Any) -> Any:
    return function


# A nested @triton.jit function costs the interpreter 5 ms a call, as it prepares the language anew. A kernel's call of
# a plain function costs nothing, and the language is prepared already.
jit: Callable[[Any], Any] = _plain if INTERPRETED else triton.jit
out_of_line: Callable[[Any], Any] = _plain if INTERPRETED else triton.jit(noinline=True)
"""For functions that rarely run but have many callers: not inlined, to keep compilation short."""
