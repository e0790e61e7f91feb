"""The cache of compiled kernels: loading, and files that are damaged or belong to another user."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proxyccl import UntrustedPathError
from proxyccl.device.build import compile_cache
from proxyccl.device.build.compile_cache import compiled_image, image_is_there, loaded_object, sealed, unsealed
from proxyccl.device.build.one_builder import one_builder
from proxyccl.device.host.runtime import HostRuntime

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def read(path: Path) -> bytes:
    content = path.read_bytes()
    if path.parent == Path("/proc/self/fd"):  # in memory
        return content
    whole = unsealed(content)
    assert whole is not None
    return whole


class Recorder:
    """A fake compiler that counts the calls of its `compile`."""

    runtime = "none"

    def __init__(self) -> None:
        self.calls = 0

    def version(self) -> str:
        return "1"

    def options(self, architecture: str) -> tuple[str, ...]:
        return ()

    def compile(self, source: str, options: tuple[str, ...] = ()) -> bytes:
        self.calls += 1
        return f"image of {source}".encode()

    def image(self) -> bytes:
        return compiled_image(self, "source", ())

    def object(self) -> bytes:
        """Gets an object from the cache as the host runtime does, but "loads" it by reading the file."""
        return loaded_object(("source",), lambda: self.compile("source"), read)


Use = Callable[[Recorder], bytes]
uses = pytest.mark.parametrize("use", [Recorder.image, Recorder.object], ids=["image", "object"])


@pytest.fixture
def compiler() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test a cache directory of its own, without PROXYCCL_CACHE."""
    monkeypatch.delenv("PROXYCCL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_unsaved", {})
    return tmp_path / "proxyccl"


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    changed = bytes([data[3] ^ 1])
    path.write_bytes(
        {
            "empty": b"",
            "cut": data[: len(data) // 2],
            "cut by one byte": data[:-1],
            "a bit flipped": data[:3] + changed + data[4:],
            "bytes added": data + b"\0",
            "of an older version": unsealed(data) or b"",
        }[kind]
    )


@uses
@pytest.mark.parametrize(
    "kind", ["empty", "cut", "cut by one byte", "a bit flipped", "bytes added", "of an older version"]
)
def test_a_damaged_file_is_compiled_again_once(
    cache: Path, compiler: Recorder, use: Use, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = use(compiler)
    path = only_file(cache)
    whole = path.read_bytes()
    damage(path, kind)
    assert not image_is_there(compiler, "source", ())
    assert [use(compiler), use(compiler)] == [made, made]
    assert compiler.calls == 2
    assert path.read_bytes() == whole
    assert f"the cached kernel {path} is damaged; it is compiled again" in caplog.text


def test_a_damaged_shared_object_is_never_mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void kernel(int* out) { *out = 21; }'
    HostRuntime().compile(source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))  # a new cache, because a loaded file must not be changed
    copied = shutil.copytree(cache, cache / "other" / "proxyccl")
    damage(only_file(Path(copied)), "cut")
    runtime, out = HostRuntime(), np.zeros(1, np.int32)
    runtime.compile(source)(1, 1, out)  # if the library mapped the short file, the process would get SIGBUS
    runtime.synchronize()
    assert out[0] == 21


@uses
def test_a_file_appears_with_all_of_its_contents(
    cache: Path, compiler: Recorder, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    sync, rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").encode())

    def only_then(source: str, target: str, **places: int) -> None:
        assert [Path(os.fsdecode(path)).name for path in synced] == [source]
        rename(source, target, **places)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", only_then)
    use(compiler)
    assert unsealed(only_file(cache).read_bytes()) == compiler.compile("source")


@uses
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_file_that_can_not_be_written_is_done_without(
    cache: Path, compiler: Recorder, use: Use, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(cache)):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(RuntimeWarning, match=rf"in {cache} can't be used \(.*{os.strerror(number)}.*set PROXYCCL_CACHE"):
        made = use(compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes only once
        assert use(compiler) == made
    assert compiler.calls == 1
    assert list(cache.iterdir()) == []


@uses
def test_no_directory_is_needed_at_all(tmp_path: Path, compiler: Recorder, use: Use) -> None:
    (tmp_path / "proxyccl").touch()
    with pytest.warns(RuntimeWarning, match="can't be used"):
        assert [use(compiler), use(compiler)] == [b"image of source"] * 2
    assert compiler.calls == 1


# -- other processes ---


@uses
def test_a_file_that_another_process_writes_meanwhile_does_no_harm(cache: Path, compiler: Recorder, use: Use) -> None:
    use(compiler)
    path = only_file(cache)
    whole = path.read_bytes()
    path.unlink()

    class Slow(Recorder):
        def compile(self, source: str, options: tuple[str, ...] = ()) -> bytes:
            path.write_bytes(whole)  # as if another process had compiled faster
            return super().compile(source, options)

    assert use(Slow()) == b"image of source"
    assert path.read_bytes() == whole


def test_an_object_that_is_removed_before_it_is_loaded_is_the_processs_own(cache: Path, compiler: Recorder) -> None:
    loaded: list[Path] = []

    def load(path: Path) -> bytes:
        loaded.append(path)
        if len(loaded) == 1:
            only_file(cache).unlink()
        return read(path)

    with pytest.warns(RuntimeWarning, match="can't be used"):
        found = loaded_object(("source",), lambda: compiler.compile("source"), load)
    assert found == b"image of source"
    assert compiler.calls == 1
    assert loaded[0] != loaded[1]


def test_a_path_stays_in_the_directory_that_was_checked(cache: Path, compiler: Recorder) -> None:
    def load(path: Path) -> bytes:
        cache.rename(cache.with_name("moved"))
        cache.mkdir()
        (cache / path.name).write_bytes(b"a stranger's")
        return read(path)

    assert loaded_object(("source",), lambda: compiler.compile("source"), load) == b"image of source"


# -- other users ---


def planted(cache: Path, use: Use) -> Path:
    """Puts a complete file with other contents into the cache, and returns its path."""
    use(Recorder())
    path = only_file(cache)
    path.write_bytes(sealed(b"planted"))
    return path


@uses
@pytest.mark.parametrize("kind", [pytest.param("another user's", marks=needs_root), "writable by others", "link"])
def test_a_file_that_others_could_have_made_is_compiled_again(
    cache: Path, compiler: Recorder, use: Use, kind: str
) -> None:
    path = planted(cache, use)
    if kind == "another user's":
        os.chown(path, STRANGER, STRANGER)
    elif kind == "link":
        path.rename(cache.with_name("elsewhere"))
        path.symlink_to(cache.with_name("elsewhere"))
    else:
        path.chmod(0o666)
    assert not image_is_there(compiler, "source", ())
    assert b"planted" not in use(compiler)
    assert compiler.calls == 1
    assert not path.is_symlink()
    assert path.stat().st_uid == os.geteuid()


def spoil(directory: Path, kind: str) -> str:
    """Makes a directory untrustworthy. Returns the reason."""
    if kind == "another user's":
        os.chown(directory, STRANGER, STRANGER)
        return f"{directory} belongs to user {STRANGER}"
    if kind == "link":
        directory.rename(directory.with_name("elsewhere"))
        directory.symlink_to(directory.with_name("elsewhere"))
        return f"{directory} is a link"
    directory.chmod(0o1777)
    return f"other users can write to {directory}"


directories = pytest.mark.parametrize(
    "kind", [pytest.param("another user's", marks=needs_root), "writable by others", "link"]
)


@uses
@directories
def test_a_directory_that_others_can_change_is_done_without(
    cache: Path, compiler: Recorder, use: Use, kind: str
) -> None:
    path = planted(cache, use)
    reason = spoil(cache, kind)
    assert not image_is_there(compiler, "source", ())
    with pytest.warns(RuntimeWarning, match=reason):
        assert b"planted" not in use(compiler)
    assert path.read_bytes() == sealed(b"planted")


@uses
@directories
def test_a_directory_that_others_can_change_is_refused_if_the_user_names_it(
    cache: Path, compiler: Recorder, use: Use, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(cache, use)
    reason = spoil(cache, kind)
    monkeypatch.setenv("PROXYCCL_CACHE", str(cache))
    for call in (lambda: use(compiler), lambda: image_is_there(compiler, "source", ())):
        with pytest.raises(UntrustedPathError, match=f"PROXYCCL_CACHE: {reason}"):
            call()
    assert compiler.calls == 0


def test_processes_that_need_a_file_wait_for_the_one_that_builds_it(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_PATH)
    path = tmp_path / "kernel.so"
    building, told = threading.Event(), []

    def second() -> None:
        building.wait()
        with one_builder(directory, path) as waited:
            told.append((waited, path.exists()))

    other = threading.Thread(target=second)
    other.start()
    with one_builder(directory, path) as waited:
        assert not waited
        building.set()
        other.join(0.2)
        assert other.is_alive()
        path.touch()
    other.join()
    os.close(directory)
    assert told == [(True, True)]
    assert list(tmp_path.iterdir()) == [path]
