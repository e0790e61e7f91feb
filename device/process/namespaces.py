"""The namespaces of this process: containers have their own, and then processes don't see each other's numbers."""

from __future__ import annotations

import os


def pid_namespace() -> str:
    """The namespace that this process's ids of processes belong to; empty if /proc does not show it.

    That is the case without a /proc, and if it shows another namespace's processes.
    """
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.readlink("/proc/self/ns/pid")
    except OSError:
        pass
    return ""


def proc_view() -> int:
    """A number that processes share which may use each other's entries in /proc; 0 if /proc does not show this process.

    They have one PID namespace, where a number means the same process, and one user namespace: another one's entries
    are not to be opened, even by the same user.

    It has at most 61 bits: the system numbers namespaces from 0xe0000000 on.
    """
    processes, users = _number(pid_namespace()), _number(_link("user"))
    return (processes & 0x1FFFFFFF) << 32 | users if processes and users else 0


def network_namespace() -> int:
    """The number of this process's network namespace; 0 if /proc does not show it."""
    return _number(_link("net"))


def _link(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _number(link: str) -> int:
    """The number in a text such as "pid:[4026531836]"; 0 if there is none."""
    digits = link.partition("[")[2].rstrip("]")
    return int(digits) if digits.isdigit() else 0
