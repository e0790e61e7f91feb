"""Runs pytest with its arguments, in the machine with Soft-RoCE: python run_tests.py ARGUMENTS...

The tests and the processes that they start import the library and pyverbs once, before they part: it takes seconds in
there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.proxy.verbs import pyverbs_api, registrations  # noqa: F401  (what ranks with a device import)
from support.forked import FORKS


def main() -> int:
    """Runs them."""
    WatchThread.INTERVAL_MS = 100  # a look takes as much longer in there as everything
    pyverbs_api.load()
    FORKS.begin_here()
    import pytest  # the template does without

    return pytest.main()


if __name__ == "__main__":
    sys.exit(main())
