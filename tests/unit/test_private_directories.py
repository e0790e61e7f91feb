"""Which directories and files the library accepts as this user's own."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from proxyccl import UntrustedPathError
from proxyccl.device.process.private_directories import open_private, read_private, write_private

STRANGER = 54321


def require_private(directory: Path, argument: str = "directory", **options: bool) -> None:
    os.close(open_private(directory, argument, **options))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir(mode=0o755)
    return tmp_path / "own"


def as_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files look as if they belonged to another user, who is not root."""
    info = os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        found = info(descriptor)
        return os.stat_result([*found[:4], STRANGER, *found[5:]])

    monkeypatch.setattr(os, "fstat", of_another)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711])
def test_a_directory_that_only_this_user_can_change_is_taken(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    require_private(directory)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(
        UntrustedPathError, match=rf"cache: other users can write to {directory} .*chmod go-w"
    ) as caught:
        require_private(directory, "cache")
    assert caught.value.argument == "cache"


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o711])
def test_a_secret_directory_is_one_that_others_can_not_read(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(UntrustedPathError, match=f"other users can read {directory} .*chmod go="):
        require_private(directory, secret=True)
    directory.chmod(0o700)
    require_private(directory, secret=True)


def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_stranger(monkeypatch)
    expected = f"{directory} belongs to user {STRANGER}; expected one of user {os.geteuid()}, .* or of root"
    with pytest.raises(UntrustedPathError, match=expected):
        require_private(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_directory_of_root_is_taken_and_one_of_a_third_user_is_not() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # other users can't enter pytest's tmp_path
        theirs, roots = Path(name, "theirs"), Path(name, "roots")
        Path(name).chmod(0o755)
        theirs.mkdir()
        roots.mkdir()
        os.chown(theirs, STRANGER, STRANGER)
        with pytest.raises(UntrustedPathError, match="belongs to user"):  # root also refuses
            require_private(theirs)
        os.seteuid(STRANGER + 1)
        try:
            require_private(roots)
            with pytest.raises(UntrustedPathError, match="belongs to user"):
                require_private(theirs)
        finally:
            os.seteuid(0)


def test_a_link_or_a_file_in_the_directorys_place_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    (tmp_path / "file").touch()
    with pytest.raises(UntrustedPathError, match="link is a link"):
        require_private(tmp_path / "link")
    with pytest.raises(NotADirectoryError, match="file"):
        require_private(tmp_path / "file", make=True)
    with pytest.raises(FileNotFoundError):
        require_private(tmp_path / "nothing")


def test_directories_that_are_missing_are_made_for_this_user(tmp_path: Path) -> None:
    require_private(tmp_path / "a" / "b", secret=True, make=True)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700, 0o700]
    before = os.umask(0)
    try:
        require_private(tmp_path / "c" / "d", make=True)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("c", "c/d")] == [0o755, 0o755]


def test_a_file_that_only_this_user_can_change_is_read(directory: Path) -> None:
    (directory / "file").write_bytes(b"contents")
    (directory / "file").chmod(0o644)
    descriptor = open_private(directory)
    try:
        assert read_private(descriptor, directory / "file") == b"contents"
        assert read_private(descriptor, directory / "file", 4) == b"cont"
        with pytest.raises(UntrustedPathError, match=r"other users can read .*file \(mode 0644\)"):
            read_private(descriptor, directory / "file", secret=True)
        with pytest.raises(FileNotFoundError):
            read_private(descriptor, directory / "nothing")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["writable", "another user's", "link", "pipe", "directory"])
def test_a_file_that_others_could_have_made_is_refused(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "file"
    if kind in ("writable", "another user's"):
        path.touch()
        path.chmod(0o666 if kind == "writable" else 0o600)
    elif kind == "link":
        (directory / "other").touch()
        path.symlink_to(directory / "other")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()
    descriptor = open_private(directory)
    try:
        if kind == "another user's":
            as_stranger(monkeypatch)
        with pytest.raises(UntrustedPathError, match=f"{path} "):
            read_private(descriptor, path)
    finally:
        os.close(descriptor)


def test_a_file_is_written_whole_or_not_at_all(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("no room")

    descriptor = open_private(directory)
    try:
        write_private(descriptor, directory / "file", b"old")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no room"):
            write_private(descriptor, directory / "file", b"new")
    finally:
        os.close(descriptor)
    assert [(path.name, path.read_text()) for path in directory.iterdir()] == [("file", "old")]
