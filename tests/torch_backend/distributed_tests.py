"""torch's own tests of torch.distributed (`DistributedTest`), run by this backend: ``make test-torch``.

Usage: ``BACKEND=proxyccl WORLD_SIZE=4 python tests/torch_backend/distributed_tests.py [test …]``. torch ships the tests
in torch.testing, where some are for gloo alone; this file lets the backend into those. With ``BACKEND=gloo`` it runs
them as torch does. It ends with a list of what was skipped, and why.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
import unittest
from collections import Counter
from pathlib import Path

BACKEND = os.environ.setdefault("BACKEND", "proxyccl")
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="proxyccl-torch-"))

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

if BACKEND == "proxyccl":
    import proxyccl.torch  # noqa: F401  before torch 2.15 it is not found by itself

    DistTestCases.skip_collective["sendrecv anysource"].add(BACKEND)
    for feature in ("ddp", "subgroup", "gpu", "cuda", "plugin"):
        DistTestCases.backend_feature[feature].add(BACKEND)

# Tests that gloo passes and this backend can't, with the reason; by a part of their name.
EXCEPTED: dict[str, str] = {
    "sparse": "a communicator reduces dense arrays",
}
if hasattr(torch._C._distributed_c10d.Backend, "split"):
    _holder = "torch 2.15 wraps a Python backend's Work in one of C++, whose is_completed() stays False (PyWorkHolder)"
    EXCEPTED |= {"test_isend": _holder, "test_irecv": _holder}
    EXCEPTED["ddp_logging_data_cpu"] = "torch 2.15 logs every backend that it does not ship as 'custom'"
else:
    EXCEPTED["monitored_barrier"] = "torch before 2.15 offers monitored_barrier for gloo alone"


def _tests() -> types.ModuleType:
    """torch's tests, where what is for gloo alone is for this backend too."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    # Between two tests the ranks wait for each other: on a busy machine a new one may take longer than torch's 10 s.
    source = source.replace("def sync(cls, wait_for=None, timeout=10)", "def sync(cls, wait_for=None, timeout=120)")
    if BACKEND == "proxyccl":
        source = source.replace('BACKEND != "gloo"', 'BACKEND not in ("gloo", "proxyccl")')
        source = source.replace('BACKEND == "gloo"', 'BACKEND in ("gloo", "proxyccl")')
        source = source.replace('_is_available({"gloo"})', '_is_available({"gloo", BACKEND})')
        if torch.cuda.is_available():
            source = source.replace('BACKEND != "nccl"', 'BACKEND not in ("nccl", "proxyccl")')
    module = types.ModuleType("torch_distributed_tests")
    module.__file__ = spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


tests = _tests()
torch.set_num_threads(1)


class TestBackend(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    """Each test forks its ranks."""

    def setUp(self) -> None:
        for part, reason in EXCEPTED.items():
            if BACKEND == "proxyccl" and part in self._testMethodName:
                self.skipTest(reason)
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    names = sys.argv[1:]
    loader = unittest.TestLoader()
    if names:
        loader.testNamePatterns = [f"*{name}*" for name in names]
    result = unittest.TextTestRunner(verbosity=2).run(loader.loadTestsFromTestCase(TestBackend))
    for reason, count in Counter(reason for _, reason in result.skipped).most_common():
        print(f"skipped {count}: {reason}")
    sys.exit(not result.wasSuccessful())
