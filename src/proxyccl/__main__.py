"""The `proxyccl` command: parses the arguments and calls the tools. It holds no logic of its own.

A command imports what it uses itself, so that it starts no later because of the others.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from proxyccl.device.environment import warn_of_unknown
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.shown_text import shown_lines
from proxyccl.tools import options

if TYPE_CHECKING:
    from proxyccl.proxy.thread import IdlePolicy

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_command(commands: _Commands, name: str, what: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Adds a command. The list of commands and the command's own help both show its description."""
    return commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.", epilog=epilog)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select proxies."""
    parser.add_argument("--job", metavar="ID", help="only proxies of this job (default: all)")
    parser.add_argument(
        "--daemon",
        nargs="?",
        const="",
        metavar="SOCKET",
        help="only proxies in this node daemon; without SOCKET, in the one at the default socket",
    )


def _add_web(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--web",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="show the activity of this machine's ranks in a browser, at HOST:PORT, or a part of it (without ADDRESS: "
        "any free port of localhost); the URL that is printed has a token",
    )


def _process(daemon: str | None) -> int | None:
    """Process id of the daemon that --daemon selects; None without that option."""
    if daemon is None:
        return None
    from proxyccl.proxy.daemon.client import daemon_process
    from proxyccl.proxy.daemon.protocol import socket_path

    return daemon_process(socket_path(daemon))


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _info(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import info

    return info.run(as_json=parsed.json)


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help="architecture of the GPUs, such as sm_90 or gfx942; may be repeated (default: this machine's)",
    )


def _compile(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import compile_kernels

    return compile_kernels.run(parsed.arch)


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-t", "--seconds", type=options.seconds, default=10.0, help="time to spend, about (default %(default)s)"
    )


def _tune(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import tune

    return tune.run(parsed.seconds)


def _daemon_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyccl.proxy.thread import IdlePolicy

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
    _add_web(parser)
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


def _idle(parsed: argparse.Namespace) -> IdlePolicy | None:
    """The idle policy that options name; None if they name none."""
    from proxyccl.proxy.thread import IdlePolicy

    names = ("spin_us", "yield_us", "max_sleep_us")
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    return IdlePolicy(**given) if given else None


def _daemon(parsed: argparse.Namespace) -> int:
    from proxyccl.proxy.cores import parse_cores
    from proxyccl.proxy.daemon import command
    from proxyccl.proxy.daemon.protocol import socket_path
    from proxyccl.proxy.daemon.server import DaemonOptions

    served: list[command.Server] = []
    if parsed.metrics is not None:
        from proxyccl.proxy.observe import metrics

        served.append(metrics.serve(parsed.metrics))
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


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one table, over one interval")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each table")
    parser.add_argument(
        "--interval",
        type=options.seconds,
        default=1.0,
        metavar="S",
        help="seconds between tables (default %(default)s)",
    )
    _add_web(parser)
    _add_selection(parser)


def _top(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import top

    process = _process(parsed.daemon)
    if parsed.web is not None:
        from proxyccl.tools.web import server

        return server.run(parsed.web, parsed.interval, parsed.job, process)
    return top.run(parsed.interval, parsed.job, process, once=parsed.once, as_json=parsed.json)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyccl.proxy.observe.tracing import MOST_TRIGGERS

    parser.add_argument(
        "-o", "--output", type=options.json_file, required=True, metavar="FILE", help="file to write the trace to"
    )
    parser.add_argument(
        "-t",
        "--seconds",
        type=options.seconds,
        default=1.0,
        help="time to record (default %(default)s); Ctrl-C ends it earlier",
    )
    parser.add_argument("--ranks", type=options.ranks, help="only these ranks, such as 0,3 (default: all)")
    parser.add_argument(
        "--most",
        type=options.count,
        default=MOST_TRIGGERS,
        metavar="N",
        help="most triggers to keep, over all proxies; later ones are only counted (default %(default)s)",
    )
    _add_selection(parser)


def _trace(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import trace

    process = _process(parsed.daemon)
    return trace.run(parsed.output, parsed.seconds, parsed.job, parsed.ranks, process, parsed.most)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="reports of ranks and node daemons, or directories of reports (default: this user's newest)",
    )
    parser.add_argument("--full", action="store_true", help="print the reports too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import doctor

    return doctor.run(parsed.reports, full=parsed.full, as_json=parsed.json)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyccl.channels.collectives.table import OPS
    from proxyccl.device.arrays.dtypes import DTYPES, reduction_dtypes
    from proxyccl.tools import bench_collectives

    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    ring = _add_command(benchmarks, "ring", "measure the trigger ring and the engine that drains it, in one process")
    ring.add_argument("-t", "--seconds", type=options.count, default=20, help="time to spend (default %(default)s)")
    ring.add_argument(
        "-n", "--triggers", type=options.count, help="triggers in each timed run (default: what the time allows)"
    )
    ring.add_argument(
        "-r", "--repeats", type=options.count, default=7, help="repeats of each timed run (default %(default)s)"
    )
    ring.add_argument(
        "--fifo-size",
        type=options.count,
        default=1024,
        help="slots of the ring, a power of two (default %(default)s)",
    )
    ring.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")

    for name in bench_collectives.COLLECTIVES:
        reduction = name in bench_collectives.REDUCTIONS
        sub = _add_command(
            benchmarks,
            name,
            f"measure {name} beside MPI's, under mpiexec",
            f"Start it with: mpiexec -n 4 python -m mpi4py -m proxyccl bench {name}",
        )
        sub.add_argument(
            "-b", "--min-bytes", type=options.size, default=1 << 10, metavar="SIZE", help="first size (default 1K)"
        )
        sub.add_argument(
            "-e", "--max-bytes", type=options.size, default=1 << 20, metavar="SIZE", help="last size (default 1M)"
        )
        sub.add_argument(
            "-f", "--step-factor", type=options.factor, default=4, help="factor between sizes (default %(default)s)"
        )
        dtypes = reduction_dtypes() if reduction else list(DTYPES)
        sub.add_argument("-d", "--dtype", choices=dtypes, default="float32", help="element type (default %(default)s)")
        if reduction:
            sub.add_argument("-o", "--op", choices=OPS, default="sum", help="reduction (default %(default)s)")
        sub.add_argument(
            "-a", "--algorithm", default="auto", help="an algorithm, auto, or each for all (default %(default)s)"
        )
        sub.add_argument(
            "-n",
            "--iterations",
            type=options.count,
            default=20,
            help="most timed calls of a size (default %(default)s)",
        )
        sub.add_argument(
            "-w", "--warm-up", type=options.count_or_none, default=2, help="calls before those (default %(default)s)"
        )
        sub.add_argument("-t", "--seconds", type=options.count, default=8, help="time to spend (default %(default)s)")
        sub.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")


def _bench(parsed: argparse.Namespace) -> int:
    from proxyccl.tools import bench_collectives, bench_ring

    if parsed.benchmark == "ring":
        return bench_ring.run(parsed.seconds, parsed.repeats, parsed.fifo_size, parsed.json, parsed.triggers)
    if parsed.min_bytes > parsed.max_bytes:
        raise ArgumentError("--min-bytes", f"{parsed.min_bytes} is larger than --max-bytes {parsed.max_bytes}")
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


class _Command(NamedTuple):
    """A command: its description, its arguments, its call, and the text that ends its help."""

    what: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str | None = None


_COMMANDS = {
    "info": _Command("list devices and libraries, and how to install missing ones", _info_arguments, _info),
    "compile": _Command("compile shipped kernels now, before their first use", _compile_arguments, _compile),
    "tune": _Command(
        "measure the collectives' algorithms, and keep the fastest for later jobs of as many ranks",
        _tune_arguments,
        _tune,
        "Start it with: mpiexec -n 4 python -m mpi4py -m proxyccl tune",
    ),
    "daemon": _Command("run the proxies of this node's ranks, until SIGTERM", _daemon_arguments, _daemon),
    "top": _Command(
        "show the activity of this machine's proxies, live",
        _top_arguments,
        _top,
        "busy: the share of time in which a proxy's busiest thread had work. The ranks of a node daemon share "
        "its threads, so an idle rank there appears as busy as the ranks that share its thread. "
        "core: the CPU time of that thread as a share of a core; idle: its policy when it has no work.",
    ),
    "trace": _Command("record the proxies' triggers and agents' transfers for Perfetto", _trace_arguments, _trace),
    "doctor": _Command(
        "read the reports of ranks that hang, and say who waits for whom and why", _doctor_arguments, _doctor
    ),
    "bench": _Command("measure the trigger ring or a collective", _bench_arguments, _bench),
}


def command_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        chosen: the command that is called: the others are then listed without their arguments, whose defaults lie in
            modules that need not be imported. None for the arguments of all.
    """
    parser = argparse.ArgumentParser(prog="proxyccl", description="Host-proxy communication for GPU kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        added = _add_command(commands, name, command.what, command.epilog)
        if chosen is None or name == chosen:
            command.add_arguments(added)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; None for `sys.argv`.

    Returns:
        The exit code: 0, or 1 for a failure.

    Raises:
        SystemExit: with code 2 for wrong arguments, with 0 after ``--help``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: its encoding may lack characters of names
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it ends
        return 0
    return code


def _run(arguments: Sequence[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = command_parser(next((each for each in given if not each.startswith("-")), ""))
    parsed = parser.parse_args(arguments)
    if parsed.command != "info":  # which lists them
        warn_of_unknown()
    try:
        return _COMMANDS[parsed.command].run(parsed)
    except ArgumentError as error:
        parser.error(shown_lines(error))
    except ProxyCCLError as error:
        print(shown_lines(f"proxyccl: {error}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
