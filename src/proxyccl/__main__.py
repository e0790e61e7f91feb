"""The `proxyccl` command: reads the arguments and calls what does the work. No logic of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from proxyccl.channels.collectives.operations import OPS
from proxyccl.channels.tools import bench_collectives, bench_ring, compile_kernels, doctor, info, options, top, trace
from proxyccl.device.arrays import reduction_dtypes
from proxyccl.device.dtypes import DTYPES
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.proxy.cores import parse_cores
from proxyccl.proxy.daemon import command
from proxyccl.proxy.daemon.client import daemon_process
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.daemon.server import DaemonOptions
from proxyccl.proxy.observe.tracing import MOST_TRIGGERS
from proxyccl.proxy.thread import IdlePolicy


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Which proxies are wanted."""
    parser.add_argument("--job", metavar="ID", help="of this job only (default: all)")
    parser.add_argument(
        "--daemon",
        nargs="?",
        const="",
        metavar="SOCKET",
        help="what runs in this node daemon only; without SOCKET in the one where `proxyccl daemon` listens by default",
    )


def _process(daemon: str | None) -> int | None:
    """The process that --daemon chooses, if it was given."""
    return None if daemon is None else daemon_process(socket_path(daemon))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proxyccl", description="Host-proxy communication for GPU kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info_parser = commands.add_parser("info", help="what this machine offers, and what to install for the rest")
    info_parser.add_argument("--json", action="store_true", help="print it for other programs to read")

    compile_parser = commands.add_parser("compile", help="compile shipped kernels now and not when they are first used")
    compile_parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help="for GPUs of this architecture, such as sm_90 or gfx942; may be given again (default: this machine's)",
    )

    daemon = commands.add_parser("daemon", help="run the proxies of this node's ranks, until SIGTERM")
    daemon.add_argument(
        "--socket", metavar="PATH", help="where to listen (default: PROXYCCL_DAEMON_SOCKET, else one of this user's)"
    )
    daemon.add_argument(
        "--threads", type=options.count, default=1, help="that run the proxies of all ranks (default %(default)s)"
    )
    daemon.add_argument("--cores", help="that they may run on: 0-3,8, or node:1 for a NUMA node's (default: any)")
    daemon.add_argument(
        "--metrics",
        type=options.port,
        metavar="PORT",
        help="show all proxies to Prometheus on loopback",
    )
    for name, what in (("spin", "spins"), ("yield", "then yields its core"), ("max-sleep", "then sleeps, at most")):
        default = getattr(IdlePolicy(), f"{name.replace('-', '_')}_us")
        daemon.add_argument(
            f"--{name}-us",
            type=float,
            default=default,
            metavar="US",
            help=f"an idle thread {what} (default {default:g})",
        )

    top_parser = commands.add_parser(
        "top",
        help="what the proxies on this machine do, live",
        epilog="busy: the part of the time in which a proxy's busiest thread had something to do. The ranks of a node "
        "daemon share its threads, so one that does nothing there shows as busy as those that it shares with.",
    )
    top_parser.add_argument("--once", action="store_true", help="one table, over one interval")
    top_parser.add_argument("--json", action="store_true", help="print it for other programs to read, a line each time")
    top_parser.add_argument(
        "--interval", type=options.seconds, default=1.0, metavar="S", help="between two looks (default %(default)s)"
    )
    _add_selection(top_parser)

    trace_parser = commands.add_parser("trace", help="record the triggers of a while, for Perfetto to show")
    trace_parser.add_argument(
        "-o", "--output", type=options.json_file, required=True, metavar="FILE", help="where to write it"
    )
    trace_parser.add_argument(
        "-t", "--seconds", type=options.seconds, default=1.0, help="to record, or until Ctrl-C (default %(default)s)"
    )
    trace_parser.add_argument("--ranks", type=options.ranks, help="such as 0,3 (default: all)")
    trace_parser.add_argument(
        "--most",
        type=options.count,
        default=MOST_TRIGGERS,
        metavar="N",
        help="triggers to keep, of all proxies together; those after them are counted (default %(default)s)",
    )
    _add_selection(trace_parser)

    doctor_parser = commands.add_parser(
        "doctor", help="from the reports of ranks that hang: who waits for whom, and why"
    )
    doctor_parser.add_argument(
        "reports",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="reports of ranks and node daemons, or directories with them (default: the newest of this user)",
    )
    doctor_parser.add_argument("--full", action="store_true", help="print the reports too")
    doctor_parser.add_argument("--json", action="store_true", help="print it for other programs to read")

    bench = commands.add_parser("bench", help="measure the trigger ring or a collective")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    ring = benchmarks.add_parser("ring", help="the trigger ring and the engine that drains it, in one process")
    ring.add_argument("-t", "--seconds", type=options.count, default=20, help="to spend, about (default %(default)s)")
    ring.add_argument("-n", "--triggers", type=options.count, help="in each timed run (default: what the time allows)")
    ring.add_argument("-r", "--repeats", type=options.count, default=7, help="of each timed run (default %(default)s)")
    ring.add_argument(
        "--fifo-size", type=options.count, default=1024, help="slots, a power of two (default %(default)s)"
    )
    ring.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results there")

    for name in bench_collectives.COLLECTIVES:
        reduction = name in bench_collectives.REDUCTIONS
        sub = benchmarks.add_parser(
            name, help="start it under mpiexec: mpiexec -n 4 python -m mpi4py $(which proxyccl) …"
        )
        sub.add_argument(
            "-b", "--min-bytes", type=options.size, default=1 << 10, metavar="SIZE", help="first size (default 1K)"
        )
        sub.add_argument(
            "-e", "--max-bytes", type=options.size, default=1 << 20, metavar="SIZE", help="last size (default 1M)"
        )
        sub.add_argument(
            "-f", "--step-factor", type=options.factor, default=4, help="between sizes (default %(default)s)"
        )
        dtypes = reduction_dtypes() if reduction else list(DTYPES)
        sub.add_argument("-d", "--dtype", choices=dtypes, default="float32", help="element type (default %(default)s)")
        if reduction:
            sub.add_argument("-o", "--op", choices=OPS, default="sum", help="reduction (default %(default)s)")
        sub.add_argument(
            "-a", "--algorithm", default="auto", help="a name, auto, or each for all (default %(default)s)"
        )
        sub.add_argument(
            "-n", "--iterations", type=options.count, default=20, help="most timed calls (default %(default)s)"
        )
        sub.add_argument(
            "-w", "--warm-up", type=options.count_or_none, default=2, help="calls before (default %(default)s)"
        )
        sub.add_argument("-t", "--seconds", type=options.count, default=8, help="to spend, about (default %(default)s)")
        sub.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0, 1 for a failure, 2 for wrong arguments."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        return 0
    return code


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "info":
            return info.run(as_json=parsed.json)
        if parsed.command == "compile":
            return compile_kernels.run(parsed.arch)
        if parsed.command == "daemon":
            return command.run(
                socket_path(parsed.socket),
                DaemonOptions(
                    threads=parsed.threads,
                    cores=parse_cores(parsed.cores) if parsed.cores is not None else None,
                    idle=IdlePolicy(parsed.spin_us, parsed.yield_us, parsed.max_sleep_us),
                ),
                parsed.metrics,
            )
        if parsed.command == "top":
            process = _process(parsed.daemon)
            return top.run(parsed.interval, parsed.job, process, once=parsed.once, as_json=parsed.json)
        if parsed.command == "trace":
            process = _process(parsed.daemon)
            return trace.run(parsed.output, parsed.seconds, parsed.job, parsed.ranks, process, parsed.most)
        if parsed.command == "doctor":
            return doctor.run(parsed.reports, full=parsed.full, as_json=parsed.json)
        if parsed.benchmark == "ring":
            return bench_ring.run(parsed.seconds, parsed.repeats, parsed.fifo_size, parsed.json, parsed.triggers)
        if parsed.min_bytes > parsed.max_bytes:
            parser.error(f"--min-bytes {parsed.min_bytes} is larger than --max-bytes {parsed.max_bytes}")
        return bench_collectives.run(
            bench_collectives.Options(
                collective=parsed.benchmark,
                min_bytes=parsed.min_bytes,
                max_bytes=parsed.max_bytes,
                step_factor=parsed.step_factor,
                dtype=parsed.dtype,
                op=getattr(parsed, "op", "sum"),
                algorithm=parsed.algorithm,
                iterations=parsed.iterations,
                warm_up=parsed.warm_up,
                seconds=parsed.seconds,
                json=parsed.json,
            )
        )
    except ArgumentError as error:
        parser.error(str(error))
    except ProxyCCLError as error:
        print(f"proxyccl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
