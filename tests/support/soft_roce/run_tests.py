"""Runs pytest in the machine with Soft-RoCE: python run_tests.py ARGUMENTS...

Imports the library and pyverbs, which takes seconds in the machine, once before the tests' processes are forked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.proxy.verbs import pyverbs_api, registrations  # noqa: F401  (used by ranks with a device)
from support.forked import FORKS


def main() -> int:
    """Runs pytest. Returns its exit status."""
    WatchThread.INTERVAL_MS = 100  # longer, because the machine is slow
    pyverbs_api.load()
    FORKS.begin_here()
    import pytest  # after the fork of the template, which needs no pytest

    return pytest.main()


if __name__ == "__main__":
    sys.exit(main())
