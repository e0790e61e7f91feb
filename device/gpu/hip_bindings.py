"""Imports hip-python, or raises RuntimeUnavailableError.

`library` returns the library that hip-python has loaded, for addresses of functions and for a call that hip-python
wraps wrongly.
"""

from __future__ import annotations

import ctypes
import functools
import os

from proxyccl.device.errors import RuntimeUnavailableError

try:
    from hip import hip, hiprtc
    from rocm.bindings.util.paths import get_library_path
except ImportError as error:
    raise RuntimeUnavailableError(
        f"hip: its Python package is missing ({error}); install it with: pip install 'proxyccl[hip]'"
    ) from None

__all__ = ["hip", "hiprtc", "library"]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library that hip-python calls."""
    return ctypes.CDLL(os.fsdecode(get_library_path("amdhip64")))
