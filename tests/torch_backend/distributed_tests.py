"""torch's own tests of torch.distributed (`DistributedTest`), run by this backend: ``make test-torch``.

Usage: ``BACKEND=proxyccl WORLD_SIZE=4 python tests/torch_backend/distributed_tests.py [option …] [test …]``.

The tests are part of torch.testing. This file also runs the tests that torch runs only with gloo. With
``BACKEND=gloo`` the tests run unchanged. At the end, the program lists skipped tests and the reasons.

On GPUs ``WORLD_SIZE`` may be at most the number of GPUs. ``--gpu`` selects the tests that use GPUs. ``--shard 1/3``
selects a third of the tests, so that three runs can share the work. ``--seconds`` limits a run's time; the program
lists the tests that it skips for lack of time. A hanging test ends after DISTRIBUTED_TESTS_DEFAULT_TIMEOUT seconds (an
environment variable of torch's; 300 by default).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections import defaultdict
from pathlib import Path
from unittest import mock

BACKEND = os.environ.setdefault("BACKEND", "proxyccl")
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="proxyccl-torch-"))
# Each test forks its ranks. A forked rank can use CUDA only if this process has not initialized CUDA. torch's test
# modules count GPUs when they are imported; with this setting torch counts them with NVML, without CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# Without these patches, the module below would initialize CUDA to find out whether GPUs can run Triton and Numba.
with (
    mock.patch("torch.utils._triton.has_triton", return_value=False),
    mock.patch("torch.testing._internal.common_utils.TEST_NUMBA", False),
):
    import torch.testing._internal.common_device_type

if BACKEND == "proxyccl":
    import proxyccl.torch  # noqa: F401  the import registers the backend, as torch before 2.15 needs

    DistTestCases.skip_collective["sendrecv anysource"].add(BACKEND)
    for feature in ("ddp", "subgroup", "gpu", "cuda", "plugin"):
        DistTestCases.backend_feature[feature].add(BACKEND)

# {part of a test's name: why this backend can't pass the test, although gloo can}
EXCEPTED: dict[str, str] = {
    "sparse": "a communicator reduces dense arrays",
}
if torch.cuda.is_available():
    _name = "it asserts that the backend is NCCL, or how its events are named"
    EXCEPTED |= {"ddp_profiling_execution_trace": _name, "ddp_profiling_torch_profiler": _name}
if hasattr(torch._C._distributed_c10d.Backend, "split"):
    EXCEPTED["ddp_logging_data_cpu"] = "torch 2.15 logs every backend that it does not ship as 'custom'"
else:
    EXCEPTED["monitored_barrier"] = "torch before 2.15 offers monitored_barrier for gloo alone"


def _tests() -> types.ModuleType:
    """Returns the module of torch's tests, changed so that this backend also runs the tests for gloo."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    # Between tests, ranks wait for each other. On a busy machine this may take more than torch's limit of 10 s, because
    # each test starts new ranks.
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
    """torch's tests, each of which forks its ranks.

    Attributes:
        deadline: the time (of `time.monotonic`, in seconds) after which tests are skipped.
    """

    deadline = float("inf")

    def setUp(self) -> None:
        if time.monotonic() > self.deadline:
            self.skipTest("the time of --seconds was over")
        for part, reason in EXCEPTED.items():
            if BACKEND == "proxyccl" and part in self._testMethodName:
                self.skipTest(reason)
        super().setUp()
        _require_forkable()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


@functools.cache
def _require_forkable() -> None:
    """Ends the program unless a forked process can use the GPUs that torch finds on this machine."""
    child = os.fork()
    if child == 0:
        try:
            if torch.cuda.is_available():
                torch.cuda.init()
        except BaseException:  # whatever the exception, the child must exit here
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("the tests can't run: something has started CUDA in this process, so its children can't use it")


def _uses_gpus(test: unittest.TestCase) -> bool:
    """Returns whether a test's source, decorators included, names GPUs."""
    function = inspect.unwrap(getattr(type(test), test._testMethodName))
    return re.search("cuda|gpu", inspect.getsource(function), re.IGNORECASE) is not None


def _selected(options: argparse.Namespace) -> list[unittest.TestCase]:
    loader = unittest.TestLoader()
    if options.tests:
        loader.testNamePatterns = [f"*{name}*" for name in options.tests]
    found: list[unittest.TestCase] = list(loader.loadTestsFromTestCase(TestBackend))  # type: ignore[arg-type]
    if options.gpu:
        found = [test for test in found if _uses_gpus(test)]
    shard, shards = options.shard
    return found[shard - 1 :: shards]


def _shard(text: str) -> tuple[int, int]:
    shard, shards = map(int, text.split("/"))
    if not 1 <= shard <= shards:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard such as 1/3")
    return shard, shards


def main() -> int:
    """Runs the tests that the command line selects. Returns the exit status."""
    parser = argparse.ArgumentParser(description="torch's own tests of torch.distributed, by this backend")
    parser.add_argument("tests", nargs="*", help="parts of tests' names")
    parser.add_argument("--gpu", action="store_true", help="only tests that use GPUs")
    parser.add_argument("--shard", type=_shard, default=(1, 1), help="such as 1/3: the first of three parts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no test after this time")
    options = parser.parse_args()
    TestBackend.deadline = time.monotonic() + options.seconds
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(_selected(options)))
    by_reason = defaultdict(list)
    for test, reason in result.skipped:
        by_reason[reason].append(test.id().rpartition(".")[2])
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"skipped {len(names)}: {reason}: {', '.join(names)}")
    for kind, found in (("failed", result.failures), ("ended by an error", result.errors)):
        if found:
            print(f"{kind} {len(found)}: {', '.join(test.id().rpartition('.')[2] for test, _ in found)}")
    return int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main())
