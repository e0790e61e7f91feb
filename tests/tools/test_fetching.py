"""Several processes of a test run may fetch the same directory of Debian's packages at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.packages.debian import UnavailableError, fill_once


def test_one_of_many_fills_a_directory_that_appears_complete(tmp_path: Path) -> None:
    directory = tmp_path / "packages"
    several = threading.Barrier(2)

    def fill(partial: Path) -> None:
        (partial / "library").touch()
        with pytest.raises(threading.BrokenBarrierError):
            several.wait(0.5)
        assert not directory.exists()

    with ThreadPoolExecutor(3) as processes:
        for filled in [processes.submit(fill_once, directory, "library", fill) for _ in range(3)]:
            filled.result(30)
    assert (directory / "library").exists()


def test_a_directory_is_filled_again_for_other_contents_alone(tmp_path: Path) -> None:
    directory = tmp_path / "packages"
    filled = []

    def fill(partial: Path) -> None:
        filled.append(len(filled))
        (partial / str(filled[-1])).touch()

    for contents in ("old", "old", "new", "new"):
        fill_once(directory, contents, fill)
    assert filled == [0, 1]
    assert [path.name for path in directory.glob("[0-9]")] == ["1"]


def test_what_could_not_be_fetched_leaves_the_last_contents(tmp_path: Path) -> None:
    directory = tmp_path / "packages"
    fill_once(directory, "1", lambda partial: (partial / "1").touch())

    def fails(partial: Path) -> None:
        (partial / "2").touch()
        raise UnavailableError("no network")

    with pytest.raises(UnavailableError, match="no network"):
        fill_once(directory, "2", fails)
    assert [path.name for path in directory.glob("[0-9]")] == ["1"]
    fill_once(directory, "2", lambda partial: (partial / "2").touch())
    assert [path.name for path in directory.glob("[0-9]")] == ["2"]
