"""`proxyccl daemon`: runs the proxies of this node's ranks, with servers for metrics, RAS clients and browsers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from proxyccl.proxy.daemon import command
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.daemon.server import DaemonOptions
from proxyccl.proxy.processes import parse_cores
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.tools import options


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="socket to listen at (default: PROXYCCL_DAEMON_SOCKET, else a socket of this user)",
    )
    parser.add_argument(
        "--threads",
        type=options.count,
        default=1,
        help="number of threads that run the proxies of all ranks (default %(default)s)",
    )
    parser.add_argument(
        "--cores", help="cores for the threads: 0-3,8, or node:1 for the cores of a NUMA node (default: any)"
    )
    parser.add_argument(
        "--metrics",
        type=options.port,
        metavar="PORT",
        help="serve metrics of all proxies for Prometheus at this port of the loopback interface",
    )
    parser.add_argument(
        "--ras",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="answer clients of NCCL's RAS subsystem at HOST:PORT, or a part of it (without ADDRESS: NCCL_RAS_ADDR, "
        "else localhost:28028)",
    )
    options.add_web(parser)
    few, enough = IdlePolicy(), IdlePolicy.where_cores_suffice()
    for name, what, default in (
        ("spin", "first spins for this time", f"{few.spin_us:g}"),
        ("yield", "then yields its core for this time", f"{few.yield_us:g}"),
        (
            "max-sleep",
            "then sleeps for at most this time at once",
            f"{few.max_sleep_us:g}; without any of the three, {enough.max_sleep_us:g} where cores are to spare",
        ),
    ):
        parser.add_argument(
            f"--{name}-us", type=float, metavar="US", help=f"an idle thread {what}, in µs (default {default})"
        )


def _idle(parsed: Namespace) -> IdlePolicy | None:
    names = ("spin_us", "yield_us", "max_sleep_us")
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    return IdlePolicy(**given) if given else None


def run(parsed: Namespace) -> int:
    served: list[command.Server] = []
    if parsed.metrics is not None:
        from proxyccl.proxy.observe import metrics
        from proxyccl.tools.communicators import device_memory

        served.append(metrics.serve(parsed.metrics, device_memory))
    if parsed.ras is not None:
        from proxyccl.tools import ras

        served.append(ras.serve(parsed.ras))
    if parsed.web is not None:
        from proxyccl.tools.web import server

        served.append(server.serve(parsed.web, 1.0))
    return command.run(
        socket_path(parsed.socket),
        DaemonOptions(
            threads=parsed.threads,
            cores=parse_cores(parsed.cores) if parsed.cores is not None else None,
            idle=_idle(parsed),
        ),
        served,
    )
