"""The namespaces of this process: containers have their own, and processes of different PID namespaces don't see each
other's numbers."""

from __future__ import annotations

import os


def pid_namespace() -> str:
    """Returns the PID namespace of this process; "" if /proc does not show it.

    /proc does not show it if /proc is missing or belongs to another namespace.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.readlink("/proc/self/ns/pid")
    except OSError:
        pass
    return ""


def proc_view() -> int:
    """Returns a number that is equal for processes that can open each other's entries in /proc; 0 if /proc does not
    show this process.

    Such processes have the same PID namespace, so a process id means the same process, and the same user namespace:
    entries of another can't be opened, even by the same user.

    The number has at most 61 bits: the system numbers namespaces from 0xe0000000 on.
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
    """Returns the number in a text such as "pid:[4026531836]"; 0 if the text contains none."""
    digits = link.partition("[")[2].rstrip("]")
    return int(digits) if digits.isdigit() else 0
