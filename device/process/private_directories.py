"""Opens directories and files only if no user but this one and root can change them.

Checks and accesses use the same descriptor, so that nobody can replace a directory or file after its check. Parent
directories are not checked: a user who can rename a parent can only substitute a directory that passes the checks too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from proxyccl.device.errors import UntrustedPathError

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_ACCESSIBLE = stat.S_IRWXG | stat.S_IRWXO


def open_private(directory: Path, argument: str = "directory", *, secret: bool = False, make: bool = False) -> int:
    """Opens a directory whose contents only this user and root can change. Returns the descriptor, which the caller
    closes.

    Args:
        directory: the directory.
        argument: the argument's name in the error.
        secret: whether other users must also be unable to read or enter the directory.
        make: whether to make the directory and its parents if they are missing.

    Raises:
        UntrustedPathError: the directory belongs to another user, other users can write to it, or it is a link.
        OSError: the directory can't be opened. NotADirectoryError: the path is a file.
    """
    if make:
        _make(directory, 0o700 if secret else 0o755)
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and directory.is_symlink():
            reason = f"{directory} is a link, which may lead elsewhere later; name the directory that it leads to"
            raise UntrustedPathError(argument, reason) from None
        raise
    try:
        _require(os.fstat(descriptor), directory, argument, secret=secret)
    except UntrustedPathError:
        os.close(descriptor)
        raise
    return descriptor


def read_private(
    directory: int, path: Path, limit: int | None = None, *, argument: str = "file", secret: bool = False
) -> bytes:
    """Returns the contents of a file, if only this user and root can change the file.

    Args:
        directory: a descriptor of the file's directory.
        path: the file's path, of which only the name is used.
        limit: maximum number of bytes to read; None for all.
        argument: the argument's name in the error.
        secret: whether other users must also be unable to read the file.

    Raises:
        UntrustedPathError: the file belongs to another user, other users can write to it, or it is not a regular file.
        OSError: the file can't be read. FileNotFoundError: the file does not exist.
    """
    try:  # without O_NONBLOCK, opening a named pipe would block
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedPathError(argument, f"{path} is a link; expected a file") from None
        raise
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise UntrustedPathError(argument, f"{path} is not a regular file")
        _require(info, path, argument, secret=secret)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read() if limit is None else file.read(limit)
    finally:
        os.close(descriptor)


def write_private(directory: int, path: Path, data: bytes) -> None:
    """Writes a file atomically: writes a temporary file, synchronizes it to disk, and renames it. Raises OSError if the
    file can't be written.

    Args:
        directory: a descriptor of the file's directory.
        path: the file's path, of which only the name is used. An existing file is replaced.
        data: the contents.
    """
    draft = f".{path.name}-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o644, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)  # a crash after the rename may otherwise lose the contents
        os.rename(draft, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        with contextlib.suppress(FileNotFoundError):  # the file was renamed
            os.unlink(draft, dir_fd=directory)


def _make(directory: Path, mode: int) -> None:
    """Makes a directory and its missing parents, all with the same mode, unlike `Path.mkdir`."""
    for missing in reversed([each for each in (directory, *directory.parents) if not os.path.lexists(each)]):
        missing.mkdir(mode=mode, exist_ok=True)


def _require(info: os.stat_result, path: Path, argument: str, *, secret: bool) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(info.st_mode)
    if info.st_uid not in (0, user):
        owner = f"{path} belongs to user {info.st_uid}"
        raise UntrustedPathError(argument, f"{owner}; expected one of user {user}, who runs this process, or of root")
    if mode & _WRITABLE:
        raise UntrustedPathError(argument, f"other users can write to {path} (mode {mode:04o}); run: chmod go-w {path}")
    if secret and mode & _ACCESSIBLE:
        raise UntrustedPathError(argument, f"other users can read {path} (mode {mode:04o}); run: chmod go= {path}")
