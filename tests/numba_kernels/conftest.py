"""Kernels in Numba, where Numba-CUDA is installed: `make test-numba`, and machines with GPUs that have it."""

import importlib.util

if importlib.util.find_spec("numba_cuda") is None:
    collect_ignore_glob = ["test_*.py"]
