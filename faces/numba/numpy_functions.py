"""Lets Numba-CUDA load its implementations of NumPy's functions with NumPy 2.5, before it compiles the first kernel.

Numba-CUDA 0.30 has one for ``numpy.row_stack``, which NumPy 2.5 removed: the first launch would raise AttributeError.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy


def load() -> None:
    """Loads them with ``numpy.row_stack`` in place, and removes it again. Later loads find them loaded."""
    if hasattr(numpy, "row_stack"):
        return
    namespace: Any = numpy
    namespace.row_stack = numpy.vstack
    try:
        import_module("numba.cuda.np.arrayobj")
    finally:
        del namespace.row_stack
