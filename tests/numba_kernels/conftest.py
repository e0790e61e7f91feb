"""Skips the tests of kernels in Numba unless Numba-CUDA is installed."""

import importlib.util

if importlib.util.find_spec("numba_cuda") is None:
    collect_ignore_glob = ["test_*.py"]
