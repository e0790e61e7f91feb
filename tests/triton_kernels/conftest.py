"""On the host runtime, kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os

from support.devices import ON_HOST

if importlib.util.find_spec("triton") is None:  # other test suites' environments have no triton
    collect_ignore_glob = ["test_*.py"]
elif ON_HOST:
    os.environ.setdefault("TRITON_INTERPRET", "1")
