"""Runs pytest in the machine with Soft-RoCE: python run_tests.py ARGUMENTS...

Imports the library and pyverbs, which takes seconds in the virtual machine, only once, before tests fork processes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.proxy.verbs import pyverbs_api, registrations  # noqa: F401  (ranks with a device use these modules)
from support.forked import FORKS


def main() -> int:
    WatchThread.INTERVAL_MS = 100  # longer than the default, because the virtual machine is slow
    pyverbs_api.load()
    FORKS.begin_here()
    import pytest  # only after `begin_here`, because the forked template needs no pytest

    return pytest.main()


if __name__ == "__main__":
    sys.exit(main())
