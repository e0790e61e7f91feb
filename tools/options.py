"""Command-line arguments that several tools share, and types for argparse, which benchmarks also use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Parses a number of bytes: a whole number with or without a unit, such as 512, 32K or 4MiB."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size in bytes, such as 512, 32K or 4M, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def show_size(nbytes: int) -> str:
    """Formats a number of bytes in the largest unit that divides it: 4096 is "4 KiB". The inverse of `size`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def whole(least: int) -> Callable[[str], int]:
    """Returns an argument type for whole numbers that are at least `least`."""

    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, not {text!r}")
        return int(text)

    return number


count = whole(1)


def port(text: str) -> int:
    """Parses a TCP port; 0 means any free port."""
    if not text.isdigit() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, not {text!r}")
    return value


def ranks(text: str) -> tuple[int, ...]:
    """Parses a list of ranks, such as 0,3."""
    return tuple(map(whole(0), text.split(",")))


def json_file(text: str) -> Path:
    """Parses the path of a file in an existing directory."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing directory, not {text!r}")
    return path


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="ID", help="only proxies of this job (default: all)")
    parser.add_argument(
        "--daemon",
        nargs="?",
        const="",
        metavar="SOCKET",
        help="only proxies in this node daemon; without SOCKET, in the one at the default socket",
    )


def selected_process(daemon: str | None) -> int | None:
    """Returns the process id of the daemon that --daemon selects; None without that option."""
    if daemon is None:
        return None
    from proxyccl.proxy.daemon.connection import daemon_process
    from proxyccl.proxy.daemon.protocol import socket_path

    return daemon_process(socket_path(daemon))


def add_web(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--web",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="show the activity of this machine's ranks in a browser, at HOST:PORT, or a part of it (without ADDRESS: "
        "any free port of localhost); the URL that is printed has a token",
    )
