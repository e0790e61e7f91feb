"""Identifies the PID, user and network namespaces of this process."""

from __future__ import annotations

import os


def pid_namespace() -> str:
    """Returns an identifier of this process's PID namespace.

    Returns "" if /proc is missing or belongs to another PID namespace.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.readlink("/proc/self/ns/pid")
    except OSError:
        pass
    return ""


def proc_view() -> int:
    """Returns a number of at most 61 bits that is equal for processes that can open each other's entries in /proc.
    Returns 0 if /proc does not show this process.

    The number identifies the PID and the user namespace. The PID namespace's upper three bits are dropped, because
    Linux numbers namespaces from 0xe0000000 on.
    """
    processes, users = _number(pid_namespace()), _number(_link("user"))
    return (processes & 0x1FFFFFFF) << 32 | users if processes and users else 0


def network_namespace() -> int:
    """Returns the number of this process's network namespace; 0 if /proc does not show it."""
    return _number(_link("net"))


def _link(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _number(link: str) -> int:
    digits = link.partition("[")[2].rstrip("]")
    return int(digits) if digits.isdigit() else 0
