"""Kernels in Numba, if Numba-CUDA is installed: in `make test-numba`, and on machines with GPUs that have it."""

import importlib.util

if importlib.util.find_spec("numba_cuda") is None:
    collect_ignore_glob = ["test_*.py"]
