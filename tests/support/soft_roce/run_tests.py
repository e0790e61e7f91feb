"""Runs pytest with its arguments, in the machine with Soft-RoCE: python run_tests.py ARGUMENTS...

The imports of the library and of pyverbs take seconds in the machine, so they are made once, before the tests'
processes are forked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.proxy.verbs import pyverbs_api, registrations  # noqa: F401  (what ranks with a device import)
from support.forked import FORKS


def main() -> int:
    """Runs pytest. Returns its exit status."""
    WatchThread.INTERVAL_MS = 100  # the watcher, like everything, is slow in the machine
    pyverbs_api.load()
    FORKS.begin_here()
    import pytest  # not before, because the template needs no pytest

    return pytest.main()


if __name__ == "__main__":
    sys.exit(main())
