"""A bootstrap over a common directory, which needs neither a launcher nor a server."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxyccl.channels.joining.boards import BUNDLE, BoardBootstrap
from proxyccl.channels.joining.bootstrap import require_place
from proxyccl.channels.joining.survivors import Board, NoteBoard
from proxyccl.device.errors import ArgumentError, ExchangeError, ResourceError, UntrustedPathError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.process.private_directories import open_private, read_private


class FileBootstrap(BoardBootstrap):
    """A `Bootstrap` over a directory, on a local file system or on one that the hosts share.

    Only this user may have access to the directory, because the files contain the secret that authenticates the sockets
    between hosts. `all_gather` raises ResourceError if this rank's message can't be written, for example because the
    disk is full, and ExchangeError if a rank's message can't be read.

    Args:
        directory: a directory that no other job has used, because ranks do not remove their files. A missing directory
            is created, with its parents.
        rank: this rank's number.
        world_size: number of ranks.

    Raises:
        ArgumentError: `rank` is not below `world_size`, the directory can't be used, or a rank with this number has
            used the directory before.
        ResourceError: no file descriptor is left.
        UntrustedPathError: the directory belongs to another user, or other users can read it, or it is a link.
    """

    longest_pause = 0.02

    def __init__(self, directory: str | os.PathLike[str], rank: int, world_size: int) -> None:
        rank, world_size = require_place(rank, world_size)
        self._directory = _Directory(directory)
        self.where = str(self._directory)
        super().__init__(rank, world_size)
        try:
            fresh = self._directory.write_once(f"rank-{self.rank}", b"")
        except ResourceError as error:
            raise ArgumentError("directory", str(error)) from error
        if not fresh:
            raise ArgumentError(
                "directory", f"{directory} was used by a rank {rank} before; expected a fresh directory"
            )

    def subset(self, members: Sequence[int], key: int) -> FileBootstrap:
        """Returns the bootstrap of some ranks. See `Bootstrap`."""
        place = self._directory.path / f"subset-{key:x}"
        return FileBootstrap(place, list(members).index(self.rank), len(members))

    def withdraw(self) -> None:
        """See `Bootstrap`. After this call, a new `FileBootstrap` of this rank may use the directory."""
        super().withdraw()
        self._directory.remove(f"rank-{self.rank}")

    def board(self) -> Board:
        """Returns a board whose notes are files in the directory. See `Bootstrap`."""
        return NoteBoard(self._directory, self.rank)

    def _put(self, number: int, of: str, data: bytes, readers: Sequence[int]) -> None:
        if not self._directory.write_once(f"{number}-{of}", data):
            raise self._error(
                self.rank,
                f"{self.where} holds a message of this rank that it has not written; expected a fresh directory",
            )

    def _get(self, number: int, names: Sequence[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            try:
                message = self._directory.read(f"{number}-{name}")
            except (OSError, UntrustedPathError) as error:
                peer = 0 if name == BUNDLE else int(name)
                raise self._error(peer, f"rank {peer}'s message in {self.where} can't be read: {error}") from error
            if message is not None:
                found[name] = message
        return found

    def _remove(self, number: int, of: str) -> None:
        self._directory.remove(f"{number}-{of}")

    def _error(self, peer: int, message: str) -> ExchangeError:
        return ExchangeError(message, rank=self.rank, peer=peer, operation="bootstrap")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Directory:
    """A directory that only this user can access. The directory is held open, so that nobody can replace it.

    The object also holds a spare descriptor, which it closes before it opens a file, so that a process that has run out
    of descriptors can still report this error to its peers.

    Raises:
        ArgumentError: the directory can't be used.
        ResourceError: no file descriptor is left.
        UntrustedPathError: the directory belongs to another user, or other users can read it, or it is a link.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = Path(path).absolute()
            with naming_exhaustion(f"the directory {self.path}"):
                self._descriptor = open_private(self.path, secret=True, make=True)
                self._held = [self._descriptor]
                weakref.finalize(self, _close_all, self._held)
                self._held.append(os.dup(self._descriptor))
        except (TypeError, ValueError) as error:
            if isinstance(error, UntrustedPathError):
                raise
            raise ArgumentError("directory", f"expected a path, not {path!r}: {error}") from None
        except OSError as error:
            raise ArgumentError("directory", f"{path} can't be used: {error}") from None
        self._lock = threading.Lock()  # guards `_room`

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        with self._room(), contextlib.suppress(FileNotFoundError):
            return read_private(self._descriptor, self.path / name, secret=True)
        return None

    def write_once(self, name: str, data: bytes) -> bool:
        """Creates a file that has all of its contents as soon as it is visible, also on network file systems. Returns
        False if the file exists.

        Raises ResourceError.
        """
        draft = f".{name}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with self._room():
                descriptor = os.open(draft, flags, 0o600, dir_fd=self._descriptor)
                try:
                    with open(descriptor, "wb") as file:
                        file.write(data)
                    os.link(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
                except FileExistsError:
                    return False
                finally:
                    os.unlink(draft, dir_fd=self._descriptor)
        except OSError as error:
            raise ResourceError(f"{self.path / name} can't be written: {error.strerror or error}") from error
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        with self._lock:
            if len(self._held) > 1:
                os.close(self._held.pop())
            try:
                yield
            finally:
                # If `dup` fails because another thread has taken the freed descriptor, a later call of `_room` tries
                # again.
                with contextlib.suppress(OSError):
                    self._held.append(os.dup(self._descriptor))
