"""Finds directories for this user's files by the XDG rules, also for users without a home directory.

Containers often run as a user without a passwd entry, with no HOME, or with a home that can't be written.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

NAME = "proxyccl"


def user_directory(variable: str, below_home: str, purpose: str) -> Path:
    """Returns the directory for one kind of this library's files. The directory may be absent, and
    `open_private` may refuse an existing directory.

    Args:
        variable: the XDG variable that names the parent directory.
        below_home: the parent directory's path in the user's home, if the variable is not set.
        purpose: the kind of files, a part of the directory's name in ``$TMPDIR`` or ``/tmp`` if the home can't be used.
    """
    named = os.environ.get(variable, "")
    if os.path.isabs(named):  # the XDG rules ignore relative paths
        return Path(named) / NAME
    home = _home()
    if home is not None and _is_usable(home, home / below_home / NAME):
        return home / below_home / NAME
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"{NAME}-{os.geteuid()}-{purpose}"


def runtime_directory() -> Path:
    """Returns the directory for this user's sockets and files of running processes. The directory need not exist."""
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if named and os.path.isdir(named):
        return Path(named) / NAME
    return Path("/tmp") / f"{NAME}-{os.geteuid()}"


def _home() -> Path | None:
    named = os.environ.get("HOME", "")
    try:
        home = named or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # the passwd file has no entry for this user
        return None
    return Path(home) if os.path.isabs(home) and os.path.isdir(home) else None


def _is_usable(home: Path, directory: Path) -> bool:
    if os.path.isdir(directory):
        return True
    above = next(each for each in directory.parents if each == home or os.path.isdir(each))
    return os.access(above, os.W_OK | os.X_OK)
