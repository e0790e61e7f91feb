"""Imports cuda-bindings, or raises RuntimeUnavailableError."""

from __future__ import annotations

from proxyccl.device.errors import RuntimeUnavailableError

try:
    from cuda.bindings import driver as cu
    from cuda.bindings import nvrtc
except ImportError as error:
    raise RuntimeUnavailableError(
        f"cuda: its Python packages are missing ({error}); install them with: pip install 'proxyccl[cuda]'"
    ) from None

__all__ = ["cu", "nvrtc"]
