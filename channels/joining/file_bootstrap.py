"""Ranks that meet through a directory that all of them see, without a launcher or a server."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from proxyccl.channels.joining.bootstrap import require_place
from proxyccl.channels.joining.bundles import COLLECTED_FROM, bundle, unbundle
from proxyccl.channels.joining.survivors import Board
from proxyccl.channels.segment.rendezvous import ranks_missing
from proxyccl.device.errors import ArgumentError, ExchangeError, ResourceError, UntrustedPathError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.process.private_directories import open_private, read_private

_FIRST_PAUSE_SECONDS = 2e-4
_LONGEST_PAUSE_SECONDS = 0.02
_ALL = "all"
"""The name of a round's bundle, which the first rank writes."""


class FileBootstrap:
    """A `Bootstrap` over a directory, on a local file system or on one that the hosts share.

    The ranks' files must stay private, because they include the secret of the links between hosts. So only this user
    may have access to the directory.

    Args:
        directory: fresh for each job, because ranks leave their files in it. If it is missing, it is created, with
            its parents.
        rank: this rank's number.
        world_size: number of ranks.

    Raises:
        ArgumentError: the rank does not fit, the directory can't be used, or another rank or job of that number has
            used it.
        ResourceError: there are too few descriptors.
        UntrustedPathError: the directory belongs to another user, or other users can read it, or it is a link.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int, world_size: int) -> None:
        self.rank, self.world_size = require_place(rank, world_size)
        self._directory = _Directory(directory)
        self._round = 0
        try:
            fresh = self._directory.write_once(f"rank-{self.rank}", b"")
        except ResourceError as error:
            raise ArgumentError("directory", str(error)) from error
        if not fresh:
            raise ArgumentError("directory", f"{directory} was used by a rank {rank} before; expected a fresh one")

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`.

        Raises:
            ResourceError: this rank's message can't be written, for example because the disk is full.
            ExchangeError: a rank's message can't be read.
        """
        deadline = time.monotonic() + timeout
        number, self._round = self._round, self._round + 1
        if not self._directory.write_once(f"{number}-{self.rank}", data):
            raise ExchangeError(
                f"{self._directory} holds a message of this rank that it has not written; expected a fresh directory",
                rank=self.rank,
                peer=self.rank,
                operation="bootstrap",
            )
        collected = self.world_size >= COLLECTED_FROM
        if collected and self.rank:
            found = self._await(number, [_ALL], deadline, give_up)
            if found:
                everyone = unbundle(found[_ALL], self.world_size, str(self._directory), self.rank)
            else:
                everyone = self._await_ranks(number, deadline, give_up)
        else:
            everyone = self._await_ranks(number, deadline, give_up)
            if collected:
                self._directory.write_once(f"{number}-{_ALL}", bundle(everyone))
                self._directory.remove(f"{number - 2}-{_ALL}")
        # All ranks have reached the round before this one, so they have read the one before that.
        self._directory.remove(f"{number - 2}-{self.rank}")
        return everyone

    def _await_ranks(self, number: int, deadline: float, give_up: Callable[[], None]) -> list[bytes]:
        """The messages of all ranks."""
        names = [str(rank) for rank in range(self.world_size)]
        found = self._await(number, names, deadline, give_up)
        missing = [rank for rank, name in enumerate(names) if name not in found]
        if missing:
            raise ranks_missing(f"the bootstrap's all_gather over {self._directory}", missing, self.rank)
        return [found[name] for name in names]

    def _await(
        self, number: int, names: Sequence[str], deadline: float, give_up: Callable[[], None]
    ) -> dict[str, bytes]:
        """The messages of a round, by name, as far as they are there at the deadline."""
        found: dict[str, bytes] = {}
        missing = list(names)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            for name in missing:
                message = self._message(number, name)
                if message is not None:
                    found[name] = message
            missing = [name for name in missing if name not in found]
            if not missing:
                return found
            give_up()
            if time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    def _message(self, number: int, name: str) -> bytes | None:
        try:
            return self._directory.read(f"{number}-{name}")
        except (OSError, UntrustedPathError) as error:
            rank = 0 if name == _ALL else int(name)
            raise ExchangeError(
                f"rank {rank}'s message in {self._directory} can't be read: {error}",
                rank=self.rank,
                peer=rank,
                operation="bootstrap",
            ) from error

    def subset(self, members: Sequence[int], key: int) -> FileBootstrap:
        """The bootstrap of some ranks. See `Bootstrap`."""
        place = self._directory.path / f"subset-{key:x}"
        return FileBootstrap(place, list(members).index(self.rank), len(members))

    def withdraw(self) -> None:
        """See `Bootstrap`. Another object of this rank may use the directory then."""
        for number in range(self._round):
            self._directory.remove(f"{number}-{self.rank}")
            if not self.rank:
                self._directory.remove(f"{number}-{_ALL}")
        self._directory.remove(f"rank-{self.rank}")

    def board(self) -> Board:
        """A board in the directory. See `Bootstrap`."""
        return _FileBoard(self._directory, self.rank)

    def close(self) -> None:
        """The directory stays."""


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _FileBoard:
    def __init__(self, directory: _Directory, rank: int) -> None:
        self._directory, self._rank = directory, rank

    def post(self, number: int, note: bytes) -> None:
        """See `Board`."""
        self._directory.write_once(f"note-{number}-{self._rank}", note)

    def read(self, rank: int, number: int) -> bytes | None:
        """See `Board`."""
        return self._directory.read(f"note-{number}-{rank}")

    def settle(self, number: int, answer: bytes) -> bytes:
        """See `Board`."""
        name = f"answer-{number}"
        self._directory.write_once(name, answer)
        settled = self._directory.read(name)
        assert settled is not None  # nobody removes it
        return settled

    def settled(self, number: int) -> bytes | None:
        """See `Board`."""
        return self._directory.read(f"answer-{number}")


class _Directory:
    """A directory that only this user can access, held open: nobody can replace it.

    It holds a descriptor more, and gives that up for a file while one is open. So a rank that has too few descriptors
    can still say so.

    Raises:
        ArgumentError: it can't be used.
        ResourceError: there are too few descriptors.
        UntrustedPathError: it belongs to another user, or other users can read it, or it is a link.
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
        self._lock = threading.Lock()  # of `_room`

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        """A file's contents; None if there is no such file. Raises OSError and UntrustedPathError."""
        with self._room(), contextlib.suppress(FileNotFoundError):
            return read_private(self._descriptor, self.path / name, secret=True)
        return None

    def write_once(self, name: str, data: bytes) -> bool:
        """Makes a file with all of its contents at once, on network file systems too. False if it is there already.

        Raises ResourceError.
        """
        draft = f".{name}-{secrets.token_hex(8)}"
        with self._told(name), self._room():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(draft, flags, 0o600, dir_fd=self._descriptor)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                os.link(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            except FileExistsError:
                return False
            finally:
                os.unlink(draft, dir_fd=self._descriptor)
        return True

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Around code that has one file open."""
        with self._lock:
            if len(self._held) > 1:
                os.close(self._held.pop())
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # another thread has taken it; later it may be there again
                    self._held.append(os.dup(self._descriptor))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(f"{self.path / name} can't be written: {error.strerror or error}") from error
