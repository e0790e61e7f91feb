"""Ranks that meet through a directory that all of them see. Neither a launcher nor a server is involved."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proxyccl.channels.survivors import Board
from proxyccl.device.errors import ArgumentError, WaitTimeoutError

_FIRST_PAUSE_SECONDS = 2e-4
_LONGEST_PAUSE_SECONDS = 0.02
_numbers = itertools.count()


class FileBootstrap:
    """A `Bootstrap` over a directory, of a local file system or of one that the hosts share.

    Args:
        directory: fresh for each job, as it holds what the ranks left; it is made if it is missing.
        rank: this rank's number.
        world_size: number of ranks.

    Raises:
        ArgumentError: the rank does not fit, or another rank or job of that number has used the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError("rank", f"must be from 0 to {world_size - 1}, not {rank!r}")
        self.rank = rank
        self.world_size = world_size
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._round = 0
        if not _write_once(self._directory / f"rank-{rank}", b""):
            raise ArgumentError("directory", f"{directory} was used by a rank {rank} before; expected a fresh one")

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`."""
        deadline = time.monotonic() + timeout
        number, self._round = self._round, self._round + 1
        files = [self._directory / f"{number}-{rank}" for rank in range(self.world_size)]
        _write_once(files[self.rank], data)
        pause = _FIRST_PAUSE_SECONDS
        while missing := [rank for rank, file in enumerate(files) if not file.exists()]:
            give_up()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"the bootstrap's all_gather over {self._directory}: ranks {missing} did not come in time",
                    rank=self.rank,
                    peer=missing[0],
                    operation="bootstrap",
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
        everyone = [file.read_bytes() for file in files]
        # All ranks have come to the round before this one, so they have read the one before that.
        (self._directory / f"{number - 2}-{self.rank}").unlink(missing_ok=True)
        return everyone

    def subset(self, members: Sequence[int], key: int) -> FileBootstrap:
        """The bootstrap of some ranks. See `Bootstrap`."""
        return FileBootstrap(self._directory / f"subset-{key:x}", list(members).index(self.rank), len(members))

    def board(self) -> Board:
        """A board in the directory. See `Bootstrap`."""
        return _FileBoard(self._directory, self.rank)

    def close(self) -> None:
        """The directory stays."""


class _FileBoard:
    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank

    def post(self, number: int, note: bytes) -> None:
        """See `Board`."""
        _write_once(self._directory / f"note-{number}-{self._rank}", note)

    def read(self, rank: int, number: int) -> bytes | None:
        """See `Board`."""
        return _read(self._directory / f"note-{number}-{rank}")

    def settle(self, number: int, answer: bytes) -> bytes:
        """See `Board`."""
        file = self._directory / f"answer-{number}"
        _write_once(file, answer)
        return file.read_bytes()

    def settled(self, number: int) -> bytes | None:
        """See `Board`."""
        return _read(self._directory / f"answer-{number}")


def _read(file: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return file.read_bytes()
    return None


def _write_once(file: Path, data: bytes) -> bool:
    """Makes a file with all of its contents at once, on network file systems too. False if it is there already."""
    draft = file.with_name(f".{file.name}-{os.getpid()}-{next(_numbers)}")
    draft.write_bytes(data)
    try:
        os.link(draft, file)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True
