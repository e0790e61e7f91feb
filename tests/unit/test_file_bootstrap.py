"""The directory of a FileBootstrap: its owner, and directories that the bootstrap must refuse."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, ExchangeError, FileBootstrap, ResourceError, UntrustedPathError

RANKS = 3


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "above" / "made"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def patient() -> None:
    """The check that a bootstrap makes while it waits; this one never ends the wait."""


def test_other_users_can_neither_enter_the_directory_nor_read_a_file(directory: Path) -> None:
    before = os.umask(0)
    try:
        bootstrap = FileBootstrap(directory, 0, 1)
        assert bootstrap.all_gather(b"secret", 5, patient) == [b"secret"]
        bootstrap.board().post(0, b"note")
        bootstrap.subset([0], 1)
    finally:
        os.umask(before)
    found = {path.name: mode(path) for path in (directory.parent, directory, *directory.iterdir())}
    folders = dict.fromkeys(("above", "made", "subset-1"), 0o700)
    assert found == folders | dict.fromkeys(("rank-0", "0-0", "note-0-0"), 0o600)


@pytest.mark.parametrize("loose", [0o755, 0o750, 0o777, 0o1777])
def test_a_directory_that_others_can_enter_is_refused(directory: Path, loose: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(loose)
    with pytest.raises(UntrustedPathError, match=f"directory: other users can (read|write to) {directory} "):
        FileBootstrap(directory, 0, RANKS)
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    os.chown(directory, 54321, 54321)
    with pytest.raises(UntrustedPathError, match=f"directory: {directory} belongs to user 54321"):
        FileBootstrap(directory, 0, RANKS)


def test_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    FileBootstrap(directory, 0, RANKS)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(UntrustedPathError, match=f"directory: {tmp_path}/link is a link"):
        FileBootstrap(tmp_path / "link", 1, RANKS)


@pytest.mark.parametrize("kind", ["readable by others", "link"])
def test_a_message_that_others_could_have_made_is_refused(directory: Path, kind: str) -> None:
    bootstrap = FileBootstrap(directory, 0, 2)
    message = directory / "0-1"
    if kind == "link":
        message.symlink_to(directory / "0-0")
    else:
        message.touch()
        message.chmod(0o644)
    with pytest.raises(ExchangeError, match=f"rank 1's message in {directory} can't be read: .*{message} ") as caught:
        bootstrap.all_gather(b"", 5, patient)
    assert (caught.value.rank, caught.value.peer) == (0, 1)


def test_nobody_can_put_another_directory_in_its_place(directory: Path) -> None:
    bootstrap = FileBootstrap(directory, 0, 2)
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    for rank in range(2):
        (directory / f"0-{rank}").write_bytes(b"a stranger's")
    other = FileBootstrap(directory.with_name("moved"), 1, 2)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(other.all_gather, b"a rank's", 5, patient)
        assert bootstrap.all_gather(b"own", 5, patient) == theirs.result() == [b"own", b"a rank's"]


def test_a_directory_is_for_one_job(directory: Path) -> None:
    bootstrap = FileBootstrap(directory, 1, RANKS)
    with pytest.raises(ArgumentError, match=r"directory: .* was used by a rank 1 before; expected a fresh directory"):
        FileBootstrap(directory, 1, RANKS)
    (directory / "0-1").touch()
    with pytest.raises(ExchangeError, match="holds a message of this rank that it has not written"):
        bootstrap.all_gather(b"", 5, patient)


def test_a_file_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArgumentError, match=f"directory: {place} can't be used: .*Not a directory"):
            FileBootstrap(place, 0, RANKS)


@pytest.mark.parametrize("directory", [None, 5, "a\0b", "/proc/nowhere/else", "x" * 300])
def test_what_can_not_be_a_directory_is_refused_by_name(directory: Any) -> None:
    with pytest.raises(ArgumentError, match="directory: ") as caught:
        FileBootstrap(directory, 0, RANKS)
    assert caught.value.argument == "directory"


@pytest.mark.parametrize(
    ("rank", "world_size", "refusal"),
    [
        (3, 3, "rank: must be an integer from 0 to 2, not 3"),
        (-1, 3, "rank: must be an integer from 0 to 2, not -1"),
        (0, 0, "world_size: must be an integer from 1 to 1048576, not 0"),
        ("0", 3, "rank: must be an integer from 0 to 2, not '0'"),
        (0.0, 3, "rank: must be an integer from 0 to 2, not 0.0"),
        (True, 3, "rank: must be an integer from 0 to 2, not True"),
        (None, 3, "rank: must be an integer from 0 to 2, not None"),
        (0, "3", "world_size: must be an integer from 1 to 1048576, not '3'"),
        (0, None, "world_size: must be an integer from 1 to 1048576, not None"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(directory: Path, rank: Any, world_size: Any, refusal: str) -> None:
    with pytest.raises(ArgumentError, match=refusal):
        FileBootstrap(directory, rank, world_size)
    assert not directory.exists()


def test_numpys_integers_are_numbers_of_ranks(directory: Path) -> None:
    bootstrap = FileBootstrap(directory, np.int64(0), np.uint8(1))  # type: ignore[arg-type]
    assert (type(bootstrap.rank), type(bootstrap.world_size)) == (int, int)
    assert bootstrap.all_gather(b"1", 5, patient) == [b"1"]


def test_a_full_disk_is_told_by_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = FileBootstrap(directory, 0, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(ResourceError, match=f"{directory}/0-0 can't be written: No space left"):
        bootstrap.all_gather(b"data", 5, patient)
    assert [path.name for path in directory.iterdir()] == ["rank-0"]
    with pytest.raises(ArgumentError, match=r"directory: .* can't be written: No space left"):
        FileBootstrap(directory.with_name("other"), 0, 1)
