"""Skips the tests of kernels in Numba unless Numba-CUDA is installed, as for `make test-numba`."""

import importlib.util

if importlib.util.find_spec("numba_cuda") is None:
    collect_ignore_glob = ["test_*.py"]
