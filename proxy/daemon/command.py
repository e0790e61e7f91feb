"""`proxyccl daemon`: a daemon in the foreground, until it is told to end."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from proxyccl.proxy.daemon.server import Daemon, DaemonOptions, raise_descriptor_limit
from proxyccl.proxy.observe.metrics import MetricsServer
from proxyccl.proxy.reports import on_signal


def run(path: Path, options: DaemonOptions, metrics_port: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then drains what clients have asked for. Returns the exit code.

    SIGUSR1 has it report and go on.

    Args:
        path: of the socket.
        options: the daemon's.
        metrics_port: of the loopback interface, where all proxies of this user are shown to Prometheus; None: nowhere.

    Raises:
        ArgumentError: an option is wrong.
        ResourceError: another daemon listens there, or somebody else at the port.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_descriptor_limit()
    with Daemon(path, options) as daemon, contextlib.ExitStack() as opened:
        if metrics_port is not None:
            server = opened.enter_context(MetricsServer(metrics_port))
            logging.getLogger("proxyccl.daemon").info("metrics at http://127.0.0.1:%d/metrics", server.port)

        def stop(number: int, _: FrameType | None) -> None:
            daemon.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if daemon.reporter.enabled:
            on_signal.install(daemon.reporter.write)
        daemon.serve()
    return 0
