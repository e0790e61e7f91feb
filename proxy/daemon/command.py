"""`proxyccl daemon`: a daemon in the foreground, until it is told to end."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from proxyccl.proxy.daemon.server import Daemon, DaemonOptions, raise_descriptor_limit


def run(path: Path, options: DaemonOptions) -> int:
    """Serves until SIGTERM or SIGINT, then drains what clients have asked for. Returns the exit code.

    Raises:
        ArgumentError: an option is wrong.
        ResourceError: another daemon listens there.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_descriptor_limit()
    with Daemon(path, options) as daemon:

        def stop(number: int, _: FrameType | None) -> None:
            daemon.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        daemon.serve()
    return 0
