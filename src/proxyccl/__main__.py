"""The `proxyccl` command: parses the arguments and calls a tool.

Only the modules of the called command are imported, so that the command starts fast.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from proxyccl.device.environment import warn_of_unknown
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.shown_text import shown_lines


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"proxyccl {version('proxyccl')}")
        parser.exit()


_COMMANDS = {
    "info": "list devices and libraries, and how to install missing ones",
    "bench": "measure rings or collectives, in a clone of the repository",
    "compile": "compile shipped kernels now, before their first use",
    "tune": "measure the collectives' algorithms, and keep the fastest for later jobs of as many ranks",
    "daemon": "run the proxies of this node's ranks, until SIGTERM",
    "top": "show the activity of this machine's proxies, live",
    "trace": "record the proxies' triggers and agents' transfers for Perfetto",
    "doctor": "read the reports of ranks that hang, and say who waits for whom and why",
}
"""The commands, with descriptions. The module of `proxyccl.tools` with that name has the arguments and the call."""


def _tool(command: str) -> Any:
    return import_module(f"proxyccl.tools.{command}")


def command_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    Args:
        chosen: the name of the called command. The parser lacks the arguments of other commands, because their modules
            are not imported. If None, the parser has all commands' arguments.
    """
    parser = argparse.ArgumentParser(prog="proxyccl", description="Host-proxy communication for GPU kernels.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in _COMMANDS.items():
        added = commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
        if chosen is None or name == chosen:
            _tool(name).add_arguments(added)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the arguments without the program's name; None for those of `sys.argv`.

    Returns:
        The exit code: 0, or 1 for a failure.

    Raises:
        SystemExit: with code 2 for wrong arguments, with 0 after ``--help`` or ``--version``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr, because stdout's encoding may lack characters
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the pipe's reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 0
    return code


def _run(arguments: Sequence[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = command_parser(next((each for each in given if not each.startswith("-")), ""))
    parsed = parser.parse_args(arguments)
    if parsed.command != "info":  # `proxyccl info` itself lists unknown variables
        warn_of_unknown()
    try:
        return int(_tool(parsed.command).run(parsed))
    except ArgumentError as error:
        parser.error(shown_lines(error))
    except ProxyCCLError as error:
        print(shown_lines(f"proxyccl: {error}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
